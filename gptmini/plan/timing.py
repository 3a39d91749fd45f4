"""Find what suits the machine: threads, rows per forward pass, and torch.compile.

A `Machine` predicts the time of a step by arithmetic, and a step of a model that is thrown away
says how far off that is, so measuring never touches the run.
"""

import functools
import math
import statistics
import time
from dataclasses import dataclass, replace

import torch

from gptmini.config.settings import Config
from gptmini.console import say, show_elapsed
from gptmini.errors import MachineError
from gptmini.machine import Compute, can_choose_threads, get_total_memory, has_compiler
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import Memory, count_parameters, count_step_flops, estimate_memory
from gptmini.plan.estimates import ACCELERATOR, CPU, Estimates

# Of the speed of a matrix product, what training reaches: norms and attention are no products.
SHARE_OF_PRODUCT_SPEED = 0.5
PRODUCT_SECONDS = 0.1  # for measuring that speed
# A pass is measured on as many tokens as are predicted to take so long.
PROBE_SECONDS = 0.15
MIN_PROBE_TOKENS = 64
MAX_PROBE_SECONDS = 1.0  # after which nothing is repeated
# One thread must be so much faster than all: others are busy for a while only, and on a quiet
# machine the same command must choose the same number.
MAX_SHARE_OF_TIME_WITH_ONE_THREAD = 0.8
# Training that takes longer is compiled on a CPU (scripts/LOG.md: When does compiling pay, and how
# far does one real step correct a prediction?).
MIN_SECONDS_TO_COMPILE = 300


