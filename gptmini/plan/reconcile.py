"""Reconcile what is requested with the run that is resumed, or with the base of a new one.

Each is read here, once: its configuration, its tokenizer and, of a base, the digest of its weights.
Whatever contradicts it is refused here, before the text is read.
"""

from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

from gptmini.config.load import SET_BY_MINUTES, format_value, iter_settings
from gptmini.config.settings import Config
from gptmini.console import quote
from gptmini.data import hub_dataset
from gptmini.errors import ConfigError
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.tokenizers import Tokenizer

# Settings that may change when a run is resumed; any other change would make it another run.
CHANGEABLE_SETTINGS = {
    "data.path",  # the content is compared instead
    "data.validation_path",
    "train.minutes",  # but a run by steps stays one
    "train.steps",
    "train.warmup_steps",
    "train.patience",
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
    "train.reduce",
}

# The full rates do harm to text that the base knows already (scripts/LOG.md: Which rates for
# fine-tuning?).
LR_SHARE_OF_BASE = 0.5

# Settings of section train that are taken from the base as they are.
SETTINGS_FROM_BASE = ("optimizer", "betas", "weight_decay", "batch_size", "seq_len")
# Settings of the model that change none of its weights.
FREE_ATTENTION = {"weight_dropout", "backend"}
FREE_MODEL_SETTINGS = {"model.dropout", *(f"model.attention.{key}" for key in FREE_ATTENTION)}
CONVERT_ADVICE = "gptmini convert makes a base that has it"
ADVICE = {
    "model.context_length": "set train.seq_len for shorter rows",
    "model.attention.variant": CONVERT_ADVICE,
    "model.attention.n_kv_head": CONVERT_ADVICE,
    "model.attention.window": CONVERT_ADVICE,
}


@dataclass(frozen=True)
class Request:
    """The request, and what the resumed run or the base brings along.

    stated: the configuration as it was requested.
    config: the same with all that the run has chosen before, or that its base has.
    existing: the configuration of the run, if it is resumed; `run` is its directory.
    tokenizer: that of the run or of the base; None for a new run without a base.
    threads: those of the run, if it is resumed and has a checkpoint.
    """

    stated: Config
    config: Config
    run: Path | None = None
    existing: Config | None = None
    tokenizer: Tokenizer | None = None
    threads: int | None = None

    @property
    def steps_follow_minutes(self) -> bool:
        """Whether the number of steps follows `train.minutes`, since none was requested."""
        train = self.stated.train
        return train.minutes is not None and "steps" not in train.model_fields_set

    @property
    def minutes(self) -> float | None:
        """The minutes that choose sizes and steps: of a new run, as one that exists keeps its."""
        return None if self.existing is not None else self.config.train.minutes


def reconcile(requested: Config, run: RunDirectory | None, *, dry_run: bool = False) -> Request:
    """Fill in what an existing run chose, or what the base of a new one has.

    `run` is where it is to be trained. `dry_run`: leave the checkpoints of a base unread. Raises
    ConfigError for settings that contradict the run or the base, CheckpointError for a base that
    cannot be used, DataError for the tokenizer of another.
    """
    if run is not None and run.exists:
        return _resume(requested, run)
    if requested.base.run is not None:
        return _begin_from_base(requested, RunDirectory(Path(requested.base.run)), dry_run)
    return Request(requested, pin_datasets(requested, None))


def _begin_from_base(requested: Config, base: RunDirectory, dry_run: bool) -> Request:
    config = start_from_base(requested, base.load_config())
    if dry_run:
        tokenizer = base.load_tokenizer()
    else:
        best = base.load_best(with_model=False)
        tokenizer = base.load_tokenizer(best)
        recorded = {"step": best.step, "sha256": best.sha256}
        for key, value in recorded.items():
            stated = getattr(config.base, key)
            if stated not in (None, value):
                raise ConfigError(
                    f"base.{key}: {stated}, but the best checkpoint of {base.path} has {value}; "
                    f"leave base.step and base.sha256 out to begin from that one"
                )
        config = config.model_copy(update={"base": config.base.model_copy(update=recorded)})
    return Request(requested, pin_datasets(config, None), tokenizer=tokenizer)


def pin_datasets(config: Config, existing: Config | None) -> Config:
    """Name the commit of every dataset on the Hub, so that it stays the same text.

    A run that exists keeps its own. Raises DataError for a dataset that does not exist,
    MachineError for trouble with the network.
    """
    pinned: list[str] = []
    if existing is not None:
        pinned = [*existing.data.path, *(existing.data.validation_path or [])]
    changed = {}
    for key in ("path", "validation_path"):
        paths = getattr(config.data, key) or []
        with_commits = [hub_dataset.pin_revision(path, pinned) for path in paths]
        if with_commits != paths:
            changed[key] = with_commits
    if not changed:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update=changed)})


