"""Find what suits the machine: rows per forward pass, shards, and torch.compile where it pays.

A `Machine` knows the memory of a step and its time. The time is measured with a model that is
thrown away, so measuring never touches the run.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from gptmini.config.settings import Config
from gptmini.console import say, show_elapsed, warn
from gptmini.errors import ConfigError, GptminiError, MachineError
from gptmini.machine import Compute, estimate_training_bytes, find_compiler, get_total_memory
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import (
    Memory,
    count_parameters,
    count_parameters_by_part,
    count_training_flops,
    estimate_memory,
)
from gptmini.plan.cuda_graph import create_loss
from gptmini.plan.estimates import Estimates, get_estimates

MAX_EXACT_WORLD_SIZE = 8  # up to which train.reduce=auto is exact
# Of the speed of a matrix product, what training reaches: norms and attention are no products.
SHARE_OF_PRODUCT_SPEED = 0.5
PRODUCT_SECONDS = 0.3  # for measuring that speed
# For timing a step before it is known whether compiling may pay.
MAX_TIMING_SECONDS = 2.0
# For the sample and the checkpoint that follow an evaluation.
SECONDS_AFTER_EVALUATION = 0.5


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: its forward and backward passes, and the optimizer's update."""

    passes: float
    update: float


@dataclass(frozen=True)
class Machine:
    """The machine to plan for: its clock and memory, and the time that a step takes on it.

    Planning learns of the hardware from here alone. Each of `world_size` processes computes its
    share of every batch, on a machine like this or on this one. `train.minutes` count from
    `started`, a time of time.perf_counter().
    """

    compute: Compute
    world_size: int = 1
    started: float = 0.0

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

    @show_elapsed("timing a step")
    def time_step(
        self, config: Config, *, compiled: bool = False, limit: float = math.inf
    ) -> StepTime:
        """Time a step of a new model on dummy tokens, in which one process makes all passes.

        The first pass allocates and is not counted. After `limit` seconds nothing is repeated: the
        first pass and update may then be all there is.
        """
        timing_started = time.perf_counter()
        compute = self.compute
        with compute.enter_training():
            train = config.train
            size = train.micro_batch_size or choose_micro_batch_size(config, self)
            model = GPT(config.model).to(compute.device).train()
            model.gradient_checkpointing = train.gradient_checkpointing
            if compiled:
                compile_blocks(model)
            compute_loss = create_loss(model, compute.device)
            tokens = torch.zeros(size, config.seq_len, dtype=torch.long, device=compute.device)
            passes = []
            for _ in range(3):
                started = time.perf_counter()
                with compute.autocast():
                    mean = compute_loss(tokens, tokens)
                mean.backward()
                compute.synchronize()
                passes.append(time.perf_counter() - started)
                if time.perf_counter() - timing_started > limit:
                    break
            if compiled and not has_finite_gradients(model):
                raise ArithmeticError("compiled code computes gradients that are not finite")
            optimizer = Optimizer(model, train, compute.dtype)
            updates = []
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)
                started = time.perf_counter()
                optimizer.step(train.lr)
                compute.synchronize()
                updates.append(time.perf_counter() - started)
                if time.perf_counter() - timing_started > limit:
                    break
        fastest_pass = min(passes[1:] or passes)
        return StepTime(fastest_pass * train.batch_size / size, min(updates))

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


def split_batch(config: Config, world_size: int, is_micro_batch_stated: bool) -> Config:
    """Check that processes can share every batch equally, and choose how they add gradients.

    They add them exactly where that costs little and every process has the whole model. A
    micro-batch that does not divide a process's rows is chosen again unless it was stated. Raises
    ConfigError for what does not divide, and for exact sums of shards.
    """
    train = config.train
    rows, rest = divmod(train.batch_size, world_size)
    if rest:
        nearest = [count * world_size for count in (rows, rows + 1) if count > 0]
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows do not divide among {world_size} "
            f"processes; use {' or '.join(map(str, nearest))}"
        )
    size = train.micro_batch_size
    if size is not None and rows % size:
        problem = f"{size} does not divide the {rows} rows of each of {world_size} processes"
        if is_micro_batch_stated:
            raise ConfigError(f"train.micro_batch_size: {problem}; use a divisor of {rows}")
        warn(f"train.micro_batch_size: {problem}; choosing another")
        config = config.with_train(micro_batch_size=None)
    is_power_of_two = world_size & (world_size - 1) == 0
    if train.reduce == "exact" and not is_power_of_two:
        raise ConfigError(
            f"train.reduce: exact needs 1, 2, 4 or 8 processes, not {world_size}; use fast"
        )
    is_sharded = train.shard and world_size > 1
    if train.reduce == "exact" and is_sharded:
        raise ConfigError("train.reduce: exact needs whole models, not train.shard; use fast")
    if train.reduce == "auto":
        few = is_power_of_two and 1 < world_size <= MAX_EXACT_WORLD_SIZE
        is_exact = few and not is_sharded
        config = config.with_train(reduce="exact" if is_exact else "fast")
    return config


def choose_micro_batch_size(config: Config, machine: Machine) -> int:
    """Choose the largest divisor of a process's rows that fits half the memory and a CPU's caches.

    With `train.reduce: exact` the same number is chosen for 1 to 8 processes: it divides the rows
    of each, and fits on all numbers of processes on which the model does.
    """
    world_sizes = list_equivalent_world_sizes(config, machine.world_size)
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