@dataclass(frozen=True)
class Machine:
    """The machine to plan for: its clock and memory, and the time that a step takes on it.

    Planning learns of the hardware from here alone. Each of `world_size` processes computes its
    share of every batch, on a machine like this or on this one. `train.minutes` count from
    `started`, a time of time.perf_counter(). `slowness` is how many times as long as predicted a
    step takes; None until it was measured.
    """

    compute: Compute
    world_size: int = 1
    started: float = 0.0
    slowness: float | None = None

    @property
    def estimates(self) -> Estimates:
        return CPU if self.compute.device.type == "cpu" else ACCELERATOR

    def get_seconds_left(self, minutes: float) -> float:
        return 60 * minutes - (time.perf_counter() - self.started)

    def get_total_memory(self) -> int:
        """Get the bytes of memory of the device."""
        return get_total_memory(self.compute.device)

    def estimate_memory(self, config: Config) -> Memory:
        return estimate_memory(config, self.compute)

    def has_compiler(self) -> bool:
        return has_compiler()

    def estimate_seconds_per_step(self, config: Config) -> float:
        """Estimate the time of a step without torch.compile, shared by all processes."""
        rows = max(1, config.train.batch_size // self.world_size)
        return (self.slowness or 1.0) * self.predict_step(config.with_train(batch_size=rows))

    def predict_step(self, config: Config) -> float:
        """Predict the seconds of a step in which one process makes all passes.

        They follow from the speed of one matrix product. It is one of the MLP's, so that a small
        model is not expected to compute like a large one.
        """
        train = config.train
        tokens = (train.micro_batch_size or train.batch_size) * config.seq_len
        model = config.model
        product = measure_product_speed(model.d_model, model.d_ff, tokens, self.compute)
        return sum(count_step_flops(config)) / (SHARE_OF_PRODUCT_SPEED * product)

    def measure(self, config: Config) -> "Machine":
        """Return this machine with its number of threads, and how slow a step of a model is.

        Unless the threads were chosen before, a step is made with one and with all of them, and
        the faster way is kept. A machine that was measured stays as it is.
        """
        if self.slowness is not None:
            return self
        computes = [self.compute]
        if self.world_size == 1 and can_choose_threads(self.compute):
            computes = [replace(self.compute, threads=n) for n in (torch.get_num_threads(), 1)]
        with show_elapsed("timing a step"):
            seconds = self.time_step(config, computes)
        chosen = 0
        if seconds[-1] < MAX_SHARE_OF_TIME_WITH_ONE_THREAD * seconds[0]:
            chosen = 1
            say(f"  threads   1 of {computes[0].threads} CPU threads, as steps are faster with one")
        machine = replace(self, compute=computes[chosen])
        return replace(machine, slowness=seconds[chosen] / machine.predict_step(config))

    def time_step(self, config: Config, computes: list[Compute]) -> list[float]:
        """Time a step of a new model on dummy tokens, in which one process makes all passes.

        Each way of computing makes a pass of a few rows and an update, and once more, in turns, if
        that does not take long; returns the seconds of a whole step for each. What comes first
        allocates and is not counted.
        """
        probe = self._choose_probe(config)
        train = probe.train
        device = self.compute.device
        model = GPT(probe.model).to(device).train()
        model.gradient_checkpointing = train.gradient_checkpointing
        tokens = torch.zeros(train.batch_size, probe.seq_len, dtype=torch.long, device=device)
        optimizer = Optimizer(model, train, self.compute.dtype)

        growth = count_step_flops(config)[0] / count_step_flops(probe)[0]

        def make_step(compute: Compute) -> float:
            started = time.perf_counter()
            with compute.autocast():
                loss = model(tokens, tokens)
            loss.backward()
            compute.synchronize()
            passed = time.perf_counter()
            optimizer.step(train.lr)
            compute.synchronize()
            return growth * (passed - started) + time.perf_counter() - passed

        started = time.perf_counter()
        seconds: list[list[float]] = [[] for _ in computes]
        for turn in range(3):
            if turn == 2 and time.perf_counter() - started > MAX_PROBE_SECONDS:
                break
            for way, compute in enumerate(computes if turn else computes[-1:]):
                with compute.enter_training():
                    step = make_step(compute)
                if turn:
                    seconds[way].append(step)
        return [statistics.mean(steps) for steps in seconds]

    def _choose_probe(self, config: Config) -> Config:
        """Choose so few rows, or so short a one, that a pass takes PROBE_SECONDS."""
        train = config.train
        share = PROBE_SECONDS / self.predict_step(config)
        tokens = max(MIN_PROBE_TOKENS, int(share * train.batch_size * config.seq_len))
        length = min(config.seq_len, tokens)
        sizes = [self.world_size]
        size = train.micro_batch_size or choose_micro_batch_size(config, self, sizes)
        rows = min(size, tokens // length)
        return config.with_train(batch_size=rows, micro_batch_size=None, seq_len=length)

    def get_free_memory(self, parameters: int, sharded: bool) -> int:
        """Get the bytes that weights, gradients and AdamW's two moments leave; negative: too few.

        All are in float32. Processes have a GPU each, but share the memory of a CPU; sharded, they
        hold one model together.
        """
        processes_on_device = self.world_size if self.compute.device.type == "cpu" else 1
        shards = self.world_size if sharded else 1
        return self.get_total_memory() - 16 * parameters * processes_on_device // shards

    def check_memory(self, parameters: int, sharded: bool = False) -> None:
        """MachineError if what training holds at least, besides activations, cannot fit."""
        free = self.get_free_memory(parameters, sharded)
        if free < 0:
            total = self.get_total_memory()
            raise MachineError(
                f"model: training {parameters:,} parameters needs {total - free:,} bytes, "
                f"{self.compute.device.type} has {total:,}; lower model.d_model, model.n_layer or "
                f"the vocabulary"
            )


@functools.cache
def measure_product_speed(D: int, F: int, rows: int, compute: Compute) -> float:
    """Measure the operations per second of products of (rows, D) and (D, F)."""
    fastest = math.inf
    with compute.enter_training():
        inputs = torch.ones(rows, D, dtype=compute.dtype, device=compute.device)
        weights = torch.ones(D, F, dtype=compute.dtype, device=compute.device)
        end = time.perf_counter() + PRODUCT_SECONDS
        while fastest == math.inf or time.perf_counter() < end:
            started = time.perf_counter()
            torch.mm(inputs, weights)
            compute.synchronize()
            fastest = min(fastest, time.perf_counter() - started)
    return 2 * rows * D * F / fastest


def choose_micro_batch_size(config: Config, machine: Machine, world_sizes: list[int]) -> int:
    """Choose the largest divisor of a process's rows that fits half the memory and a CPU's caches.

    It divides the rows of each process on each of these numbers of them, and fits where the model
    does.
    """
    shared_rows = config.train.batch_size // max(world_sizes)
    rows = shared_rows
    most_tokens = machine.estimates.max_tokens_per_pass
    if most_tokens is not None:
        rows = min(rows, max(1, most_tokens // config.seq_len))
    count = count_parameters(config.model)
    machines = [replace(machine, world_size=size) for size in world_sizes]
    left = [each.get_free_memory(count, config.train.shard) for each in machines]
    free = min((size for size in left if size > 0), default=0)

    def fits(size: int) -> bool:
        passing = machine.estimate_memory(config.with_train(micro_batch_size=size))
        return passing.activations <= free // 2

    sizes = [size for size in range(2, rows + 1) if shared_rows % size == 0]
    return max(filter(fits, sizes), default=1)


def is_worth_compiling(config: Config, seconds: float, machine: Machine) -> bool:
    """Decide whether to use torch.compile, if training takes these seconds without it."""
    if config.train.compile != "auto":
        return config.train.compile == "on"
    if machine.compute.device.type != "cpu":
        return machine.compute.device.type == "cuda"
    return seconds > MIN_SECONDS_TO_COMPILE and machine.has_compiler()
