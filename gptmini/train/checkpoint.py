"""Saves a training run as a checkpoint, and restores it from one.

How ranks share the work is the business of `training.checkpoints` (distributed/checkpoints.py).
"""

from dataclasses import asdict, fields

from gptmini.console import warn
from gptmini.errors import CheckpointError, DataError, DivergedError
from gptmini.model.optim import MUON_VERSION
from gptmini.runs.directory import Checkpoint
from gptmini.runs.tensors import check_shapes
from gptmini.train.messages import describe_changed_text, describe_divergence
from gptmini.train.state import Progress, Training

# What the last bit of a result depends on, besides the configuration.
BITS_DEPEND_ON = ("torch", "threads", "device", "dtype", "compile", "deterministic")
# What checkpoints of older versions lack; the defaults of Progress hold for them.
ADDED_LATER = {"loss_scale", "deterministic", "muon_version", "source"}


def save_checkpoint(training: Training) -> None:
    """Write a checkpoint of this step, unless there is one.

    DivergedError for weights that are not finite: an update may corrupt them after a finite loss.
    """
    if training.saved_step == training.step:
        return
    weights = training.model.state_dict()
    if not training.checkpoints.are_finite(weights):
        raise DivergedError(describe_divergence(training, "weights that are not finite"))
    training.progress.elapsed = training.elapsed
    state = asdict(training.progress)
    optimizer = training.optimizer.state_dict()
    training.checkpoints.save(state, weights, optimizer, training.config.train.keep)
    training.saved_step = training.step


def restore_checkpoint(training: Training, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights, optimizer state and progress.

    Checkpoints of later steps are damaged, since this one was found, and set aside.
    """
    run = training.run
    saved = _read_progress(training, checkpoint)
    model = training.model
    model.load_state_dict(check_shapes(checkpoint.model, model.state_dict(), run.checkpoints))
    if checkpoint.step == 0:  # the weights of a base, without a state of the optimizer
        training.optimizer.reset()
    else:
        expected = training.optimizer.expected_state_dict()
        check_shapes(checkpoint.optimizer, expected, run.checkpoints)
        training.optimizer.load_state_dict(checkpoint.optimizer)
    training.group.on_rank_zero(lambda: run.set_aside_after(checkpoint.step))
    _update_environment(training, saved)
    training.progress = saved
    training.saved_step = saved.step
    training.last_logged = (saved.step, saved.seconds)
    training.recent_losses.clear()
    training.first_update = None
    training.group.on_rank_zero(lambda: run.write_best(saved.best))


def _read_progress(training: Training, checkpoint: Checkpoint) -> Progress:
    """Return the progress that a checkpoint holds, which must be on the same text."""
    run = training.run
    names = {entry.name for entry in fields(Progress)}
    found = names & checkpoint.state.keys()
    missing = names - found - ADDED_LATER
    if missing:
        raise CheckpointError(f"{run.checkpoints}: step {checkpoint.step} lacks {min(missing)}")
    saved = Progress(**{name: checkpoint.state[name] for name in found})
    if saved.corpus != training.progress.corpus:
        raise DataError(describe_changed_text(training.config, run))
    is_unfinished = 0 < saved.step < training.config.train.steps
    uses_muon = training.config.train.optimizer == "muon"
    if is_unfinished and uses_muon and saved.muon_version != MUON_VERSION:
        raise CheckpointError(
            f"{run.path}: begun by another version of gptmini, whose Muon makes other updates; "
            f"finish it with that version, or begin a new run with --from {run.path}"
        )
    return saved


def _update_environment(training: Training, saved: Progress) -> None:
    """Note in a progress where it now continues; warn if the bits will no longer be the same."""
    now = training.progress
    if saved.dtype != now.dtype:  # one begins or ends to need it
        saved.loss_scale = now.loss_scale
    changes = []
    for name in BITS_DEPEND_ON:
        before = getattr(saved, name)
        current = getattr(now, name)
        if before != current:
            changes.append(f"{name} was {before}, is {current}")
            setattr(saved, name, current)
    if changes:
        warn(f"{training.run.path}: {'; '.join(changes)}; results will no longer be bit-identical")
