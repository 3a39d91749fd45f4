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

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.console import say
from gptmini.errors import DivergedError, Stopped
from gptmini.generate.engine import TorchEngine
from gptmini.generate.sampler import decode
from gptmini.generate.texts import Text
from gptmini.model.gpt import loss
from gptmini.model.optim import cooldown_steps, learning_rate
from gptmini.plan import fit
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import RunLog
from gptmini.runs.trackers import Trackers
from gptmini.train import batches
from gptmini.train.batches import draw
from gptmini.train.evaluate import evaluate
from gptmini.train.state import (
    Training,
    begin,
    diverged,
    prepare,
    restore,
    save,
    stamp,
    windows,
)

SAMPLE = 120  # tokens that are drawn at an evaluation
LEAST_SCALE = 1 / 32  # of the learning rate, after which a run that diverges ends


def train(config: Config, out: Path, cache: Path, started: float | None = None) -> None:
    """Train the run in a directory to its last step, from where it stands.

    `started` is the time.perf_counter() from which `train.minutes` count.

    Raises ConfigError if another run lives there, DataError for an unusable corpus,
    CheckpointError if no checkpoint is whole, DivergedError for a loss that is not finite, and
    Stopped when a signal ended the work after it was saved.
    """
    run = RunDirectory(out, say)
    training = prepare(config, run, cache, time.perf_counter() if started is None else started)
    with run.lock():
        begin(training)
        if _is_finished(training):
            say(f"{out}: already finished at step {training.step}; {_how_to_go_on(training)}")
            return
        run.check_space(3 * sum(p.nbytes for p in training.model.parameters()))
        trackers = Trackers(run.path, training.config, training.step)
        log = RunLog(run.metrics, training.step, training.config.train.steps, trackers.write)
        try:
            with machine.signals() as received:
                _loop(training, log, received)
        finally:
            log.close()
            trackers.close()


def _loop(training: Training, log: RunLog, received: machine.Received) -> None:
    """Make the steps that are left, unless the validation loss turns before."""
    while not _is_finished(training):
        try:
            _advance(training, log)
            if training.paced:
                _keep_pace(training, log)
            stop = received.stop is not None
            if _save_is_due(training) or stop or received.save:
                log.sync()
                save(training)
        except DivergedError as error:
            if training.config.train.on_divergence == "stop":
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
    if training.step < training.config.train.steps:
        say(f"ended at step {training.step}: {_how_to_go_on(training)}")


def _is_finished(training: Training) -> bool:
    return training.step >= training.config.train.steps or _has_turned(training)


def _how_to_go_on(training: Training) -> str:
    settings, best = training.config.train, training.best
    if training.step >= settings.steps or best is None:
        return "a higher --steps prolongs it"
    return (
        f"the validation loss was best at step {best['step']}, {settings.patience} evaluations "
        f"ago; --set train.patience=null goes on"
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
        record["sample"] = sample(training)
        record["peak_memory"] = machine.peak_memory(training.device)
    if record:
        log.write(stamp(training) | record)


def _has_turned(training: Training) -> bool:
    """Whether the validation loss was best so many evaluations ago that the run should end.

    Only those in the cool-down count: on the plateau it goes up and down, and falls again.
    """
    settings, best = training.config.train, training.best
    if settings.patience is None or best is None or training.step % settings.eval_every:
        return False
    since = max(best["step"], settings.steps - cooldown_steps(settings))
    return training.step >= since + settings.patience * settings.eval_every


def _keep_pace(training: Training, log: RunLog) -> None:
    """Before the cool-down, fit the number of steps to the minutes at the speed so far.

    Up to there no step depends on that number, so the run is the one that the final configuration
    describes.
    """
    settings, now = training.config.train, (training.step, training.elapsed)
    if training.first is None:  # the first update of a command takes memory for all others
        training.first = now
    elif training.step % settings.log_every == 0 and settings.minutes is not None:
        seconds = (now[1] - training.first[1]) / (now[0] - training.first[0])
        steps = fit.paced_steps(settings, *now, seconds)
        if steps != settings.steps:
            training.change(steps=steps)
            training.run.write_config(training.config)
            log.plan(steps)


def _save_is_due(training: Training) -> bool:
    settings, step = training.config.train, training.step
    is_best = training.best is not None and training.best["step"] == step
    return step % settings.save_every == 0 or is_best or _is_finished(training)


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
    training.model.zero_grad()
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
    rate = learning_rate(settings, step) * training.lr_scale
    size = settings.micro_batch_size or settings.batch_size
    for micro, (x, y) in enumerate(zip(tokens.split(size), targets.split(size), strict=True)):
        torch.manual_seed(draw(settings.seed, step, micro))  # for dropout
        with training.precision():
            share = loss(model, x.to(training.device), y.to(training.device)) * len(x) / len(tokens)
        share.backward()
        total += share.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip).item()
    if not math.isfinite(norm):
        raise DivergedError(diverged(training, f"loss {total:.4g}, gradient norm {norm}"))
    training.optimizer.step(rate)
    return {"train_loss": total, "lr": rate, "grad_norm": norm}


def sample(training: Training) -> str:
    """What the model would write now; nothing of it touches the training."""
    settings = training.config.sample
    settings = settings.model_copy(
        update={"max_new_tokens": min(SAMPLE, settings.max_new_tokens), "overflow": "stop"}
    )
    model, tokenizer = training.model, training.corpus.tokenizer
    limit = training.config.model.context_length
    text = Text(0, [tokenizer.document_token], limit)
    model.eval()
    with training.eagerly():
        for _, token, _ in decode(TorchEngine(model), [text], settings, limit):
            if token == tokenizer.document_token:
                break
    return tokenizer.decode(text.tokens)


def assess(training: Training) -> dict[str, Any]:
    """Evaluate the whole validation split and remember the best step."""
    settings, corpus = training.config.train, training.corpus
    held_out = batches.validation_batches(
        corpus.validation, training.config.seq_len, settings.micro_batch_size or 1
    )
    with training.eagerly():
        lengths = corpus.tokenizer.byte_lengths()
        result = evaluate(training.model, held_out, lengths, training.precision)
    if not math.isfinite(result.loss):
        raise DivergedError(diverged(training, f"validation loss {result.loss}"))
    if training.best is None or result.loss < training.best["val_loss"]:
        training.best = stamp(training) | {
            "val_loss": result.loss,
            "val_bpb": result.bits_per_byte,
        }
    return {"val_loss": result.loss, "val_bpb": result.bits_per_byte}
