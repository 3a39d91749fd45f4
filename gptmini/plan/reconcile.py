"""Reconcile what is requested with the run that is resumed, or with the base of a new one.

Each is read here, once: its configuration, its tokenizer and, of a base, the digest of its weights.
Whatever contradicts it is refused here, before the text is read.
"""

from pathlib import Path
from typing import Any

from gptmini.config.load import iter_differences, iter_settings, revalidate
from gptmini.config.settings import Config
from gptmini.data import hub_dataset
from gptmini.errors import ConfigError
from gptmini.plan.plan import Requested
from gptmini.runs.directory import RunDirectory

# Settings that may change when a run is resumed; any other change would make it another run.
CHANGEABLE_SETTINGS = {
    "data.path",  # the content is compared instead
    "data.validation_path",
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
}

# The full rates do harm to text that the base knows already (scripts/LOG.md, 2026-11-21).
LR_SHARE_OF_BASE = 0.5

# Settings of section train that are taken from the base as they are.
SETTINGS_FROM_BASE = ("optimizer", "betas", "weight_decay", "batch_size", "seq_len")
# Settings of section train that fine-tuning chooses.
FINETUNING_SETTINGS = (*SETTINGS_FROM_BASE, "lr", "embed_lr", "muon_lr")
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


def reconcile(requested: Config, run: RunDirectory | None, *, dry_run: bool = False) -> Requested:
    """Fill in what an existing run chose, or what the base of a new one has.

    `run` is where it is to be trained. `dry_run`: leave the checkpoints of a base unread. Raises
    ConfigError for settings that contradict the run or the base, CheckpointError for a base that
    cannot be used, DataError for the tokenizer of another.
    """
    if run is not None and run.exists:
        return _resume(requested, run)
    if requested.base.run is not None:
        return _begin_from_base(requested, RunDirectory(Path(requested.base.run)), dry_run)
    return Requested(requested, pin_datasets(requested, None))


def _resume(requested: Config, run: RunDirectory) -> Requested:
    existing = run.load_config()
    check_base(requested, existing, run)
    config = reuse_choices(requested, existing)
    check_same_settings(config, existing, run)
    config = pin_datasets(revalidate(config), existing)
    return Requested(requested, config, run.path, existing, run.load_tokenizer())


def _begin_from_base(requested: Config, base: RunDirectory, dry_run: bool) -> Requested:
    config = start_from_base(requested, base.load_config())
    if dry_run:
        tokenizer = base.load_tokenizer()
    else:
        best = base.find_best()
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
    return Requested(requested, pin_datasets(config, None), tokenizer=tokenizer)


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


def check_base(requested: Config, existing: Config, run: RunDirectory) -> None:
    """Refuse to resume a run from another base than its own, or to write to the base itself.

    Raises ConfigError.
    """
    now = requested.base.run
    before = existing.base.run
    if now == before:
        return
    problem = f"base.run: {before or 'not set'} in {run.path}, now {now or 'not set'}"
    if now is not None and Path(now).resolve() == run.path.resolve():
        problem = f"{run.path}: is the base itself, which is never written to"
    raise ConfigError(f"{problem}; choose another --out")


def reuse_choices(requested: Config, earlier: Config, same_run: bool = True) -> Config:
    """Fill the settings that a configuration leaves open with what an earlier run chose.

    The same run, when it is resumed, keeps everything, except that other minutes change its steps.
    Other runs, to be compared with the first, share how it computes, its rates if they have its
    optimizer and, under `train.minutes`, its sizes.
    """
    is_finetuning = requested.base.run is not None
    by_minutes = requested.train.minutes is not None and earlier.train.minutes is not None
    if same_run and is_finetuning:
        requested = inherit_model(requested, earlier)

    model_keys = ["dropout"]
    train_keys = ["compile", "deterministic"]
    if requested.train.optimizer == earlier.train.optimizer:
        model_keys += ["tie_embeddings"]
        train_keys += ["lr", "embed_lr", "weight_decay"]
    if by_minutes:
        model_keys += ["n_layer", "d_model", "head_dim", "d_ff"]
        train_keys += ["batch_size", "eval_tokens"]
        if is_finetuning:
            train_keys += ["seq_len"]
    if same_run:
        train_keys += ["micro_batch_size"]
        if not (requested.train.shard or earlier.train.shard):
            train_keys += ["reduce"]
    if same_run and by_minutes:
        model_keys += ["n_head"]
        train_keys += ["steps", "warmup_steps", "eval_every", "save_every", "log_every"]
    if same_run and is_finetuning:
        train_keys += FINETUNING_SETTINGS

    is_kind_open = requested.tokenizer.kind in ("auto", earlier.tokenizer.kind)
    if (same_run or by_minutes) and is_kind_open and requested.tokenizer.vocab_size is None:
        requested = requested.model_copy(update={"tokenizer": earlier.tokenizer})

    chosen = earlier.model_dump()
    if requested.train.minutes is not None and earlier.train.minutes is not None:
        steps = round(earlier.train.steps * requested.train.minutes / earlier.train.minutes)
        chosen["train"]["steps"] = max(1, earlier.train.warmup_steps, steps)
    defaults = {
        "model": _pick(chosen["model"], model_keys),
        "train": _pick(chosen["train"], train_keys),
    }
    if same_run and is_finetuning:
        defaults["base"] = _pick(chosen["base"], ["step", "sha256"])
    return requested.fill_open(defaults)


def _pick(section: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    return {key: section[key] for key in keys}


def check_same_settings(requested: Config, existing: Config, run: RunDirectory) -> None:
    """Raise ConfigError listing the settings in which a run differs from the one requested.

    `requested` has what the run chose already, so all that is left open is the size of the
    vocabulary, which the tokenizer has.
    """
    lines = []
    for key, now, before in iter_differences(requested, existing):
        if key in CHANGEABLE_SETTINGS or key.startswith("sample."):
            continue
        if key == "model.vocab_size" and now is None:
            continue
        if key == "train.reduce" and (requested.train.shard or existing.train.shard):
            continue  # shards are always fast; those of version 0.2 may have been exact
        if key == "train.minutes" and None not in (now, before):  # other minutes make it longer
            continue
        lines.append(f"{key}: {_say(before)} in {run.path}, now {_say(now)}")
    if lines:
        raise ConfigError(
            *lines, f"{run.path}: holds a run with other settings; choose another --out"
        )


def _say(value: object) -> str:
    return "not set" if value is None else str(value)


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
    return revalidate(config)


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
            f"{key}: {_format_yaml(value)}, but {requested.base.run} has "
            f"{_format_yaml(trained_values[key])}; {advice}"
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


def _format_yaml(value: Any) -> str:
    """Format a value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
