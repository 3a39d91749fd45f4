"""The training loop: rows, loss, update, then log, evaluate, save.

Everything random is a function of (seed, step, micro-batch), so a run that was stopped and goes on
makes the same weights as one that was not, and nothing random is saved.
"""

import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gptmini import batches, machine, optim
from gptmini.batches import Batches, draw
from gptmini.checkpoint import Checkpoint, RunDirectory, fitting
from gptmini.config import Config, differences
from gptmini.errors import ConfigError, DataError, DivergedError, Stopped
from gptmini.evaluate import evaluate
from gptmini.model import GPT, loss
from gptmini.prepare import Corpus, prepare_corpus
from gptmini.runlog import RunLog, progress, say

# Settings that may change while a run goes on; all others would make it another run.
CHANGEABLE = {
    "data.path",  # the content is compared
    "data.validation_path",
    "train.steps",
    "train.warmup_steps",
    "train.eval_every",
    "train.save_every",
    "train.log_every",
    "train.device",
    "train.gradient_checkpointing",
}


@dataclass
class Training:
    """What the loop holds."""

    config: Config
    run: RunDirectory
    corpus: Corpus
    model: GPT
    optimizer: torch.optim.Optimizer
    batches: Batches
    device: torch.device
    dtype: torch.dtype  # of matrix products
    step: int = 0
    seconds: float = 0.0  # of training, over all sessions
    best: dict[str, Any] | None = None
    saved: int | None = None  # the step of the newest checkpoint

    def precision(self) -> torch.autocast:
        """A context in which matrix products run in `dtype`."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )


def train(config: Config, out: Path, cache: Path) -> None:
    """Train the run in a directory to its last step, from where it stands.

    Raises ConfigError if another run lives there, DataError for an unusable corpus,
    CheckpointError if no checkpoint is whole, DivergedError for a loss that is not finite, and
    Stopped when a signal ended the work after it was saved.
    """
    run = RunDirectory(out, say)
    training = prepare(config, run, cache)
    with run.lock():
        begin(training)
        if training.step >= config.train.steps:
            say(f"{out}: already finished at step {training.step}; a higher --steps prolongs it")
            return
        log = RunLog(run.metrics, training.step, config.train.steps)
        try:
            with machine.stop_signals() as received:
                _loop(training, log, received)
        finally:
            log.close()


def prepare(config: Config, run: RunDirectory, cache: Path) -> Training:
    """Corpus, model and optimizer at step 0; nothing is written but the corpus in the cache."""
    settings = config.train
    device = machine.pick_device(settings.device)
    machine.keep_freed_memory()
    corpus = prepare_corpus(config, cache, progress)
    asked = config.tokenizer.kind
    config = config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    say(corpus.summary(asked))
    rows = Batches(
        corpus.training, config.data.weights, config.seq_len, settings.batch_size, settings.seed
    )
    torch.manual_seed(draw(settings.seed))
    model = GPT(config.model).to(device)
    model.gradient_checkpointing = settings.gradient_checkpointing
    return Training(
        config,
        run,
        corpus,
        model,
        optim.adamw(model, settings),
        rows,
        device,
        machine.pick_dtype(settings, device),
    )


def begin(training: Training) -> None:
    """Make the run directory, or go on from the newest checkpoint of the same run in it."""
    config, run, tokenizer = training.config, training.run, training.corpus.tokenizer
    if not run.begun:
        run.begin(config, tokenizer)
    else:
        _check_same(config, run.config(), run)
        if run.tokenizer().fingerprint != tokenizer.fingerprint:
            raise DataError(_other_text(config, run))
        if (checkpoint := run.newest()) is not None:
            _restore(training, checkpoint)
        if training.step < config.train.steps:
            run.write_config(config)
    _introduce(training)


def _loop(training: Training, log: RunLog, received: list[int]) -> None:
    """Make the steps that are left."""
    settings = training.config.train
    per_step = settings.batch_size * training.config.seq_len
    logged_step, logged_seconds = training.step, training.seconds
    while training.step < settings.steps:
        started = time.perf_counter()
        metrics = update(training)
        training.step += 1
        training.seconds += time.perf_counter() - started
        log.advance()
        last = training.step == settings.steps
        record: dict[str, Any] = {}
        if training.step % settings.log_every == 0 or training.step == 1 or last:
            tokens = (training.step - logged_step) * per_step
            speed = tokens / (training.seconds - logged_seconds)
            record |= metrics | {"tokens_per_second": round(speed, 1)}
            logged_step, logged_seconds = training.step, training.seconds
        if training.step % settings.eval_every == 0 or last:
            record |= assess(training)
        if record:
            log.write(_stamp(training) | record)
        is_best = training.best is not None and training.best["step"] == training.step
        if training.step % settings.save_every == 0 or last or is_best or received:
            save(training)
        if received:
            name = signal.Signals(received[0]).name
            raise Stopped(
                received[0],
                f"{training.run.path}: stopped by {name} after step {training.step}, saved; the "
                f"same command goes on",
            )


def update(training: Training) -> dict[str, Any]:
    """One optimizer update on the windows of the step; its metrics."""
    settings, model, step = training.config.train, training.model, training.step
    model.train()
    tokens, targets = training.batches.batch(step)
    total = 0.0
    rate = optim.learning_rate(settings, step)
    size = settings.micro_batch_size
    for micro, (x, y) in enumerate(zip(tokens.split(size), targets.split(size), strict=True)):
        torch.manual_seed(draw(settings.seed, step, micro))  # for dropout
        with training.precision():
            share = loss(model, x.to(training.device), y.to(training.device)) * len(x) / len(tokens)
        share.backward()
        total += share.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip).item()
    if not math.isfinite(norm):
        raise DivergedError(_diverged(training, f"loss {total:.4g}, gradient norm {norm}"))
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    training.optimizer.step()
    training.optimizer.zero_grad()
    return {"train_loss": total, "lr": rate, "grad_norm": norm}


def assess(training: Training) -> dict[str, Any]:
    """Evaluate the whole validation split and remember the best step."""
    settings, corpus = training.config.train, training.corpus
    held_out = batches.validation_batches(
        corpus.validation, training.config.seq_len, settings.micro_batch_size
    )
    result = evaluate(training.model, held_out, corpus.tokenizer.byte_lengths(), training.precision)
    if not math.isfinite(result.loss):
        raise DivergedError(_diverged(training, f"validation loss {result.loss}"))
    if training.best is None or result.loss < training.best["val_loss"]:
        training.best = _stamp(training) | {
            "val_loss": result.loss,
            "val_bpb": result.bits_per_byte,
        }
    return {"val_loss": result.loss, "val_bpb": result.bits_per_byte}


def save(training: Training) -> None:
    """Write a checkpoint of this step, unless there is one."""
    if training.saved == training.step:
        return
    weights = training.model.state_dict()
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise DivergedError(_diverged(training, "weights that are not finite"))
    state = _stamp(training) | {
        "best": training.best,
        "corpus": training.corpus.content,
        "tokenizer": training.corpus.tokenizer.fingerprint,
        **_machine(training),
    }
    training.run.save(
        Checkpoint(
            state,
            weights,
            optim.named_state(training.model, training.optimizer),
        )
    )
    training.saved = training.step


def _restore(training: Training, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights, optimizer state and counters in place."""
    state, run, model = checkpoint.state, training.run, training.model
    if state["corpus"] != training.corpus.content:
        raise DataError(_other_text(training.config, run))
    model.load_state_dict(fitting(checkpoint.model, model.state_dict(), run.checkpoints))
    fitting(checkpoint.optimizer, optim.state_like(model), run.checkpoints)
    optim.restore_state(model, training.optimizer, checkpoint.optimizer)
    run.set_aside_after(checkpoint.step)
    training.step = training.saved = checkpoint.step
    training.seconds, training.best = state["seconds"], state["best"]
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
    }


