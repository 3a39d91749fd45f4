"""Reports on a training: to the terminal, to the log and its trackers, and to a loop of your own.

A `Reporter` hears of every step, of the evaluation after it if there was one, and of the end. What
it says before the first step is in header.py.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gptmini import machine
from gptmini.console import say
from gptmini.errors import DivergedError
from gptmini.runs.log import RunLog
from gptmini.train.header import has_too_short_text, say_header_lines
from gptmini.train.progress_bar import TrainingProgressBar
from gptmini.train.sample import generate_sample
from gptmini.train.state import Training

Metrics = dict[str, Any]


class Reporter:
    """Shows a training that begins or is resumed, and logs it; only rank 0 has a log.

    MachineError for a tracker that is not installed or does not start.
    """

    def __init__(self, training: Training, verbose: bool = False) -> None:
        say_header_lines(training, verbose)
        self._training = training
        self._log: RunLog | None = None
        if training.group.rank == 0:
            self._log = RunLog(training.run.path, training.config, training.step)
        self._bar = TrainingProgressBar(training.step, training.config.train.steps)
        self._last_logged = (training.step, training.progress.seconds)

    def __enter__(self) -> "Reporter":
        return self

    def report(self, step: Metrics, evaluation: Metrics) -> None:
        """Report the metrics of an update, and of the evaluation after it; either may be empty.

        They become one line of the log, where they are due. A sample is drawn at an evaluation.
        """
        training = self._training
        if step:
            self._bar.advance(step["train_loss"], training.config.train.steps)
            if training.own.on_step is not None:
                training.own.on_step(training.step, step)
        line: Metrics = {}
        if step and training.is_log_due:
            last_step, last_seconds = self._last_logged
            self._last_logged = (training.step, training.progress.seconds)
            tokens = (training.step - last_step) * training.tokens_per_step
            speed = round(tokens / (training.progress.seconds - last_seconds), 1)
            line |= step | {"tokens_per_second": speed}
        if evaluation:
            # A sharded model needs every rank for a forward pass.
            samples_here = self._log is not None or training.group.is_sharded
            sample = generate_sample(training) if samples_here else ""
            peak_memory = machine.get_peak_memory(training.compute.device)
            line |= evaluation | {"sample": sample, "peak_memory": peak_memory}
        if line:
            if self._log is not None:
                self._log.write(training.progress.to_metrics() | line)
            self._bar.show(line)

    def sync(self) -> None:
        """Make what is logged so far survive a power cut, as a checkpoint does."""
        if self._log is not None:
            self._log.sync()

    def __exit__(self, error_type: object, *_: object) -> None:
        """End with the training; say why if early, and what to try if it has brought nothing."""
        self._bar.close()
        if self._log is not None:
            self._log.close()
        training = self._training
        is_short = training.step < training.config.train.steps
        if error_type is None and (is_short or not training.is_better_than_base):
            say(f"ended at step {training.step}: {describe_how_to_continue(training)}")


# -- why it ends -----------------------------------------------------------------------------------


def say_finished(training: Training) -> None:
    """Say that a run has no steps left to make, and how to train it on."""
    finished = f"already finished at step {training.step:,}"
    say(f"{training.run.path}: {finished}; {describe_how_to_continue(training)}")


def describe_how_to_continue(training: Training) -> str:
    """Return how to train a run on that is finished or has stopped improving."""
    settings = training.config.train
    best = training.progress.best
    if not training.is_better_than_base:
        return (
            f"fine-tuning did not help: no evaluation was better than {training.config.base.run}, "
            f"so this run has its weights; with another --out, leave out --from to train a new "
            f"model, or lower {_name_rates(training)}"
        )
    if training.step >= settings.steps or best is None:
        if has_too_short_text(training):
            return "more epochs of so short a text would make the model worse"
        option = "--minutes" if training.steps_follow_minutes else "--steps"
        return f"pass a larger {option} to train longer"
    return (
        f"the validation loss was best at step {best['step']}; pass --set train.patience=null to "
        f"train on"
    )


def describe_stopped(training: Training, signal_number: int) -> str:
    """Return the message for a run that a signal has ended."""
    name = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
    saved = f"{training.run.path}: stopped by {name} after step {training.step}, saved"
    if not training.is_better_than_base:
        base = training.config.base.run
        saved += f"; no evaluation was better than {base} yet, so this run has its weights"
    return f"{saved}; run the same command to resume"


def _name_rates(training: Training) -> str:
    """Name what to lower against divergence."""
    if training.own.optimizer is not None or training.own.schedule is not None:
        return "your learning rate"
    return "train.muon_lr and train.lr" if training.config.train.optimizer == "muon" else "train.lr"


@contextmanager
def explain_divergence(training: Training) -> Iterator[None]:
    """Add to a DivergedError the run, its step and a remedy."""
    try:
        yield
    except DivergedError as error:
        raise DivergedError(
            f"{training.run.path}: {error} after step {training.step}; the bad step was not saved; "
            f"lower {_name_rates(training)}, and choose another --out"
        ) from None
