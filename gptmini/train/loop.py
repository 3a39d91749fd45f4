"""The training loop: update, evaluate, report, save.

Every random number is a hash of the seed and of where it is used: step and micro-batch, text and
epoch. So nothing random is saved, and a run that is stopped and resumed makes the same weights as
one that never stops, after as many steps.

Several processes train one model in step: `group` is where they meet. In a single process each of
its methods returns what it is given, or calls it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gptmini.errors import Stopped
from gptmini.machine import ReceivedSignals, catch_signals
from gptmini.runs.directory import RunDirectory
from gptmini.train.build import build_training
from gptmini.train.checkpoint import create_or_resume, save_checkpoint
from gptmini.train.group import SINGLE_PROCESS, Group
from gptmini.train.minutes import keep_to_minutes
from gptmini.train.reporter import Reporter, describe_stopped, explain_divergence, say_finished
from gptmini.train.state import CustomParts, Training
from gptmini.train.step import train_step
from gptmini.train.validate import evaluate_validation

if TYPE_CHECKING:
    from gptmini.plan.settle import Plan


def train(
    plan: Plan,
    out: Path,
    own: CustomParts | None = None,
    group: Group = SINGLE_PROCESS,
    verbose: bool = False,
) -> Training | None:
    """Train a run to its last step, resuming it if it exists; None if it was finished already.

    Raises ConfigError if `out` holds a run with other settings, DataError if the text has changed,
    CheckpointError if no checkpoint is whole, DivergedError for a loss that is not finite, and
    Stopped after a signal, once everything is saved.
    """
    run = RunDirectory(out)
    training = build_training(plan, run, own, group)
    with (
        training.compute.enter_training(),
        group.enter_on_rank_zero(run.lock()),
        explain_divergence(training),
    ):
        create_or_resume(training, plan.request.existing)
        if training.is_finished:
            say_finished(training)
            return None
        weight_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
        group.on_rank_zero(run.check_space, 3 * weight_bytes)  # with two moments of each weight
        with Reporter(training, verbose) as reporter, catch_signals() as received:
            if training.step == 0 and training.config.base.run is not None:
                reporter.report({}, evaluate_validation(training))
            _run_loop(training, reporter, received)
    return training


def _run_loop(training: Training, reporter: Reporter, received: ReceivedSignals) -> None:
    """Make the steps that are left, or end early once the validation loss has stopped improving."""
    while not training.is_finished:
        started = time.perf_counter()
        metrics = train_step(training)
        training.progress.step += 1
        training.progress.tokens += training.tokens_per_step
        training.progress.seconds += time.perf_counter() - started
        evaluation = evaluate_validation(training) if training.is_evaluation_due else {}
        reporter.report(metrics, evaluation)
        if training.steps_follow_minutes:
            keep_to_minutes(training)
        # Once for each step: a signal that comes later waits for the end of the next one.
        stop, save_requested = training.group.agree_on_signals(received)
        if training.is_save_due or stop is not None or save_requested:
            received.save = False
            reporter.sync()  # so that the log never lags behind a checkpoint
            save_checkpoint(training)
        if stop is not None:
            raise Stopped(stop, describe_stopped(training, stop))