def _stamp(training: Training) -> dict[str, Any]:
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
    count = sum(parameter.numel() for parameter in training.model.parameters())
    kept = sum(model.cache_length(layer) for layer in range(model.n_layer))
    cache = 2 * kept * model.n_kv_head * model.head_dim * 4  # in float32
    epochs = training.batches.epochs(config.train.steps)
    say(
        f"model:  {count:,} parameters, {model.n_layer} layers, width {model.d_model}, heads "
        f"{model.n_head}:{model.n_kv_head} ({model.attention.variant}), context "
        f"{model.context_length}, KV cache {cache:,} bytes"
    )
    say(
        f"run:    {training.run.path}, {config.train.steps:,} steps of "
        f"{config.train.batch_size} x {config.seq_len} tokens ({epochs:.1f} epochs), "
        f"{training.device.type} {_machine(training)['dtype']}"
        + (f", from step {training.step}" if training.step else "")
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


def _diverged(training: Training, what: str) -> str:
    return (
        f"{training.run.path}: {what} after step {training.step}, nothing of it saved; lower "
        f"train.lr and name another directory with --out"
    )


def _other_text(config: Config, run: RunDirectory) -> str:
    return (
        f"{', '.join(config.data.path)}: not the text that {run.path} began with; restore it, or "
        f"name another directory with --out"
    )
