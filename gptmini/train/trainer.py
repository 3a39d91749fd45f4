"""The training loop: batch, loss, update, then log, evaluate, save.

Everything random is a function of (seed, step, micro-batch). A run that was stopped and resumed
therefore makes the same weights as one that never stopped, and nothing random is saved.
"""

import math
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptmini import machine
from gptmini.console import TrainingProgressBar, iter_with_progress, say, warn
from gptmini.errors import DivergedError, Stopped
from gptmini.generate.engine import TorchEngine
from gptmini.generate.sampler import decode
from gptmini.generate.texts import Text, encode_start
from gptmini.model.gpt import compute_loss
from gptmini.model.optim import get_cooldown_steps, get_learning_rate
from gptmini.plan.minutes import compute_paced_steps
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import NoLog, RunLog
from gptmini.train.batches import iter_validation_batches, seed_from
from gptmini.train.evaluate import evaluate
from gptmini.train.messages import (
    describe_finished,
    describe_how_to_continue,
    report_spike,
    say_header_lines,
)
from gptmini.train.state import (
    Training,
    build_training,
    create_or_resume,
    describe_divergence,
    load_newest_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)

if TYPE_CHECKING:  # plan.decide imports the text formats, which training must not depend on
    from gptmini.plan.decide import Decision

MAX_SAMPLE_TOKENS = 120  # drawn at each evaluation
SAMPLING = 0.01  # of the minutes at most for each
MIN_LR_SCALE = 1 / 32  # a run that still diverges at this share of its learning rate ends


def train(decision: "Decision", out: Path) -> bool:
    """Train the run in a directory to its last step, from wherever it stands; False if it is there.

    Raises ConfigError if another run lives there, DataError if the text has changed,
    CheckpointError if no checkpoint is whole, DivergedError for a loss that is not finite, and
    Stopped after a signal, once everything is saved.
    """
    run = RunDirectory(out)
    training = build_training(decision, run)
    with training.group.enter_on_rank_zero(run.lock()):
        create_or_resume(training)
        if _is_finished(training):
            say(f"{out}: {describe_finished(training)}; {describe_how_to_continue(training)}")
            return False
        say_header_lines(training, decision)
        weights = sum(p.nbytes for p in training.model.parameters())
        training.group.on_rank_zero(
            lambda: run.check_space(3 * weights)
        )  # with the optimizer's moments
        log = NoLog() if training.group.rank else RunLog(run.path, training.config, training.step)
        bar = TrainingProgressBar(training.step, training.config.train.steps)
        try:
            with machine.catch_signals() as received:
                if training.step == 0 and training.config.base.run is not None:
                    log.rewind_to(-1)  # a kill may have come after this line
                    first = _evaluate(training)
                    log.write(training.progress.to_metrics() | first)
                    bar.show(first)
                _run_loop(training, log, bar, received)
        finally:
            bar.close()
            log.close()
    return True


def _run_loop(
    training: Training, log: RunLog, bar: TrainingProgressBar, received: machine.ReceivedSignals
) -> None:
    """Make the steps that are left, or end early once the validation loss has stopped improving."""
    while not _is_finished(training):
        stop = None
        try:
            _advance(training, log, bar)
            if training.paced:
                _keep_pace(training, bar)
            stop, save_requested = training.group.agree_on_signals(
                received
            )  # a later signal waits for its own step
            if _is_save_due(training) or stop is not None or save_requested:
                received.save = False
                log.sync()
                started = time.perf_counter()
                save_checkpoint(training)
                training.saving = time.perf_counter() - started
        except DivergedError as error:
            if training.config.train.on_divergence == "stop":
                raise
            _rewind(training, log, bar, error)
        if stop is not None:
            name = "Ctrl-C" if stop == signal.SIGINT else signal.Signals(stop).name
            raise Stopped(
                stop,
                f"{training.run.path}: stopped by {name} after step {training.step}, saved; run "
                f"the same command to resume",
            )
    if training.step < training.config.train.steps:
        say(f"ended at step {training.step}: {describe_how_to_continue(training)}")


