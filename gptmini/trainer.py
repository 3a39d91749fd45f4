"""The training loop: rows, loss, update, then log, evaluate, save.

Everything random is a function of (seed, step, micro-batch), so a run that was stopped and goes on
makes the same weights as one that was not, and nothing random is saved.
"""

import math
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gptmini import batches, machine, optim
from gptmini.batches import draw
from gptmini.checkpoint import RunDirectory
from gptmini.config import Config
from gptmini.errors import DivergedError, Stopped
from gptmini.evaluate import evaluate
from gptmini.model import loss
from gptmini.runlog import RunLog, say
from gptmini.training import Training, begin, diverged, prepare, restore, save, stamp, windows

LEAST_SCALE = 1 / 32  # of the learning rate, after which a run that diverges ends


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
        run.check_space(3 * sum(p.nbytes for p in training.model.parameters()))
        log = RunLog(run.metrics, training.step, config.train.steps)
        try:
            with machine.signals() as received:
                _loop(training, log, received)
        finally:
            log.close()


def _loop(training: Training, log: RunLog, received: machine.Received) -> None:
    """Make the steps that are left."""
    settings = training.config.train
    while training.step < settings.steps:
        try:
            _advance(training, log)
            stop = received.stop is not None
            if _save_is_due(training) or stop or received.save:
                log.sync()
                save(training)
        except DivergedError as error:
            if settings.on_divergence == "stop":
                raise
            _rewind(training, log, error)
        received.save = False
        if received.stop is not None:
            name = signal.Signals(received.stop).name
            raise Stopped(
                received.stop,
                f"{training.run.path}: stopped by {name} after step {training.step}, saved; the "
                f"same command goes on",
            )


def _advance(training: Training, log: RunLog) -> None:
    """One step, with what is to be logged and evaluated at it."""
    settings = training.config.train
    started = time.perf_counter()
    metrics = update(training)
    training.step += 1
    training.seconds += time.perf_counter() - started
    log.advance()
    _report_spike(training, metrics["train_loss"])
    last = training.step == settings.steps
    record: dict[str, Any] = {}
    if training.step % settings.log_every == 0 or training.step == 1 or last:
        steps, seconds = training.step - training.logged[0], training.seconds - training.logged[1]
        tokens = steps * settings.batch_size * training.config.seq_len
        record |= metrics | {"tokens_per_second": round(tokens / seconds, 1)}
        training.logged = (training.step, training.seconds)
    if training.step % settings.eval_every == 0 or last:
        record |= assess(training)
    if record:
        log.write(stamp(training) | record)


def _save_is_due(training: Training) -> bool:
    settings, step = training.config.train, training.step
    is_best = training.best is not None and training.best["step"] == step
    return step % settings.save_every == 0 or step == settings.steps or is_best


def _rewind(training: Training, log: RunLog, error: DivergedError) -> None:
    """Go back to the newest checkpoint and on at half the rate; raises the error if none helps.

    A run that is killed after this and goes on comes to the same step, diverges and is here again.
    """
    scale = training.lr_scale / 2
    checkpoint = training.run.newest()
    if checkpoint is None or scale < LEAST_SCALE:
        raise error
    restore(training, checkpoint)
    training.lr_scale = scale
    training.optimizer.zero_grad()
    log.back_to(training.step)
    say(f"{error.lines[0].split(';')[0]}; back to step {training.step}, at {scale:g} of the rate")


def _report_spike(training: Training, loss_now: float) -> None:
    """Say when a loss is far above those of the last steps, and in which windows."""
    recent = training.recent
    if len(recent) >= 20:
        usual = statistics.mean(recent)
        if loss_now > usual + 6 * statistics.pstdev(recent) + 0.1:
            where = windows(training, training.step - 1)
            say(f"step {training.step}: loss {loss_now:.4g} after {usual:.4g}, in {where}")
    recent.append(loss_now)


def update(training: Training) -> dict[str, Any]:
    """One optimizer update on the windows of the step; its metrics."""
    settings, model, step = training.config.train, training.model, training.step
    model.train()
    tokens, targets = training.batches.batch(step)
    total = 0.0
    rate = optim.learning_rate(settings, step) * training.lr_scale
    size = settings.micro_batch_size
    for micro, (x, y) in enumerate(zip(tokens.split(size), targets.split(size), strict=True)):
        torch.manual_seed(draw(settings.seed, step, micro))  # for dropout
        with training.precision():
            share = loss(model, x.to(training.device), y.to(training.device)) * len(x) / len(tokens)
        share.backward()
        total += share.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip).item()
    if not math.isfinite(norm):
        raise DivergedError(diverged(training, f"loss {total:.4g}, gradient norm {norm}"))
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
        raise DivergedError(diverged(training, f"validation loss {result.loss}"))
    if training.best is None or result.loss < training.best["val_loss"]:
        training.best = stamp(training) | {
            "val_loss": result.loss,
            "val_bpb": result.bits_per_byte,
        }
    return {"val_loss": result.loss, "val_bpb": result.bits_per_byte}
