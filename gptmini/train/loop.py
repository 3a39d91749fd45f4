"""The training loop: update, then log, evaluate, save.

Every random number is a hash of the seed and of where it is used: step and micro-batch, text and
epoch. So nothing random is saved, and a run that is stopped and resumed makes the same weights as
one that never stops, after as many steps.

Several processes train one model in step: `group` is where they meet. In a single process each of
its methods returns what it is given, or calls it.
"""

import math
import time
from pathlib import Path
from typing import Any

from gptmini import machine
from gptmini.console import iter_with_progress, say
from gptmini.errors import DivergedError, Stopped
from gptmini.model.optim import get_cooldown_steps
from gptmini.plan.minutes import compute_steps_for_minutes
from gptmini.plan.plan import Plan
from gptmini.plan.recipe import compute_useful_steps
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import NoLog, RunLog
from gptmini.train.batches import iter_validation_batches
from gptmini.train.build import build_training
from gptmini.train.checkpoint import create_or_resume, save_checkpoint
from gptmini.train.evaluate import evaluate
from gptmini.train.group import SINGLE_PROCESS, Group
from gptmini.train.kept_losses import write_losses
from gptmini.train.messages import (
    describe_divergence,
    describe_how_to_continue,
    describe_stopped,
    report_spike,
    say_header_lines,
)
from gptmini.train.progress_bar import TrainingProgressBar
from gptmini.train.sample import generate_sample
from gptmini.train.state import CustomParts, Training
from gptmini.train.step import train_step

# After which the number of steps is fitted to the minutes again; just before the cool-down, after
# each.
STEPS_BETWEEN_FITS = 5


def train(
    plan: Plan, out: Path, own: CustomParts | None = None, group: Group = SINGLE_PROCESS
) -> Training | None:
    """Train a run to its last step, resuming it if it exists; None if it was finished already.

    Raises ConfigError if `out` holds a run with other settings, DataError if the text has changed,
    CheckpointError if no checkpoint is whole, DivergedError for a loss that is not finite, and
    Stopped after a signal, once everything is saved.
    """
    run = RunDirectory(out)
    training = build_training(plan, run, own, group)
    with training.compute.enter_training(), group.enter_on_rank_zero(run.lock()):
        create_or_resume(training, plan.request.existing)
        if _is_finished(training):
            finished = f"already finished at step {training.step:,}"
            say(f"{out}: {finished}; {describe_how_to_continue(training)}")
            return None
        say_header_lines(training)
        weight_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
        # A checkpoint holds the weights and up to two moments of each in the optimizer.
        group.on_rank_zero(lambda: run.check_space(3 * weight_bytes))
        log = RunLog(run.path, training.config, training.step) if group.rank == 0 else NoLog()
        bar = TrainingProgressBar(training.step, training.config.train.steps)
        try:
            with machine.catch_signals() as received:
                if training.step == 0 and training.config.base.run is not None:
                    _log(training, log, bar, evaluate_and_sample(training))
                _run_loop(training, log, bar, received)
        finally:
            bar.close()
            log.close()
    return training


def _run_loop(
    training: Training, log: RunLog, bar: TrainingProgressBar, received: machine.ReceivedSignals
) -> None:
    """Make the steps that are left, or end early once the validation loss has stopped improving."""
    while not _is_finished(training):
        _advance(training, log, bar)
        if training.steps_follow_minutes:
            _keep_to_minutes(training, bar)
        # Once for each step: a signal that comes later waits for the end of the next one.
        stop, save_requested = training.group.agree_on_signals(received)
        if _is_save_due(training) or stop is not None or save_requested:
            received.save = False
            log.sync()  # so that the log never lags behind a checkpoint
            save_checkpoint(training)
        if stop is not None:
            raise Stopped(stop, describe_stopped(training, stop))
    if training.step < training.config.train.steps:
        say(f"ended at step {training.step}: {describe_how_to_continue(training)}")


def _advance(training: Training, log: RunLog, bar: TrainingProgressBar) -> None:
    """Make one step; log and evaluate when due."""
    settings = training.config.train
    progress = training.progress
    step_tokens = settings.batch_size * training.config.seq_len
    started = time.perf_counter()
    try:
        metrics = train_step(training)
    except DivergedError as error:
        raise DivergedError(describe_divergence(training, str(error))) from None
    progress.step += 1
    progress.tokens += step_tokens
    progress.seconds += time.perf_counter() - started
    bar.advance(metrics["train_loss"])
    report_spike(training, metrics["train_loss"])
    if training.own.on_step is not None:
        training.own.on_step(training.step, metrics)
    is_last = training.step == settings.steps
    record: dict[str, Any] = {}
    if training.step % settings.log_every == 0 or training.step == 1 or is_last:
        logged_step, logged_seconds = training.last_logged
        tokens = (training.step - logged_step) * step_tokens
        seconds = progress.seconds - logged_seconds
        record |= metrics | {"tokens_per_second": round(tokens / seconds, 1)}
        training.last_logged = (training.step, progress.seconds)
    if training.step % settings.eval_every == 0 or is_last:
        record |= evaluate_and_sample(training)
    if record:
        _log(training, log, bar, record)