# -- a run that is resumed -------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """The settings of a run that is resumed.

    old and new: what was asked for when it began, and what is asked for now; resolved: all that it
    settled.
    """

    run: RunDirectory
    old: Config
    new: Config
    resolved: Config


def _resume(requested: Config, run: RunDirectory) -> Request:
    """Keep all that the run has settled, but for what may change and is requested otherwise."""
    resumed = Resumed(run, run.load_request(), requested, run.load_config())
    check_same_request(resumed)
    config = pin_datasets(_merge(resumed), resumed.resolved)
    return Request(
        requested,
        config,
        run.path,
        resumed.resolved,
        run.load_tokenizer(),
        threads=run.read_newest_state().get("threads"),
    )


def _merge(resumed: Resumed) -> Config:
    """Change what a run has settled where that may change and another value is asked for."""
    asked = resumed.new.train
    resolved = resumed.resolved
    by_minutes = set() if asked.minutes is None else SET_BY_MINUTES - asked.model_fields_set
    train: dict[str, Any] = {}
    for key in CHANGEABLE_SETTINGS:
        section, _, name = key.partition(".")
        if section == "train" and not (asked.leaves_open(name) or name in by_minutes):
            train[name] = getattr(asked, name)
    if asked.shard or resolved.train.shard:
        train["reduce"] = asked.reduce
    if asked.minutes is not None and "steps" not in asked.model_fields_set:
        assert resolved.train.minutes is not None
        steps = round(resolved.train.steps * asked.minutes / resolved.train.minutes)
        train["steps"] = max(1, resolved.train.warmup_steps, steps)
    paths = {key: getattr(resumed.new.data, key) for key in ("path", "validation_path")}
    data = resolved.data.model_copy(update=paths)
    return resolved.with_train(**train).model_copy(
        update={"data": data, "sample": resumed.new.sample}
    )


def check_same_request(resumed: Resumed) -> None:
    """Raise ConfigError unless the same is requested as when the run began, or what it settled."""
    path = resumed.run.path
    base = resumed.new.base.run
    if base is not None and Path(base).resolve() == path.resolve():
        raise ConfigError(f"{path}: is the base itself; choose another --out")
    old = _collect_stated(resumed.old)
    new = _collect_stated(resumed.new)
    resolved = dict(iter_settings(resumed.resolved.model_dump()))
    values = dict(iter_settings(resumed.new.model_dump()))  # with the defaults
    lines = []
    for key in sorted(new.keys() | old.keys()):
        may_change = key in CHANGEABLE_SETTINGS
        if key == "train.minutes":
            may_change = None not in (values[key], resolved[key])
        if may_change or new.get(key) == old.get(key) or values[key] == resolved[key]:
            continue
        was, is_now = (
            "not set" if value is None else format_value(value)
            for value in (old.get(key, resolved[key]), new.get(key))
        )
        lines.append(f"{key}: {was} in {path}, now {is_now}")
    if not lines:
        return
    names = (path.with_name(f"{path.name}-{n}") for n in count(2))
    free = next(name for name in names if not name.exists())
    remedy = f"gptmini train {quote(path)} resumes it, --out {quote(free)} begins another"
    if len(lines) == 1:
        raise ConfigError(f"{lines[0]}; {remedy}")
    raise ConfigError(*lines, f"{path}: holds a run with other settings; {remedy}")


def _collect_stated(config: Config) -> dict[str, Any]:
    """Collect the settings that a request states, by their keys, without those it leaves open."""
    stated = {}
    for key, value in iter_settings(config.model_dump(exclude_unset=True, exclude={"sample"})):
        section, _, name = key.rpartition(".")
        if not attrgetter(section)(config).leaves_open(name):
            stated[key] = value
    return stated


# -- a base ----------------------------------------------------------------------------------------


def start_from_base(requested: Config, trained: Config) -> Config:
    """Take the base's model, tokenizer and batch, and choose learning rates for fine-tuning.

    Raises ConfigError for stated settings that contradict the base.
    """
    train = {key: getattr(trained.train, key) for key in SETTINGS_FROM_BASE}
    train["lr"] = LR_SHARE_OF_BASE * trained.train.lr
    train["muon_lr"] = LR_SHARE_OF_BASE * trained.train.muon_lr
    config = inherit_model(requested, trained).fill_open({"train": train})
    if trained.train.embed_lr is not None:
        embed_lr = config.train.lr * trained.train.embed_lr / trained.train.lr
        config = config.fill_open({"train": {"embed_lr": embed_lr}})
    return config


def inherit_model(requested: Config, trained: Config) -> Config:
    """Take the model and tokenizer of a trained run, but for settings that change no weights.

    Raises ConfigError for stated settings that contradict it.
    """
    stated = requested.model_dump(exclude_unset=True)
    inherited = trained.model_dump(include={"model", "tokenizer"})
    stated_sections = {name: stated.get(name, {}) for name in inherited}
    stated_values = dict(iter_settings(stated_sections))
    trained_values = dict(iter_settings(inherited))
    lines = []
    for key, value in stated_values.items():
        is_open = value == "auto" or (value is None and key.endswith("vocab_size"))
        if key in FREE_MODEL_SETTINGS or is_open or value == trained_values[key]:
            continue
        advice = ADVICE.get(key, "leave it out")
        lines.append(
            f"{key}: {format_value(value)}, but {requested.base.run} has "
            f"{format_value(trained_values[key])}; {advice}"
        )
    if lines:
        raise ConfigError(*lines)
    asked = requested.model.attention
    free = {key: getattr(asked, key) for key in FREE_ATTENTION & asked.model_fields_set}
    attention = trained.model.attention.model_copy(update=free)
    # Dropout that is not stated is left open, to be chosen by the epochs.
    changed = {"attention": attention, "dropout": requested.model.dropout}
    model = trained.model.model_copy(update=changed)
    return requested.model_copy(update={"model": model, "tokenizer": trained.tokenizer})
