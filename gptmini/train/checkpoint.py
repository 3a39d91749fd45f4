"""Creates a training run or resumes it, saves it as a checkpoint and restores it from one.

A run exists once its configuration is written. Weights that are not drawn from the seed must be
saved before that: a run without a checkpoint begins from random weights.

Only rank 0 reads and writes files, and the others send it what they hold and get theirs from it. So
a checkpoint is the same whatever number of ranks wrote it.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gptmini.config.settings import Config
from gptmini.console import show_elapsed, warn
from gptmini.errors import CheckpointError, ConfigError, DataError, DivergedError
from gptmini.generate.own_model import check_same_start
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.progress import Progress, describe_edited_text, describe_own_model
from gptmini.runs.tensors import check_weights, find_infinite
from gptmini.train.state import Training

# What the last bit of a result depends on: what runs it, and two settings that may change.
# Rows computed together draw their dropout together, and the gradients of such groups are added.
ENVIRONMENT = ("torch", "threads", "device", "dtype", "compile", "deterministic", "own_optimizer")
GROUPING = ("micro_batch_size", "reduce")


def create_or_resume(training: Training, existing: Config | None) -> None:
    """Make the run directory, or resume the `existing` run from its newest checkpoint.

    ConfigError if another process has made the run, or removed it, since it was planned.
    """
    run = training.run
    config = training.config
    group = training.group
    stated = training.plan.request.stated
    group.on_rank_zero(_check_unchanged, run, existing)
    if existing is None:
        if config.base.run is not None:
            _load_base_weights(training, RunDirectory(Path(config.base.run)))
            save_checkpoint(training)
        group.on_rank_zero(run.create, config, training.corpus.tokenizer, stated)
        return
    with show_elapsed("loading the newest checkpoint"):
        checkpoint = group.read(run.load_newest)
    if checkpoint is not None:
        _restore(training, existing, checkpoint)
    elif config.base.run is not None:
        # Beginning again would train from random weights what was to begin from the base.
        raise CheckpointError(
            f"{run.checkpoints}: no checkpoint to resume from; delete {run.path} to begin again "
            f"from {config.base.run}"
        )
    if training.step < config.train.steps:
        group.on_rank_zero(run.write_config, config, stated)


def _check_unchanged(run: RunDirectory, existing: Config | None) -> None:
    if run.exists != (existing is not None):
        raise ConfigError(f"{run.path}: changed by another process; run the same command again")


def _load_base_weights(training: Training, base: RunDirectory) -> None:
    """Load the weights that the configuration names; CheckpointError if they are gone."""
    with show_elapsed("loading the base"):
        checkpoint = training.group.read(base.load_best)
    assert checkpoint is not None
    if checkpoint.sha256 != training.config.base.sha256:
        raise CheckpointError(
            f"{base.path}: its best checkpoint is damaged or has changed; run the same command "
            f"again, or restore it"
        )
    if checkpoint.state.get("own_model") and training.own.model is None:
        changed = f'config | {{"base": {{"run": "{base.path}"}}}}'
        remedy = f'gptmini.fit({changed}, "{training.run.path}", model=build)'
        raise ConfigError(describe_own_model(base.path, remedy))
    _load_weights(training, checkpoint, base.checkpoints)
    training.progress.source = checkpoint.state.get("source", "")
    saw = training.group.on_rank_zero(_may_have_seen_held_out, base, checkpoint.state, training)
    training.progress.saw_held_out = saw


def _may_have_seen_held_out(base: RunDirectory, state: dict[str, Any], training: Training) -> bool:
    """Return whether a base may have been trained on text that this run holds out."""
    if state["corpus"] == training.corpus.content:  # the same part is held out
        return bool(state.get("saw_held_out"))
    from gptmini.data.corpus import has_same_text  # noqa: PLC0415 - the loop reads no texts

    data = training.config.data
    held_out = data.validation_path or data.path
    return has_same_text(base.load_config().data, state["corpus"], held_out)


def _load_weights(training: Training, checkpoint: Checkpoint, where: Path) -> None:
    """Load weights that rank 0 has read; CheckpointError for those of another model."""
    group = training.group
    group.on_rank_zero(check_weights, checkpoint.model, training.model, where)
    training.model.load_state_dict(group.scatter(checkpoint.model))


def save_checkpoint(training: Training) -> None:
    """Write a checkpoint of this step, unless there is one.

    DivergedError for weights that are not finite: an update may corrupt them after a finite loss.
    """
    if training.saved_step == training.step:
        return
    group = training.group
    weights = group.gather(training.model.state_dict())
    optimizer = group.gather(training.optimizer.state_dict())
    if group.on_rank_zero(find_infinite, weights, training.model):
        raise DivergedError("weights that are not finite")
    training.progress.elapsed = training.elapsed
    checkpoint = Checkpoint(asdict(training.progress), weights, optimizer)
    group.on_rank_zero(training.run.save, checkpoint, training.config.train.keep)
    training.saved_step = training.step


def _restore(training: Training, existing: Config, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights, optimizer state and progress, and tidy the others."""
    run = training.run
    saved = _read_progress(training, checkpoint)
    _load_weights(training, checkpoint, run.checkpoints)
    optimizer = training.group.scatter(checkpoint.optimizer)
    if optimizer:  # there is none before the first update, or of a loop of your own
        training.optimizer.load_state_dict(optimizer)
    _note_environment(training, existing, saved)
    training.progress = saved
    training.saved_step = saved.step
    training.started -= saved.elapsed
    training.group.on_rank_zero(run.tidy_after, saved.step, saved.best, training.config.train.keep)