def _advance(training: Training, log: RunLog, bar: TrainingProgressBar) -> None:
    """Make one step; log and evaluate when due."""
    settings, progress = training.config.train, training.progress
    started = time.perf_counter()
    metrics = train_step(training)
    progress.step += 1
    progress.tokens += settings.batch_size * training.config.seq_len
    progress.seconds += time.perf_counter() - started
    bar.advance(metrics["train_loss"])
    report_spike(training, metrics["train_loss"])
    last = training.step == settings.steps
    record: dict[str, Any] = {}
    if training.step % settings.log_every == 0 or training.step == 1 or last:
        steps, seconds = (
            training.step - training.last_logged[0],
            progress.seconds - training.last_logged[1],
        )
        tokens = steps * settings.batch_size * training.config.seq_len
        record |= metrics | {"tokens_per_second": round(tokens / seconds, 1)}
        training.last_logged = (training.step, progress.seconds)
    if training.step % settings.eval_every == 0 or last:
        record |= _evaluate(training)
    if record:
        log.write(progress.to_metrics() | record)
        bar.show(record)


def train_step(training: Training) -> dict[str, Any]:
    """One optimizer update on the windows of the step; returns its metrics."""
    settings, model, step = training.config.train, training.model, training.step
    model.train()
    tokens, targets = training.batches.get_batch(step)  # (B, T) each; of several ranks, (B / W, T)
    size = settings.micro_batch_size or len(tokens)
    losses = [0.0] * (settings.batch_size // size)
    lr = get_learning_rate(settings, step) * training.progress.lr_scale
    parts = zip(training.micro_batches, tokens.split(size), targets.split(size), strict=True)
    for micro, x, y in parts:
        torch.manual_seed(seed_from(settings.seed, step, micro))  # for dropout
        with training.compute.autocast():
            # Weighted by its rows, so that the gradients add up to those of the whole batch.
            mean = compute_loss(model, x.to(model.device), y.to(model.device))
            share = mean * len(x) / settings.batch_size
        share.backward()
        training.gradients.after_backward()
        losses[micro] = share.item()
    training.gradients.finish()
    total = training.group.all_reduce_sum(losses)
    norm = training.gradients.clip(settings.grad_clip)
    if not math.isfinite(total + norm):  # clipping by a NaN norm would make every gradient NaN
        raise DivergedError(
            describe_divergence(training, f"loss {total:.4g}, gradient norm {norm}")
        )
    training.optimizer.step(lr)
    return {"train_loss": total, "lr": lr, "grad_norm": norm}


def _evaluate(training: Training) -> dict[str, Any]:
    """An evaluation, and how long it takes, for the pace."""
    started = time.perf_counter()
    metrics = evaluate_and_sample(training)
    training.evaluating = time.perf_counter() - started
    return metrics


def evaluate_and_sample(training: Training) -> dict[str, Any]:
    """What is logged at each evaluation."""
    return evaluate_validation(training) | {
        "sample": generate_sample(training) if training.group.rank == 0 or training.shards else "",
        "peak_memory": machine.get_peak_memory(training.compute.device),
    }


def evaluate_validation(training: Training) -> dict[str, Any]:
    """Evaluate on the validation split, or a fixed part of it, and remember the best step."""
    settings, corpus, progress = training.config.train, training.corpus, training.progress
    seq_len, rows = training.config.seq_len, settings.micro_batch_size or 1
    batches = iter_validation_batches(corpus.validation, seq_len, rows, limit=settings.eval_tokens)
    with training.without_compile():
        lengths = corpus.tokenizer.compute_byte_lengths()
        read = min(corpus.held_out, settings.eval_tokens or corpus.held_out)
        seen = iter_with_progress(batches, "evaluating", math.ceil(read / (rows * seq_len)))
        result = evaluate(training.model, seen, lengths, training.compute, training.group)
    if not math.isfinite(result.loss):
        raise DivergedError(describe_divergence(training, f"validation loss {result.loss}"))
    losses = {"val_loss": result.loss, "val_bpb": result.bits_per_byte}
    if progress.best is None or result.loss < progress.best["val_loss"]:
        progress.best = progress.to_metrics() | losses
    return losses


def generate_sample(training: Training) -> str:
    """What the model would write now; drawing it does not touch the training."""
    settings = training.config.sample
    settings = settings.model_copy(
        update={
            "max_new_tokens": min(MAX_SAMPLE_TOKENS, settings.max_new_tokens),
            "overflow": "stop",
        }
    )
    model, tokenizer = training.model, training.corpus.tokenizer
    limit = training.config.model.context_length
    tokens = encode_start(tokenizer, settings)
    text = Text(0, tokens, limit, tokenizer=tokenizer, stops=settings.stop)
    model.eval()
    started = time.perf_counter()
    minutes = training.config.train.minutes
    alone = training.paced and training.group.world_size == 1  # ranks must draw equally many
    seconds = SAMPLING * 60 * minutes if minutes is not None and alone else math.inf
    with training.without_compile():
        for _, token, _ in decode(TorchEngine(model), [text], settings, limit, training.bias):
            text.decode_token(token)
            if time.perf_counter() - started > seconds:
                break
    return text.text


def _is_finished(training: Training) -> bool:
    return training.step >= training.config.train.steps or _has_stopped_improving(training)


def _has_stopped_improving(training: Training) -> bool:
    """Whether the best validation loss is `train.patience` evaluations old.

    Only evaluations in the cool-down count: on the plateau the loss goes up and down, and falls
    again later.
    """
    settings, best = training.config.train, training.progress.best
    if settings.patience is None or best is None or training.step % settings.eval_every:
        return False
    since = max(best["step"], settings.steps - get_cooldown_steps(settings))
    return training.step >= since + settings.patience * settings.eval_every


def _keep_pace(training: Training, bar: TrainingProgressBar) -> None:
    """Before the cool-down, fit the number of steps to the minutes at the speed so far.

    No step up to there depends on that number, so the final configuration describes the whole run.
    """
    config, now = training.config, (training.step, training.progress.seconds)
    if training.first_update is None:  # a command's first update allocates for all the others
        training.first_update = now
    elif training.step % config.train.log_every == 0:
        pace = (training.first_update, now, training.elapsed, training.corpus.held_out)
        around = (training.evaluating, training.saving)
        steps = training.group.on_rank_zero(lambda: compute_paced_steps(config, *pace, *around))
        if config.train.minutes and steps != config.train.steps:
            training.config = config.with_train(steps=steps)
            training.group.on_rank_zero(lambda: training.run.write_config(training.config))
            bar.set_steps(steps, config.train.minutes)


def _is_save_due(training: Training) -> bool:
    step, best = training.step, training.progress.best
    is_best = best is not None and best["step"] == step
    due = step % training.config.train.save_every == 0
    return due or is_best or _is_finished(training)


def _rewind(
    training: Training, log: RunLog, bar: TrainingProgressBar, error: DivergedError
) -> None:
    """Return to the newest checkpoint at half the learning rate; raises if that cannot help.

    A run that is killed after this and resumed reaches the same step, diverges and rewinds again.
    """
    scale = training.progress.lr_scale / 2
    checkpoint = load_newest_checkpoint(training)
    if checkpoint is None or scale < MIN_LR_SCALE:
        raise error
    restore_checkpoint(training, checkpoint)
    training.progress.lr_scale = scale
    training.model.zero_grad()
    if training.progress.best is None:  # the weights of a base are saved before they are evaluated
        evaluate_validation(training)
        training.group.on_rank_zero(lambda: training.run.write_best(training.progress.best))
    log.rewind_to(training.step)
    bar.rewind_to(training.step)
    reason = error.lines[0].split(";")[0]
    warn(f"{reason}; rewinding to step {training.step} at {scale:g} of the learning rate")
