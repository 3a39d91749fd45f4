"""Find what suits the machine: threads, rows per forward pass, and torch.compile.

A `Machine` predicts the time of a step by arithmetic, and a step of a model that is thrown away
says how far off that is, so measuring never touches the run.
"""

import functools
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from gptmini.config.settings import Config
from gptmini.console import say, show_elapsed
from gptmini.errors import MachineError
from gptmini.machine import (
    Compute,
    can_choose_threads,
    estimate_training_bytes,
    find_compiler,
    get_total_memory,
)
from gptmini.model.gpt import GPT
from gptmini.model.kernels import softmax_
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import Memory, count_parameters, count_step_flops, estimate_memory
from gptmini.plan.estimates import Estimates, get_estimates

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
        return get_estimates(self.compute.device)

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
        """Predict the seconds of a step in which one process makes all passes."""
        return predict_seconds_per_step(config, self.compute)

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
            say(
                f"  threads   1: a step takes {seconds[1]:.3g} s with one, {seconds[0]:.3g} with "
                f"{computes[0].threads}; --threads sets another number"
            )
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

        def make_pass(compute: Compute) -> float:
            started = time.perf_counter()
            with compute.autocast():
                loss = model(tokens, tokens)
            loss.backward()
            compute.synchronize()
            return time.perf_counter() - started

        def make_update(compute: Compute) -> float:
            started = time.perf_counter()
            optimizer.step(train.lr)
            compute.synchronize()
            return time.perf_counter() - started

        growth = count_step_flops(config)[0] / count_step_flops(probe)[0]
        started = time.perf_counter()
        seconds: list[list[float]] = [[] for _ in computes]
        for turn in range(3):
            if turn == 2 and time.perf_counter() - started > MAX_PROBE_SECONDS:
                break
            for way, compute in enumerate(computes if turn else computes[-1:]):
                with compute.enter_training():
                    step = growth * make_pass(compute) + make_update(compute)
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

    def check_memory(self, parameters: int, sharded: bool = False) -> None:
        """MachineError if what training holds at least, besides activations, cannot fit."""
        device = self.compute.device
        needed = estimate_training_bytes(parameters, device, self.world_size, sharded)
        total = self.get_total_memory()
        if total < needed:
            raise MachineError(
                f"model: training {parameters:,} parameters needs {needed:,} bytes, {device.type} "
                f"has {total:,}; lower model.d_model, model.n_layer or the vocabulary"
            )


# -- rows per forward pass -------------------------------------------------------------------------


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
    total = machine.get_total_memory()
    device = machine.compute.device
    left = [
        total - estimate_training_bytes(count, device, size, config.train.shard)
        for size in world_sizes
    ]
    free = min((size for size in left if size > 0), default=0)

    def fits(size: int) -> bool:
        passing = machine.estimate_memory(config.with_train(micro_batch_size=size))
        return passing.activations <= free // 2

    sizes = [size for size in range(2, rows + 1) if shared_rows % size == 0]
    return max(filter(fits, sizes), default=1)


# -- the time of a step ----------------------------------------------------------------------------


def predict_seconds_per_step(config: Config, compute: Compute) -> float:
    """Predict the time of a step without torch.compile, by the speed of one matrix product.

    The product is one of the MLP's, so that a small model is not expected to compute like a large
    one.
    """
    train = config.train
    tokens = (train.micro_batch_size or train.batch_size) * config.seq_len
    product = measure_product_speed(config.model.d_model, config.model.d_ff, tokens, compute)
    return sum(count_step_flops(config)) / (SHARE_OF_PRODUCT_SPEED * product)


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


# -- torch.compile ---------------------------------------------------------------------------------


def compile_blocks(model: GPT) -> None:
    """Compile the blocks; one kernel serves them all, so depth adds no time to compile.

    On an accelerator the loss is compiled as well. The embedding is not: its backward pass would
    add in an order that changes from run to run. Raises MachineError if a CPU has no C++ compiler
    to call.
    """
    if model.device.type == "cpu" and not has_compiler():
        raise MachineError("train.compile: no C++ compiler found; use auto or off")
    options = _choose_compiler_options(model.device)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, options=options)
    model.softmax = torch.compile(model.softmax, dynamic=False, options=options)


def undo_compiling(model: GPT) -> None:
    """Make the blocks and the loss again what `compile_blocks` found."""
    for block in model.blocks:
        del block.forward
    model.softmax = softmax_


def _choose_compiler_options(device: torch.device) -> dict[str, Any] | None:
    """Keep g++ from removing stores that are needed, as versions 11 and 12 do with AVX512.

    Gradients of keys, in bfloat16 with RoPE and heads of 64, were NaN (scripts/LOG.md: Which kernel
    left NaN in compiled gradients, and why?). torch has no option for flags of the compiler; this
    one is appended to that of another.
    """
    from torch._inductor.cpp_builder import is_gcc  # noqa: PLC0415 - slow

    if device.type != "cpu" or not is_gcc():
        return None
    return {"cpp.enable_floating_point_contract_flag": "off -fno-dse"}


def is_worth_compiling(config: Config, seconds: float, machine: Machine) -> bool:
    """Decide whether to use torch.compile, if training takes these seconds without it."""
    if config.train.compile != "auto":
        return config.train.compile == "on"
    if machine.compute.device.type != "cpu":
        return machine.compute.device.type == "cuda"
    return seconds > MIN_SECONDS_TO_COMPILE and machine.has_compiler()


def has_compiler() -> bool:
    return find_compiler("g++", "clang++", "cl") is not None