def list_equivalent_world_sizes(config: Config, world_size: int) -> list[int]:
    """List the numbers of processes that must make the same bits as `world_size` of them."""
    if config.train.reduce != "exact":
        return [world_size]
    powers = [2**k for k in range(MAX_EXACT_WORLD_SIZE.bit_length())]  # 1, 2, 4, 8
    divisors = [size for size in powers if config.train.batch_size % size == 0]
    return sorted({world_size, *divisors})


def shard_if_needed(config: Config, machine: Machine, is_reduce_open: bool) -> Config:
    """Shard a model that does not fit whole; raises MachineError if it does not fit at all.

    ConfigError if gradients are to be added exactly, for which every process needs it whole.
    """
    count = count_parameters(config.model)
    world_size = machine.world_size
    whole = estimate_training_bytes(count, machine.compute.device, world_size, sharded=False)
    if world_size > 1 and whole > machine.get_total_memory():
        if config.train.reduce == "exact" and not is_reduce_open:
            raise ConfigError(
                "train.reduce: exact needs whole models, which do not fit; use fast, and "
                "train.shard: true"
            )
        config = config.with_train(shard=True, reduce="fast")
    if world_size > 1 and config.train.shard and config.train.compile == "auto":
        config = config.with_train(compile="off")
    machine.check_memory(count, config.train.shard)
    return config


# -- the time of a step ----------------------------------------------------------------------------


def has_finite_gradients(model: GPT) -> bool:
    """Check that a pass left no infinity and no NaN, as miscompiled kernels may."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return all(bool(each.isfinite().all()) for each in gradients if each is not None)


def estimate_evaluation_seconds(config: Config, per_step: float, held_out: int) -> float:
    """Estimate the time of an evaluation on `held_out` tokens, or on `train.eval_tokens` of them.

    Reading without gradients takes about a quarter of the time of a step on as many tokens.
    """
    tokens_read = min(held_out, config.train.eval_tokens or held_out)
    tokens_per_step = config.train.batch_size * config.seq_len
    return SECONDS_AFTER_EVALUATION + per_step / 4 * tokens_read / tokens_per_step


def predict_seconds_per_step(config: Config, compute: Compute) -> float:
    """Predict the time of a step without torch.compile, by the speed of one matrix product.

    The product is one of the MLP's, so that a small model is not expected to compute like a large
    one. Muon makes its updates of products, too: 30 operations for each weight and row.
    """
    train = config.train
    tokens = (train.micro_batch_size or train.batch_size) * config.seq_len
    speed = SHARE_OF_PRODUCT_SPEED * measure_product_speed(config, tokens, compute)
    per_token = count_training_flops(config.model, config.seq_len, train.gradient_checkpointing)
    flops = train.batch_size * config.seq_len * per_token
    if train.optimizer == "muon":
        parts = count_parameters_by_part(config.model)
        flops += 30 * config.model.d_model * (parts["attention"] + parts["mlp"])
    return flops / speed


def measure_product_speed(config: Config, rows: int, compute: Compute) -> float:
    """Measure the operations per second of products of (rows, D) and (D, F)."""
    D = config.model.d_model
    F = config.model.d_ff
    inputs = torch.ones(rows, D, dtype=compute.dtype, device=compute.device)
    weights = torch.ones(D, F, dtype=compute.dtype, device=compute.device)
    fastest = math.inf
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
    """Decide whether to try torch.compile, if all passes take these seconds without it."""
    if config.train.compile == "auto":
        return seconds >= machine.estimates.min_seconds_to_compile and machine.has_compiler()
    return config.train.compile == "on"


def has_compiler() -> bool:
    return find_compiler("g++", "clang++", "cl") is not None


def try_compile(
    config: Config, machine: Machine, eager: StepTime | None = None
) -> tuple[bool, StepTime | None]:
    """Try torch.compile on the rows of one process if that may pay, and say which way is faster.

    Returns whether to use it, and the time of a step that way, if one was timed. A step without
    compiling is timed unless its time is known, as `eager`, in which one process makes all passes.
    Raises MachineError if `train.compile` is on and compiling fails.
    """
    setting = config.train.compile
    if setting == "off" or (setting == "auto" and not machine.has_compiler()):
        return False, None
    share = config.with_train(batch_size=config.train.batch_size // machine.world_size)
    is_known = eager is not None
    if eager is not None:
        eager = StepTime(eager.passes / machine.world_size, eager.update)
    else:
        eager = machine.time_step(share, limit=MAX_TIMING_SECONDS)
    seconds = eager.passes * share.train.steps
    if share.train.minutes is not None:  # their steps are a guess until some have been made
        seconds = min(seconds, machine.get_seconds_left(share.train.minutes))
    if not is_worth_compiling(share, seconds, machine):
        return False, eager
    if not is_known:
        eager = machine.time_step(share)  # again, without a limit
    say("  timing a compiled model; this may take minutes ...")
    try:
        compiled = machine.time_step(share, compiled=True)
    except GptminiError:  # a signal
        raise
    except Exception as error:  # of the compiler, of its kernels, or of whatever calls them
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        if setting == "on":
            raise MachineError(f"train.compile: {reason}; use auto or off") from None
        say(f"  compile   off: it failed ({reason})")
        return False, eager
    pays = setting == "on" or compiled.passes <= eager.passes
    say(
        f"  compile   {'on' if pays else 'off'}: {compiled.passes:.3f} s/step compiled, "
        f"{eager.passes:.3f} without"
    )
    return pays, compiled if pays else eager
