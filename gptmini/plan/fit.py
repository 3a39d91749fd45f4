"""What fits this machine: rows per forward pass, and torch.compile where it pays.

`dry_run` finds the memory of a step and `time_step` its time, each on a model that is thrown away,
so measuring never touches the training.
"""

import math
import shutil
import time
from dataclasses import dataclass

import torch

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.console import say
from gptmini.distributed.gradients import EXACT_UP_TO
from gptmini.errors import GptminiError, MachineError
from gptmini.machine import Compute
from gptmini.model.gpt import GPT, loss
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import parameter_count
from gptmini.plan.memory import dry_run

FAST_TOKENS = 8192  # per forward pass on a CPU; more leave its caches and are no faster
COMPILE_GAIN = 1.2  # how much faster passes become, where compiling pays: 1.05 to 1.45 times
COMPILE_PAYS = 90  # seconds of training; compiling takes less than a quarter of that
PROXY_LAYERS = 3  # of the model that is timed in place of a deeper one
STEADY = 6  # passes until their times settle to within a few percent
AFTER_EVALUATION = 0.5  # seconds for a sample and a checkpoint


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: its forward and backward passes, and the optimizer's update."""

    passes: float
    update: float


def micro_batch_size(config: Config, compute: Compute, ranks: int = 1) -> int:
    """The largest divisor of a process's rows that fits in half the memory and in a CPU's caches.

    `ranks` processes share out the rows of the batch. With `train.reduce: exact` the same number is
    chosen for 1 to 8 of them: it divides the rows of each, and fits on all numbers of processes on
    which the model does.
    """
    numbers = alike(config, ranks)
    batch = rows = config.train.batch_size // max(numbers)
    if compute.device.type == "cpu":
        rows = min(rows, max(1, FAST_TOKENS // config.seq_len))
    count, sharded = parameter_count(config.model), config.train.shard
    total = machine.total_memory(compute.device)
    left = [total - machine.training_bytes(count, compute.device, n, sharded) for n in numbers]
    free = min((size for size in left if size > 0), default=0)
    if rows > 1 and rows * _row_at_most(config) > free // 2:  # else no need to weigh a row
        single = config.with_train(batch_size=1, micro_batch_size=1)
        rows = min(rows, max(1, free // 2 // dry_run(single, compute).activations))
    return max(n for n in range(1, rows + 1) if batch % n == 0)


def alike(config: Config, ranks: int) -> list[int]:
    """The numbers of processes that are to make the same bits as `ranks`."""
    if config.train.reduce != "exact":
        return [ranks]
    powers = [2**k for k in range(EXACT_UP_TO.bit_length())]  # 1, 2, 4, 8
    return sorted({ranks, *(n for n in powers if config.train.batch_size % n == 0)})


def _row_at_most(config: Config) -> int:
    """Bytes that a row's activations never reach, twice the most seen; a dry run takes a second."""
    model = config.model
    heads = model.n_head * (2 * model.head_dim + config.seq_len)  # q, k, v, scores
    block = 20 * model.d_model + 6 * (model.d_ff + heads)
    numbers = config.seq_len * (model.n_layer * block + 6 * (model.vocab_size or 0))
    return 8 * numbers + 24 * parameter_count(model)


def time_step(
    config: Config,
    compute: Compute,
    repeats: int = 3,
    compiled: bool = False,
    limit: float = math.inf,
) -> StepTime:
    """Time steps of a new model on dummy tokens; the first pass allocates and is not counted.

    After `limit` seconds nothing is repeated: the first pass and update may then be all there is.
    """
    begun = time.perf_counter()
    train = config.train
    size = train.micro_batch_size or micro_batch_size(config, compute)
    model = GPT(config.model).to(compute.device).train()
    model.gradient_checkpointing = train.gradient_checkpointing
    if compiled:
        compile_blocks(model)
    tokens = torch.zeros(size, config.seq_len, dtype=torch.long, device=compute.device)
    passes = []
    for _ in range(repeats):
        started = time.perf_counter()
        with compute.autocast():
            mean = loss(model, tokens, tokens)
        mean.backward()
        compute.synchronize()
        passes.append(time.perf_counter() - started)
        if time.perf_counter() - begun > limit:
            break
    optimizer = Optimizer(model, train, compute.dtype)
    updates = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        started = time.perf_counter()
        optimizer.step(train.lr)
        compute.synchronize()
        updates.append(time.perf_counter() - started)
        if time.perf_counter() - begun > limit:
            break
    return StepTime(min(passes[1:] or passes) * train.batch_size / size, min(updates))


def evaluation_seconds(config: Config, per_step: float, held_out: int) -> float:
    """The time of an evaluation on `held_out` tokens, or on as many as it reads.

    Reading without gradients takes about a quarter of the time of a step on as many tokens.
    """
    read = min(held_out, config.train.eval_tokens or held_out)
    return AFTER_EVALUATION + per_step / 4 * read / (config.train.batch_size * config.seq_len)


def proxy(config: Config) -> Config:
    """A training of the same shape with few layers and one micro-batch, quick to measure."""
    train, model = config.train, config.model
    size = min(train.micro_batch_size or train.batch_size, max(1, FAST_TOKENS // config.seq_len))
    needed = max(PROXY_LAYERS, model.attention.full_every or 0)  # one layer of each kind at least
    shallow = model.model_copy(update={"n_layer": min(model.n_layer, needed)})
    small = config.model_copy(update={"model": shallow})
    return small.with_train(batch_size=size, micro_batch_size=size)


def predict_step(config: Config, compute: Compute) -> StepTime:
    """The time of a step without torch.compile, extrapolated from `proxy`.

    Layers take equal times, and so do micro-batches.
    """
    small = proxy(config)
    timed = time_step(small, compute, STEADY)
    passes, update = timed.passes, timed.update
    layers = small.model.n_layer
    if extra := config.model.n_layer - layers:
        single = small.model_copy(update={"model": small.model.model_copy(update={"n_layer": 1})})
        first = time_step(single, compute, STEADY)
        passes += extra * (timed.passes - first.passes) / (layers - 1)
        update += extra * (timed.update - first.update) / (layers - 1)
    return StepTime(passes * config.train.batch_size / small.train.batch_size, update)


def compile_blocks(model: GPT) -> None:
    """Compile the blocks; one kernel serves them all, so depth adds no time to compile.

    MachineError if a CPU has no C++ compiler to call.
    """
    if model.device.type == "cpu" and not has_compiler():
        raise MachineError("train.compile: no C++ compiler found; use auto or off")
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)


def worth_compiling(config: Config, seconds: float) -> bool:
    """Whether to try torch.compile when all passes together take these seconds without it."""
    if config.train.compile == "auto":
        return seconds >= COMPILE_PAYS and has_compiler()
    return config.train.compile == "on"


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "cl"))


def choose_compile(
    config: Config, compute: Compute, eager: StepTime | None = None
) -> tuple[bool, StepTime | None, str]:
    """Whether to compile, the time of a step that way if it was measured, and why, in words.

    A step without compiling is timed unless its time is known, as `eager`. MachineError if
    `train.compile` is on and compiling fails.
    """
    asked = config.train.compile
    if asked == "off" or (asked == "auto" and not has_compiler()):
        return False, None, ""
    eager = eager or time_step(config, compute)
    if not worth_compiling(config, eager.passes * config.train.steps):
        return False, eager, ""
    say("  timing a compiled model; this can take half a minute ...")
    try:
        compiled = time_step(config, compute, compiled=True)
    except GptminiError:  # a signal
        raise
    except Exception as error:  # of the compiler, of its kernels, or of whatever calls them
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        if asked == "on":
            raise MachineError(f"train.compile: {reason}; use auto or off") from None
        return False, eager, f"compile failed ({reason})"
    if asked == "auto" and compiled.passes > eager.passes:
        return (
            False,
            eager,
            f"not compiled: {eager.passes:.3f} s/step, {compiled.passes:.3f} compiled",
        )
    return True, compiled, f"{compiled.passes:.3f} s/step instead of {eager.passes:.3f}"
