"""One training: what the loop holds, made at step 0 or from a checkpoint, and saved as one.

Everything random is a function of (seed, step, micro-batch), so nothing random is in it.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptmini import machine
from gptmini.config.load import completed, differences
from gptmini.config.settings import Config
from gptmini.console import say
from gptmini.errors import ConfigError, DataError, DivergedError
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan import cost
from gptmini.plan import fit as fitting_here
from gptmini.runs.directory import Checkpoint, RunDirectory, fitting
from gptmini.text.corpus import prepare_corpus
from gptmini.text.tokens import Corpus
from gptmini.train.batches import Batches, draw

# Settings that may change while a run goes on; all others would make it another run.
CHANGEABLE = {
    "data.path",  # the content is compared
    "data.validation_path",
    "train.steps",
    "train.warmup_steps",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.log_every",
    "train.log_to",
    "train.device",
    "train.gradient_checkpointing",
    "train.on_divergence",
    "train.patience",
    "train.micro_batch_size",
    "train.compile",
}

MANY_EPOCHS = 20  # of which a small model learns little more about other text


@dataclass
class Training:
    """What the loop holds."""

    config: Config
    run: RunDirectory
    corpus: Corpus
    model: GPT
    optimizer: Optimizer
    batches: Batches
    device: torch.device
    dtype: torch.dtype  # of matrix products
    started: float  # when this command did, less the time that earlier ones gave to the run
    paced: bool  # the number of steps follows the minutes
    step: int = 0
    seconds: float = 0.0  # of training, over all sessions
    lr_scale: float = 1.0  # halved whenever the run went back after it had diverged
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))  # losses, for spikes
    best: dict[str, Any] | None = None
    saved: int | None = None  # the step of the newest checkpoint
    logged: tuple[int, float] = (0, 0.0)  # step and seconds of the last metrics
    first: tuple[int, float] | None = None  # step and time of the first update of this command

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, in all commands, with everything around the updates."""
        return time.perf_counter() - self.started

    def precision(self) -> torch.autocast:
        """A context in which matrix products run in `dtype`."""
        return machine.precision(self.device, self.dtype)

    def eagerly(self) -> AbstractContextManager[object]:
        """A context without compiled kernels, which other shapes and modes would compile again."""
        compiled = self.config.train.compile == "on"
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

    def change(self, **settings: Any) -> None:
        """Set keys of the configuration's section train."""
        self.config = self.config.with_train(**settings)


def settle(
    config: Config,
    existing: Config | None,
    cache: Path,
    device: torch.device,
    dtype: torch.dtype,
    started: float,
) -> tuple[Config, Corpus, Batches]:
    """The configuration with what the text and the minutes decide, the text, and its windows.

    A run that exists keeps what it chose when it began.
    """
    asked = config.tokenizer.kind
    if existing is not None:
        config = fitting_here.as_chosen(config, existing)
    corpus = prepare_corpus(config, cache)
    config = config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    say(corpus.summary(asked))
    if config.train.minutes is not None and existing is None:
        left = 60 * config.train.minutes - (time.perf_counter() - started)
        config = fitting_here.plan(config, left, device, dtype)
    settings = config.train
    rows = Batches(
        corpus.training, config.data.weights, config.seq_len, settings.batch_size, settings.seed
    )
    if config.model.dropout is None:
        share = fitting_here.dropout(rows.epochs(settings.steps))
        config = completed(config, {"model": {"dropout": share}})
    return config, corpus, rows


def prepare(config: Config, run: RunDirectory, cache: Path, started: float) -> Training:
    """Corpus, model and optimizer at step 0; nothing is written but the corpus in the cache.

    `started` is when the command did.
    """
    device = machine.pick_device(config.train.device)
    dtype = machine.pick_dtype(config.train, device)
    machine.keep_freed_memory()
    paced = config.train.minutes is not None and "steps" not in config.train.model_fields_set
    existing = run.config() if run.begun else None
    config, corpus, rows = settle(config, existing, cache, device, dtype, started)
    settings = config.train
    machine.check_memory(cost.parameter_count(config.model), device)
    torch.manual_seed(draw(settings.seed))
    model = GPT(config.model).to(device)
    model.gradient_checkpointing = settings.gradient_checkpointing
    optimizer = Optimizer(model, settings, dtype)
    return Training(config, run, corpus, model, optimizer, rows, device, dtype, started, paced)


def begin(training: Training) -> None:
    """Make the run directory, or go on from the newest checkpoint of the same run in it."""
    config, run, tokenizer = training.config, training.run, training.corpus.tokenizer
    if not run.begun:
        fit(training)
        run.begin(training.config, tokenizer)
    else:
        run.checkpoints.mkdir(exist_ok=True)
        _check_same(config, run.config(), run)
        if run.tokenizer().fingerprint != tokenizer.fingerprint:
            raise DataError(_other_text(config, run))
        if (checkpoint := run.newest()) is not None:
            restore(training, checkpoint)
            training.started -= checkpoint.state["elapsed"]
        if training.step < config.train.steps:
            fit(training)
            run.write_config(training.config)
    _introduce(training)


