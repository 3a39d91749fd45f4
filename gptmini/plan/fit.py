"""What a run can afford: windows that fit in memory, torch.compile if it pays, sizes for M minutes.

All of it is measured on this machine before the first step, and fixed in the run's configuration.
"""

import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gptmini import machine
from gptmini.config.load import completed
from gptmini.config.settings import Config, ModelConfig, TrainConfig
from gptmini.errors import GptminiError, MachineError
from gptmini.model.gpt import GPT, loss
from gptmini.model.optim import Optimizer, cooldown_steps
from gptmini.plan.cost import parameter_count

Precision = Callable[[], AbstractContextManager[object]]

FAST_TOKENS = 8192  # in a forward pass on a CPU: more of them leave its caches and are no faster
FINISH = 3  # seconds for the last checkpoint and the sample
COMPILE_GAIN = 1.5  # of the speed of passes, where it pays
MEASURED = 3  # layers of a model that stands for deeper ones
STEADY = 6  # passes, until which their times settle to a few percent
COMPILE_PAYS = 90  # seconds of training, of which a quarter is more than compiling takes

# A ladder of models: layers, width, windows in a batch.
RUNGS = (
    *((4, 128, 16), (4, 192, 16), (4, 256, 16), (6, 256, 16)),
    *((6, 384, 16), (8, 512, 32), (12, 768, 64)),
)
# What a model must see to be better than the one below it. On Tiny Shakespeare by character 0.8
# took 4 x 256 to a loss of 1.465, 1.0 took 6 x 256 to 1.449, but 0.3 took 6 x 384 to 1.505 only:
# three runs that differ in dropout too (0, 0.1, 0.2), a hint and no law.
TOKENS_PER_PARAMETER = 1.0
DROPOUT = ((12, 0.2), (4, 0.1), (0, 0.0))  # from so many epochs on

# What a run chooses when it begins: always, and to fit the minutes.
CHOSEN = {
    "tokenizer": ["kind", "vocab_size"],
    "model": ["dropout"],
    "train": ["micro_batch_size", "compile"],
}
PLANNED = CHOSEN | {
    "model": [*CHOSEN["model"], "n_layer", "n_head", "d_model", "head_dim", "d_ff"],
    "train": [
        *CHOSEN["train"],
        *("steps", "batch_size", "warmup_steps", "eval_every", "save_every", "log_every"),
    ],
}


def step_seconds(model: GPT, config: Config, precision: Precision, passes: int = 3) -> float:
    """Time of the forward and backward passes of a step, on tokens of no meaning.

    The first of so many compiles and takes memory, the second takes some still.
    """
    train = config.train
    size = train.micro_batch_size or train.batch_size
    tokens = torch.zeros(size, config.seq_len, dtype=torch.long, device=_device(model))
    times = []
    for _ in range(passes):
        started = time.perf_counter()
        with precision():
            loss(model, tokens, tokens).backward()
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    model.zero_grad()
    return min(times[1:]) * train.batch_size / size


def micro_batch_size(model: GPT, config: Config, precision: Precision) -> int:
    """The largest divisor of the batch whose passes fit in half of the memory and are fast."""
    window = activation_bytes(model, config.seq_len, precision)
    return windows_at_a_time(config, _device(model), window)


def windows_at_a_time(config: Config, device: torch.device, activations: int) -> int:
    """The same, if a window needs so many bytes of activations."""
    batch = config.train.batch_size
    room = (machine.memory(device) - 16 * parameter_count(config.model)) // 2
    fitting = room // activations
    if device.type == "cpu":
        fitting = min(fitting, FAST_TOKENS // config.seq_len)
    return max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1, fitting))


def activation_bytes(model: GPT, seq_len: int, precision: Precision) -> int:
    """What one window keeps for its backward pass: the bytes of all tensors saved on the way."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(1, seq_len, dtype=torch.long, device=_device(model))
    with saved_tensors_hooks(note, lambda tensor: tensor), precision():
        loss(model, tokens, tokens)
    return sum(kept.values())


def compile_blocks(
    model: GPT, config: Config, precision: Precision, say: Callable[[str], None]
) -> bool:
    """Compile the blocks if that is asked for or pays, and say what it brought.

    The same kernels serve every block, so that depth costs no time to compile.
    """
    asked = config.train.compile
    if asked == "off" or (asked == "auto" and not _compiler()):
        return False
    plain = step_seconds(model, config, precision)
    if not compiles(config, plain * config.train.steps):
        return False
    started = time.perf_counter()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    try:
        compiled = step_seconds(model, config, precision)
    except GptminiError:  # a signal
        raise
    except Exception as error:  # of the compiler, of its kernels, or of what calls them
        reason = f"{str(error).strip() or repr(error)}".splitlines()[0]
        if asked == "on":
            raise MachineError(f"train.compile: {reason}; take auto or off") from None
        say(f"compile: failed ({reason}); going on without")
        compiled = math.inf
    else:
        seconds = time.perf_counter() - started
        say(f"compile: {compiled:.3f} s a step for {plain:.3f}, after {seconds:.0f} s")
    if asked == "auto" and compiled > plain:
        for block in model.blocks:
            del block.forward
        return False
    return True


def _compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile calls."""
    return any(shutil.which(name) for name in ("g++", "clang++", "cl"))


