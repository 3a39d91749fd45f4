"""Start a run from a trained one, its base: what fine-tuning inherits and what it changes."""

from typing import Any

from gptmini.config.load import fill_open_settings, iter_settings, validate
from gptmini.config.settings import Config
from gptmini.console import say_header, warn
from gptmini.data.token_file import Corpus
from gptmini.errors import ConfigError
from gptmini.runs.directory import RunDirectory

# The full rates do harm to text that the base knows already (scripts/LOG.md, 2026-11-21).
LR_SHARE_OF_BASE = 0.5

# Settings of section train that are taken from the base as they are.
SETTINGS_FROM_BASE = ("optimizer", "betas", "weight_decay", "batch_size", "seq_len")
# Settings of section train that fine-tuning chooses.
FINETUNING_SETTINGS = (*SETTINGS_FROM_BASE, "lr", "embed_lr", "muon_lr")
# Settings of the model that change none of its weights.
FREE_MODEL_SETTINGS = {"model.dropout", "model.attention.weight_dropout", "model.attention.backend"}
CONVERT_ADVICE = "gptmini convert makes a base that has it"
ADVICE = {
    "model.context_length": "set train.seq_len for shorter rows",
    "model.attention.variant": CONVERT_ADVICE,
    "model.attention.n_kv_head": CONVERT_ADVICE,
    "model.attention.window": CONVERT_ADVICE,
}
# What a tokenizer is judged by: places in each file of a text, and tokens at each place.
SAMPLES_PER_FILE = 10
TOKENS_PER_SAMPLE = 1000

# A base that has read little of the kind loses to a new model here (scripts/LOG.md, 2026-11-24).
MIN_TOKENS_OF_FOREIGN_CHARACTER = 0.4
MIN_CHARACTERS_FOR_NEW_MODEL = 2_000_000


def start_from_base(requested: Config, base: RunDirectory) -> Config:
    """Take the base's model, tokenizer and batch, and choose learning rates for fine-tuning.

    Raises ConfigError for stated settings that contradict the base.
    """
    trained = base.load_config()
    train = {key: getattr(trained.train, key) for key in SETTINGS_FROM_BASE}
    train["lr"] = LR_SHARE_OF_BASE * trained.train.lr
    train["muon_lr"] = LR_SHARE_OF_BASE * trained.train.muon_lr
    config = fill_open_settings(inherit_model(requested, trained), {"train": train})
    if trained.train.embed_lr is None:
        return config
    embed_lr = config.train.lr * trained.train.embed_lr / trained.train.lr
    return fill_open_settings(config, {"train": {"embed_lr": embed_lr}})


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
    model: dict[str, Any] = inherited["model"]
    model["dropout"] = stated_values.get("model.dropout")
    if model["dropout"] is None:
        del model["dropout"]  # left open, to be chosen by the epochs
    for name in ("weight_dropout", "backend"):
        key = f"model.attention.{name}"
        model["attention"][name] = stated_values.get(key, trained_values[key])
    return validate({**stated, **inherited}, {})


def _format_yaml(value: Any) -> str:
    """Format a value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def record_base(config: Config, base: RunDirectory) -> Config:
    """Record the step and the hash of the weights that a run begins from.

    Raises ConfigError if the configuration states others, CheckpointError for a damaged base.
    """
    checkpoint = base.load_best()
    base.load_tokenizer(checkpoint)
    recorded = {"step": checkpoint.step, "sha256": checkpoint.sha256}
    for key, value in recorded.items():
        stated = getattr(config.base, key)
        if stated not in (None, value):
            raise ConfigError(
                f"base.{key}: {stated}, but the best checkpoint of {base.path} has {value}; leave "
                f"base.step and base.sha256 out to begin from that one"
            )
    return config.model_copy(update={"base": config.base.model_copy(update=recorded)})


def say_base(config: Config, corpus: Corpus) -> None:
    """Show the base, and warn if a new model may learn more of the text.

    A vocabulary that was learned from other writing makes several tokens of a character, as GPT-2's
    does of Chinese. One of English makes more of German than of English, and of a long text in
    another language a new model learns more. Bytes are the same for every text.
    """
    base = config.base
    step = "" if base.step is None else f", step {base.step:,}"
    say_header(f"  base      {base.run}{step}: its weights and tokenizer")
    kind = corpus.tokenizer.kind
    if kind == "byte":
        return
    per_character = count_tokens_per_character(corpus)
    is_spelled_out = per_character > 1
    is_foreign = kind != "char" and per_character > MIN_TOKENS_OF_FOREIGN_CHARACTER
    is_long = sum(map(len, corpus.training)) > MIN_CHARACTERS_FOR_NEW_MODEL * per_character
    if is_spelled_out or (is_foreign and is_long):
        warn(
            f"{corpus.name}: the tokenizer of {base.run} does not suit it, with "
            f"{per_character:.2f} tokens per character; training without --from may do better"
        )


def count_tokens_per_character(corpus: Corpus) -> float:
    """Count the tokens that stand for a character of the training text, in samples of each file."""
    tokenizer = corpus.tokenizer
    tokens = 0
    characters = 0
    for file in corpus.training:
        count = min(TOKENS_PER_SAMPLE, len(file))
        for place in range(SAMPLES_PER_FILE):
            start = place * (len(file) - count) // SAMPLES_PER_FILE
            sample = file.read(start, count)
            sample = sample[sample != tokenizer.eos_token_id]
            tokens += len(sample)
            characters += len(tokenizer.decode(sample.tolist()))
    return tokens / max(1, characters)