def fit(training: Training) -> None:
    """Choose what the configuration leaves open: the micro-batch, and whether to compile."""
    model, precision = training.model, training.precision
    model.train()
    if training.config.train.micro_batch_size is None:
        size = fitting_here.micro_batch_size(model, training.config, precision)
        training.change(micro_batch_size=size)
    if training.config.train.compile != "off":
        compiled = fitting_here.compile_blocks(model, training.config, precision, say)
        training.change(compile="on" if compiled else "off")


def save(training: Training) -> None:
    """Write a checkpoint of this step, unless there is one."""
    if training.saved == training.step:
        return
    weights = training.model.state_dict()
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise DivergedError(diverged(training, "weights that are not finite"))
    state = stamp(training) | {
        "best": training.best,
        "lr_scale": training.lr_scale,
        "elapsed": training.elapsed,
        "corpus": training.corpus.content,
        "tokenizer": training.corpus.tokenizer.fingerprint,
        **_machine(training),
    }
    training.run.save(
        Checkpoint(state, weights, training.optimizer.state()), training.config.train.keep
    )
    training.saved = training.step


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights, optimizer state and counters in place."""
    state, run, model = checkpoint.state, training.run, training.model
    if state["corpus"] != training.corpus.content:
        raise DataError(_other_text(training.config, run))
    model.load_state_dict(fitting(checkpoint.model, model.state_dict(), run.checkpoints))
    if checkpoint.step:  # before its first update an optimizer has no state
        fitting(checkpoint.optimizer, training.optimizer.state_like(), run.checkpoints)
        training.optimizer.restore(checkpoint.optimizer)
    run.set_aside_after(checkpoint.step)
    training.step = training.saved = checkpoint.step
    training.seconds, training.best = state["seconds"], state["best"]
    training.lr_scale = state["lr_scale"]
    training.logged = (training.step, training.seconds)
    training.recent.clear()
    training.first = None
    run.write_best(training.best)
    changed = [
        f"{key} {state[key]}, now {now}"
        for key, now in _machine(training).items()
        if state[key] != now
    ]
    if changed:
        say(f"{run.path}: made with {'; '.join(changed)}; it goes on, but not to the same last bit")


def _machine(training: Training) -> dict[str, Any]:
    """What the last bit of a result depends on, beside the configuration."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": training.device.type,
        "dtype": str(training.dtype).removeprefix("torch."),
        "compile": training.config.train.compile,
    }


def stamp(training: Training) -> dict[str, Any]:
    """When this is: the step, the tokens seen and the seconds spent training."""
    per_step = training.config.train.batch_size * training.config.seq_len
    return {
        "step": training.step,
        "tokens": training.step * per_step,
        "seconds": round(training.seconds, 3),
    }


def _introduce(training: Training) -> None:
    """Say in two lines what is trained, and how long."""
    config, model = training.config, training.config.model
    count = cost.parameter_count(model)
    cache = cost.cache_bytes(model, model.context_length)
    epochs = training.batches.epochs(config.train.steps)
    chosen = config.train
    say(
        f"model:  {count:,} parameters, {model.n_layer} layers, width {model.d_model}, heads "
        f"{model.n_head}:{model.n_kv_head} ({model.attention.variant}), context "
        f"{model.context_length}, dropout {model.dropout:g}, KV cache {cache:,} bytes"
    )
    say(
        f"run:    {training.run.path}, {chosen.steps:,} steps of {chosen.batch_size} x "
        f"{config.seq_len} tokens ({epochs:.1f} epochs)"
        + (f", from step {training.step}" if training.step else "")
    )
    say(
        f"by:     {chosen.optimizer}, {training.device.type}, {_machine(training)['dtype']}, "
        f"{torch.get_num_threads()} threads, {chosen.micro_batch_size} windows at a time, "
        f"torch.compile {chosen.compile}"
    )
    if epochs > MANY_EPOCHS:
        say(
            f"note:   the text is read {epochs:.0f} times over, and little is learnt after "
            f"{MANY_EPOCHS}; more text or fewer steps would help"
        )


def _check_same(asked: Config, existing: Config, run: RunDirectory) -> None:
    """ConfigError listing the settings in which a run differs from the one asked for."""
    lines = [
        f"{key}: {theirs} in {run.path}, {ours} asked for"
        for key, ours, theirs in differences(asked, existing)
        if key not in CHANGEABLE and not key.startswith("sample.")
    ]
    if lines:
        raise ConfigError(
            *lines, f"{run.path}: holds another run; name another directory with --out"
        )


def diverged(training: Training, what: str) -> str:
    """What to say of a run that has left the finite numbers."""
    return (
        f"{training.run.path}: {what} after step {training.step}, in {windows(training)}, nothing "
        f"of it saved; lower train.lr and name another directory with --out, or set "
        f"train.on_divergence=rewind"
    )


def windows(training: Training, step: int | None = None) -> str:
    """Where the windows of a step are, so that they can be looked at."""
    starts = training.batches.starts(training.step if step is None else step)
    shown = ", ".join(str(start) for _, start in starts[:4]) + ", ..." * (len(starts) > 4)
    return f"the windows at tokens {shown}"


def _other_text(config: Config, run: RunDirectory) -> str:
    return (
        f"{', '.join(config.data.path)}: not the text that {run.path} began with; restore it, or "
        f"name another directory with --out"
    )
