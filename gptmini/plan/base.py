"""Fine-tuning: what a run takes from the trained run that it begins from, its base."""

from typing import Any

from gptmini.config.load import completed, leaves, validate
from gptmini.config.settings import Config
from gptmini.console import say_fact, warn
from gptmini.errors import ConfigError
from gptmini.runs.directory import RunDirectory
from gptmini.text.tokens import Corpus

# The rates of fine-tuning, as a share of the base's: bits per byte after 60 steps of 8 x 128
# tokens. The bases have 1.0 M parameters and read 2.4 M tokens of builtin:python-code. The new
# texts are 343 kB of other Python (torch.distributions), at 2.2 and 2.5 before, and 100 kB of
# Shakespeare, at 3.8. Measured once, with torch 2.13 on two cores of an AMD EPYC, 21 November 2026.
#
#     share                     1    0.5    0.3    0.2    0.1
#     base by Muon, Python   1.524  1.486  1.504         1.687
#       Shakespeare          2.230  2.261  2.327         2.660
#     base by AdamW, Python  1.596  1.625         1.773
#       Shakespeare          2.297  2.366         2.532
#
# Text that is far from the base's gains most from all of the rate. On text that the base had read
# (builtin:python-docs, 1.635 before) all of it does harm: 1.653, where 0.3 and 0.1 reach 1.515.
#
# The other optimizer brings nothing: AdamW on the base by Muon 1.549 (share 0.3) and 2.257 (share
# 1), Muon on the base by AdamW 1.595 and 2.305 (share 0.5). So the base's own is kept.
#
# Freezing brings nothing either. Seconds of CPU per step, and bits per byte of Shakespeare: all
# weights 0.106, 2.261; without embeddings and two blocks of four 0.077, 2.525; three blocks 0.060,
# 2.676. LoRA saves at most 0.032 s of a step: that much without gradients of any matrix.
RATE = 0.5
# Taken as they are.
FROM_BASE = ("optimizer", "betas", "weight_decay", "batch_size", "seq_len")
# The settings of section train that fine-tuning chooses.
CHOSEN = (*FROM_BASE, "lr", "muon_lr")
# Settings of the model that change none of its weights.
FREE = {"model.dropout", "model.attention.weight_dropout", "model.attention.backend"}
ADVICE = {
    "model.context_length": "set train.seq_len for shorter rows",
    **dict.fromkeys(
        ("model.attention.variant", "model.attention.n_kv_head", "model.attention.window"),
        "gptmini convert makes a base that has it",
    ),
}
SAMPLES, SAMPLED = 10, 1000  # places of a text, and tokens at each, that its tokenizer is judged by


def begun_from(asked: Config, base: RunDirectory) -> Config:
    """The configuration with the base's model and tokenizer, and with rates for fine-tuning.

    ConfigError for stated settings that contradict the base.
    """
    trained = base.config()
    train = {key: getattr(trained.train, key) for key in FROM_BASE}
    train |= {"lr": RATE * trained.train.lr, "muon_lr": RATE * trained.train.muon_lr}
    return completed(shaped(asked, trained), {"train": train})


def shaped(asked: Config, trained: Config) -> Config:
    """The configuration with the model of a trained run, but for settings that are FREE."""
    stated = asked.model_dump(exclude_unset=True)
    theirs = trained.model_dump(include={"model", "tokenizer"})
    given = dict(leaves({name: stated.get(name, {}) for name in theirs}))
    has = dict(leaves(theirs))
    lines = []
    for key, value in given.items():
        is_open = (value is None and key.endswith("vocab_size")) or value == "auto"
        if key not in FREE and value != has[key] and not is_open:
            advice = ADVICE.get(key, "leave it out")
            lines.append(
                f"{key}: {_shown(value)}, but {asked.base.run} has {_shown(has[key])}; {advice}"
            )
    if lines:
        raise ConfigError(*lines)
    model: dict[str, Any] = theirs["model"]
    if (dropout := given.get("model.dropout")) is None:
        del model["dropout"]  # left open, to be chosen by the epochs
    else:
        model["dropout"] = dropout
    for name in ("weight_dropout", "backend"):
        key = f"model.attention.{name}"
        model["attention"][name] = given.get(key, has[key])
    return validate({**stated, **theirs}, {})


def _shown(value: Any) -> str:
    """A value as in YAML."""
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def identified(config: Config, base: RunDirectory) -> Config:
    """The configuration with the step and the hash of the weights it begins from.

    ConfigError if it states others, CheckpointError for a base that is damaged.
    """
    checkpoint = base.best()
    base.tokenizer(checkpoint)
    recorded = {"step": checkpoint.step, "sha256": checkpoint.sha256}
    for key, value in recorded.items():
        stated = getattr(config.base, key)
        if stated not in (None, value):
            raise ConfigError(
                f"base.{key}: {stated}, but the best checkpoint of {base.path} has {value}; leave "
                f"base.step and base.sha256 out to begin from that one"
            )
    return config.model_copy(update={"base": config.base.model_copy(update=recorded)})


def introduce(config: Config, corpus: Corpus) -> None:
    """Show the base, and warn if its tokenizer spells the text out.

    A vocabulary that was learned from other writing makes several tokens of a character, as GPT-2's
    does of Chinese. Bytes are the same for every text.
    """
    base = config.base
    step = "" if base.step is None else f", step {base.step:,}"
    say_fact(f"  base      {base.run}{step}: its weights and tokenizer")
    per_character = tokens_per_character(corpus)
    if per_character > 1 and corpus.tokenizer.kind != "byte":
        warn(
            f"{corpus.name}: the tokenizer of {base.run} does not suit it, with "
            f"{per_character:.2f} tokens per character; training without --from may do better"
        )


def tokens_per_character(corpus: Corpus) -> float:
    """How many tokens stand for a character of the training text, in samples of each file."""
    tokenizer, tokens, characters = corpus.tokenizer, 0, 0
    for file in corpus.training:
        count = min(SAMPLED, len(file))
        for place in range(SAMPLES):
            start = place * (len(file) - count) // SAMPLES
            sample = file.read(start, count)
            sample = sample[sample != tokenizer.document_token]
            tokens += len(sample)
            characters += len(tokenizer.decode(sample.tolist()))
    return tokens / max(1, characters)