def _log(training: Training, log: RunLog, bar: TrainingProgressBar, record: dict[str, Any]) -> None:
    """Write the metrics of this step, and show them."""
    log.write(training.progress.to_metrics() | record)
    bar.show(record)


def evaluate_and_sample(training: Training) -> dict[str, Any]:
    """Return what is logged at each evaluation."""
    losses = evaluate_validation(training)
    # Only rank 0 logs. A sharded model needs every rank for a forward pass, though.
    samples_here = training.group.rank == 0 or training.group.is_sharded
    sample = generate_sample(training) if samples_here else ""
    peak_memory = machine.get_peak_memory(training.compute.device)
    return losses | {"sample": sample, "peak_memory": peak_memory}


def evaluate_validation(training: Training) -> dict[str, Any]:
    """Evaluate on the validation split, or a fixed part of it, and remember the best step."""
    settings = training.config.train
    corpus = training.corpus
    progress = training.progress
    seq_len = training.config.seq_len
    rows = settings.micro_batch_size or 1
    n_tokens = min(corpus.held_out, settings.eval_tokens or corpus.held_out)
    batches = iter_validation_batches(corpus.validation, seq_len, rows, limit=settings.eval_tokens)
    shown_batches = iter_with_progress(
        batches, "evaluating", math.ceil(n_tokens / (rows * seq_len))
    )
    with training.enter_inference():
        result = evaluate(
            training.model,
            shown_batches,
            corpus.tokenizer.compute_byte_lengths(),
            training.compute,
            training.group,
        )
    if not math.isfinite(result.loss):
        raise DivergedError(describe_divergence(training, f"validation loss {result.loss}"))
    metrics = {"val_loss": result.loss, "val_bpb": result.bits_per_byte}
    if progress.best is None or result.loss < progress.best["val_loss"]:
        progress.best = progress.to_metrics() | metrics
        training.group.on_rank_zero(
            lambda: write_losses(
                training.run.path,
                "validation",
                progress.step,
                corpus.validation,
                training.model,
                result,
                whole=n_tokens == corpus.held_out,
            )
        )
    return metrics


def _is_finished(training: Training) -> bool:
    return training.step >= training.config.train.steps or _has_stopped_improving(training)


def _has_stopped_improving(training: Training) -> bool:
    """Return whether the best validation loss is `train.patience` evaluations old.

    Only evaluations in the cool-down count: on the plateau the loss goes up and down, and falls
    again later.
    """
    settings = training.config.train
    best = training.progress.best
    if settings.patience is None or best is None or training.step % settings.eval_every:
        return False
    since = max(best["step"], settings.steps - get_cooldown_steps(settings))
    return training.step >= since + settings.patience * settings.eval_every


def _keep_to_minutes(training: Training, bar: TrainingProgressBar) -> None:
    """Before the cool-down, fit the number of steps to the minutes at the speed so far.

    Steps before the cool-down do not depend on the total, so the final configuration describes the
    whole run.
    """
    config = training.config
    settings = config.train
    now = (training.step, training.elapsed)
    since = training.first_step
    if since is None:
        training.first_step = now
        since = (0, training.elapsed - training.progress.seconds)  # all updates so far
    cooldown_begins = settings.steps - get_cooldown_steps(settings)
    to_next = STEPS_BETWEEN_FITS - training.step % STEPS_BETWEEN_FITS
    is_last_chance = training.step - 1 <= cooldown_begins < training.step + to_next
    if to_next < STEPS_BETWEEN_FITS and not is_last_chance:
        return
    steps = training.group.on_rank_zero(
        lambda: compute_steps_for_minutes(config, since, now, training.corpus.held_out)
    )
    if steps > settings.steps:
        useful = compute_useful_steps(config, training.plan.text_size)  # more overfit
        steps = max(settings.steps, int(min(steps, useful)))
    if steps != settings.steps:
        training.config = config.with_train(steps=steps)
        training.group.on_rank_zero(lambda: training.run.write_config(training.config))
        bar.set_steps(steps)


def _is_save_due(training: Training) -> bool:
    step = training.step
    best = training.progress.best
    is_best = best is not None and best["step"] == step
    is_due = step % training.config.train.save_every == 0
    return is_due or is_best or _is_finished(training)
