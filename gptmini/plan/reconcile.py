"""Reconcile what is requested with the run that is resumed, or with the base of a new one.

Each is read here, once: its configuration, its tokenizer and, of a base, the digest of its weights.
Whatever contradicts it is refused here, before the text is read.
"""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from gptmini.config.load import SET_BY_MINUTES, format_value, iter_settings
from gptmini.config.settings import Config
from gptmini.data import hub_dataset
from gptmini.errors import ConfigError
from gptmini.plan.plan import Request
from gptmini.runs.directory import RunDirectory

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


def _resume(requested: Config, run: RunDirectory) -> Request:
    """Keep all that the run has settled, but for what may change and is requested otherwise."""
    settled = run.load_config()
    check_same_request(requested, run.load_request(), settled, run)
    asked = requested.train
    by_minutes = set() if asked.minutes is None else SET_BY_MINUTES - asked.model_fields_set
    train: dict[str, Any] = {}
    for key in CHANGEABLE_SETTINGS:
        section, _, name = key.partition(".")
        if section == "train" and not (asked.leaves_open(name) or name in by_minutes):
            train[name] = getattr(asked, name)
    if requested.train.shard or settled.train.shard:
        train["reduce"] = requested.train.reduce
    paths = {key: getattr(requested.data, key) for key in ("path", "validation_path")}
    config = settled.with_train(**train).model_copy(
        update={"data": settled.data.model_copy(update=paths), "sample": requested.sample}
    )
    resumed = Request(
        requested, pin_datasets(config, settled), run.path, settled, run.load_tokenizer()
    )
    if not resumed.steps_follow_minutes:
        return resumed
    assert requested.train.minutes is not None
    assert settled.train.minutes is not None
    steps = round(settled.train.steps * requested.train.minutes / settled.train.minutes)
    steps = max(1, settled.train.warmup_steps, steps)
    return replace(resumed, config=resumed.config.with_train(steps=steps))


def check_same_request(
    requested: Config, earlier: Config, settled: Config, run: RunDirectory
) -> None:
    """Raise ConfigError unless the same is requested as when the run began, or what it settled."""
    base = requested.base.run
    if base is not None and Path(base).resolve() == run.path.resolve():
        raise ConfigError(
            f"{run.path}: is the base itself, which is never written to; choose another --out"
        )
    asked_now = _collect_stated(requested)
    asked_before = _collect_stated(earlier)
    now = dict(iter_settings(requested.model_dump()))
    before = dict(iter_settings(settled.model_dump()))
    lines = []
    for key in sorted(asked_now.keys() | asked_before.keys()):
        may_change = key in CHANGEABLE_SETTINGS
        if key == "train.minutes":
            may_change = None not in (now[key], before[key])
        is_same = asked_now.get(key) == asked_before.get(key) or now[key] == before[key]
        if may_change or is_same:
            continue
        values = (asked_before.get(key, before[key]), asked_now.get(key))
        was, is_now = ("not set" if each is None else format_value(each) for each in values)
        lines.append(f"{key}: {was} in {run.path}, now {is_now}")
    if lines:
        raise ConfigError(
            *lines, f"{run.path}: holds a run with other settings; choose another --out"
        )


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
