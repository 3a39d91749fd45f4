"""Begins a training run, or resumes it from its newest checkpoint."""

from pathlib import Path
from typing import Any

from gptmini.config.load import iter_differences
from gptmini.config.settings import Config
from gptmini.console import show_elapsed
from gptmini.errors import CheckpointError, ConfigError, DataError
from gptmini.runs.directory import RunDirectory
from gptmini.runs.tensors import check_shapes
from gptmini.train.checkpoint import restore_checkpoint
from gptmini.train.create import create_run, create_run_with_weights
from gptmini.train.messages import (
    describe_changed_text,
    describe_difference,
    say_if_rate_rises,
    warn_of_other_bits,
)
from gptmini.train.state import Training

# Settings that may change when a run is resumed; any other change would make it another run.
CHANGEABLE_SETTINGS = {
    "data.path",  # the content is compared instead
    "data.validation_path",
    "train.steps",
    "train.warmup_steps",
    "train.patience",
    "train.on_divergence",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.log_every",
    "train.log_to",
    "train.device",
    "train.deterministic",
    "train.compile",
    "train.micro_batch_size",
    "train.gradient_checkpointing",
    "train.shard",
}


def create_or_resume(training: Training) -> None:
    """Make the run directory, or resume the same run from its newest checkpoint."""
    run_exists = training.group.on_rank_zero(lambda: training.run.exists)
    if run_exists:
        _resume(training)
    elif training.config.base.run is not None:
        _load_base_weights(training, RunDirectory(Path(training.config.base.run)))
        create_run_with_weights(training)
    else:
        create_run(training)


def _resume(training: Training) -> None:
    """Restore the newest checkpoint of a run that is there, if it has any."""
    config = training.config
    run = training.run
    group = training.group
    group.on_rank_zero(lambda: run.checkpoints.mkdir(exist_ok=True))
    existing = group.on_all_ranks(lambda: _check_same_run(training))
    with show_elapsed("loading the newest checkpoint"):
        checkpoint = training.checkpoints.load_newest()
    if checkpoint is not None:
        restore_checkpoint(training, checkpoint)
        warn_of_other_bits(existing, config, run)
        say_if_rate_rises(existing, config, training.step)
        # A kill may have come between writing a checkpoint and deleting the old ones.
        group.on_rank_zero(lambda: run.prune(training.progress.best, config.train.keep))
        training.started -= training.progress.elapsed
    elif config.base.run is not None:
        # Beginning again would train from random weights what was to begin from the base.
        raise CheckpointError(
            f"{run.checkpoints}: no checkpoint to resume from; delete {run.path} to begin again "
            f"from {config.base.run}"
        )
    if training.step < config.train.steps:
        group.on_rank_zero(lambda: run.write_config(config))


def _check_same_run(training: Training) -> Config:
    """Return the configuration of the run on the disk, which must be that of this training."""
    config = training.config
    run = training.run
    existing = run.load_config()
    check_same_settings(config, existing, run)
    if run.load_tokenizer().fingerprint != training.corpus.tokenizer.fingerprint:
        raise DataError(describe_changed_text(config, run))
    return existing


def _load_base_weights(training: Training, base: RunDirectory) -> None:
    """Load the weights that the configuration names; CheckpointError if they are gone."""
    with show_elapsed("loading the base"):
        checkpoint = training.checkpoints.load_best_of(base)
    if checkpoint.sha256 != training.config.base.sha256:
        raise CheckpointError(
            f"{base.path}: changed while this run was prepared; run the same command again"
        )
    model = training.model
    model.load_state_dict(check_shapes(checkpoint.model, model.state_dict(), base.checkpoints))
    training.progress.source = checkpoint.state.get("source", "")


def check_same_settings(
    requested: Config, existing: Config, run: RunDirectory, undecided: tuple[Any, ...] = ()
) -> None:
    """Raise ConfigError listing the settings in which a run differs from the one requested.

    Settings that still have one of the values `undecided` are not compared.
    """
    lines = []
    for key, now, before in iter_differences(requested, existing):
        if key in CHANGEABLE_SETTINGS or key.startswith("sample.") or now in undecided:
            continue
        if key == "train.reduce" and (requested.train.shard or existing.train.shard):
            continue  # shards are always fast; those of version 0.2 may have been exact
        if key == "train.minutes" and None not in (now, before):  # other minutes make it longer
            continue
        lines.append(describe_difference(key, before, now, run))
    if lines:
        raise ConfigError(
            *lines, f"{run.path}: holds a run with other settings; choose another --out"
        )