def _read_progress(training: Training, checkpoint: Checkpoint) -> Progress:
    """Return the progress that a checkpoint holds, which must be on the same text."""
    run = training.run
    now = training.progress
    older: dict[str, Any] = {"own_logits": [], "saw_held_out": False}  # runs lack these
    older["own_parts"] = now.own_parts
    state = older | checkpoint.state
    try:
        saved = Progress(**{each.name: state[each.name] for each in fields(Progress)})
    except KeyError as missing:
        raise CheckpointError(
            f"{run.checkpoints}: step {checkpoint.step} lacks {missing.args[0]}, perhaps begun by "
            f"an older version; finish it with that version, or begin a new run with --from "
            f"{run.path}"
        ) from None
    if saved.own_model and training.own.model is None:
        config = f'gptmini.load("{run.path}", model=build).config'
        config += f".with_train(steps={training.config.train.steps})"
        remedy = f'gptmini.fit({config}, "{run.path}", model=build)'
        raise ConfigError(describe_own_model(run.path, remedy))
    if training.own.model is not None and not saved.own_model:
        raise ConfigError(f"{run.path}: was begun with gptmini's model; choose another out")
    check_same_start(run.path, saved.own_logits, now.own_logits)
    old_parts, parts = (
        [each.own_optimizer.split(" ")[0] or "gptmini's optimizer", *each.own_parts]
        for each in (saved, now)
    )
    if saved.step > 0 and old_parts != parts:
        raise ConfigError(
            f"{run.path}: was trained with {', '.join(old_parts)}, not {', '.join(parts)}; pass "
            f"the same parts to gptmini.fit, or choose another out"
        )
    saved.own_parts = now.own_parts
    if saved.corpus != now.corpus:
        raise DataError(describe_edited_text(training.config.data.path, run.path))
    return saved


def _note_environment(training: Training, existing: Config, saved: Progress) -> None:
    """Note in a progress where it now continues; warn if the bits will no longer be the same."""
    now = training.progress
    if saved.dtype != now.dtype:  # one begins or ends to need it
        saved.loss_scale = now.loss_scale
    before = asdict(saved) | existing.train.model_dump(include=set(GROUPING))
    after = asdict(now) | training.config.train.model_dump(include=set(GROUPING))
    for name in ENVIRONMENT:
        setattr(saved, name, after[name])
    changed = [name for name in (*ENVIRONMENT, *GROUPING) if before[name] != after[name]]
    if changed and 0 < saved.step < training.config.train.steps:
        changes = "; ".join(f"{name} was {before[name]}, is {after[name]}" for name in changed)
        warn(f"{training.run.path}: {changes}; results will no longer be bit-identical")