def _device(model: GPT) -> torch.device:
    return next(model.parameters()).device


def dropout(epochs: float) -> float:
    """The share to drop when the text is read so many times."""
    return next(share for least, share in DROPOUT if epochs >= least)


def plan(config: Config, seconds: float, device: torch.device, dtype: torch.dtype) -> Config:
    """The sizes and the number of steps for the best model in so many seconds.

    What the configuration states stays. Models are timed from small to large, up to the largest
    that would see enough tokens.
    """
    stated = "steps" in config.train.model_fields_set
    found: Config | None = None
    for layers, width, windows in RUNGS:
        sizes = {"n_layer": layers, "n_head": width // 64, "d_model": width}
        candidate = completed(config, {"model": sizes, "train": {"batch_size": windows}})
        if found is not None and _sizes(candidate) == _sizes(found):  # they are stated
            continue
        passes, updates = _seconds_by_part(candidate, device, dtype)
        if config.train.compile != "off" and seconds > 2 * COMPILE_PAYS and _compiler():
            passes /= COMPILE_GAIN
        per_step = passes + updates
        steps = config.train.steps if stated else max(1, int((seconds - FINISH) / per_step))
        tokens = steps * candidate.train.batch_size * candidate.seq_len
        enough = TOKENS_PER_PARAMETER * parameter_count(candidate.model)
        if found is None or (tokens >= enough and steps * per_step <= seconds):
            tenth, hundredth = max(1, steps // 10), max(1, steps // 100)
            intervals = {"eval_every": tenth, "save_every": tenth, "log_every": hundredth}
            found = completed(candidate, {"train": {"steps": steps, **intervals}})
        if tokens < enough or steps * per_step > seconds:
            break
    assert found is not None
    return found


def smaller(config: Config) -> Config:
    """A training of the same shape, with few layers and one micro-batch, to be measured instead."""
    train = config.train
    size = min(train.micro_batch_size or train.batch_size, max(1, FAST_TOKENS // config.seq_len))
    least = max(MEASURED, config.model.attention.full_every or 0)  # to have each kind of layer
    layers = {"n_layer": min(config.model.n_layer, least)}
    few = config.model_copy(update={"model": config.model.model_copy(update=layers)})
    return few.with_train(batch_size=size, micro_batch_size=size)


def predicted_seconds(
    config: Config, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Times of the passes, without torch.compile, and of the update of a step, by smaller ones.

    Layers take equal times, and so do micro-batches.
    """
    few = smaller(config)
    extra, most = config.model.n_layer - few.model.n_layer, few.model.n_layer
    first = (0.0, 0.0)
    if extra:
        one = few.model_copy(update={"model": few.model.model_copy(update={"n_layer": 1})})
        first = _seconds_by_part(one, device, dtype, STEADY)
    passes, updates = _seconds_by_part(few, device, dtype, STEADY)
    if extra:
        passes += extra * (passes - first[0]) / (most - 1)
        updates += extra * (updates - first[1]) / (most - 1)
    return passes * config.train.batch_size / few.train.batch_size, updates


def compiles(config: Config, seconds: float) -> bool:
    """Whether compiling is worth a try if the passes take so many seconds without."""
    asked = config.train.compile
    return asked == "on" or (asked == "auto" and seconds >= COMPILE_PAYS and _compiler())


def _sizes(config: Config) -> tuple[ModelConfig, int]:
    """What a step's time depends on."""
    return config.model, config.train.batch_size


def _seconds_by_part(
    config: Config, device: torch.device, dtype: torch.dtype, passes: int = 3
) -> tuple[float, float]:
    """Times of the passes and of the update of a model that is made for this and forgotten."""
    precision = partial(machine.precision, device, dtype)
    model = GPT(config.model).to(device)
    model.gradient_checkpointing = config.train.gradient_checkpointing
    if config.train.micro_batch_size is None:
        config = config.with_train(micro_batch_size=micro_batch_size(model, config, precision))
    seconds = step_seconds(model, config, precision, passes)
    optimizer = Optimizer(model, config.train, dtype)
    times = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        started = time.perf_counter()
        optimizer.step(config.train.lr)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return seconds, min(times)


def paced_steps(settings: TrainConfig, step: int, elapsed: float, per_step: float) -> int:
    """The steps that end with the minutes, if each of those left takes so many seconds.

    Never so few that the cool-down would have begun; once it has, their number stays.
    """
    if settings.minutes is None or cooldown_steps(settings) >= settings.steps - step:
        return settings.steps
    steps = step + int((60 * settings.minutes - FINISH - elapsed) / per_step)
    return max(steps, min(settings.steps, math.ceil((step + 2) / (1 - settings.cooldown))))


def as_chosen(config: Config, existing: Config) -> Config:
    """What a configuration leaves open as the run that exists has chosen it."""
    planned = config.train.minutes is not None and existing.train.minutes is not None
    keys = PLANNED if planned else CHOSEN
    whole = existing.model_dump()
    wanted = {name: {key: whole[name][key] for key in keys[name]} for name in keys}
    if config.tokenizer.model_fields_set:
        del wanted["tokenizer"]
    return completed(config, wanted)
