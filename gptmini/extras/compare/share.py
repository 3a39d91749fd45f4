"""What the first of several runs chose for itself, the others take, so that they compare."""

from typing import Any

from gptmini.config.load import SET_BY_MINUTES
from gptmini.config.settings import Config
from gptmini.runs.directory import RunDirectory

# What each run settles for itself: how long it trains and what fits, and what follows by default.
NOT_SHARED = {
    *SET_BY_MINUTES,
    "micro_batch_size",
    "reduce",
    "shard",
    "vocab_size",
    "head_dim",
    "d_ff",
} - {"eval_tokens"}
# Another optimizer needs other values.
SHARED_BY_OPTIMIZER = {"lr", "embed_lr", "muon_lr", "weight_decay", "tie_embeddings"}


def share_choices(requested: Config, first: RunDirectory) -> Config:
    """Fill in what a request leaves open with what the first of several runs chose for itself.

    Runs of another kind, by minutes or by steps, or from another base, share nothing.
    """
    asked = first.load_request()
    settled = first.load_config()
    by_minutes = requested.train.minutes is not None
    if by_minutes != (asked.train.minutes is not None) or requested.base.run != asked.base.run:
        return requested
    same_optimizer = requested.train.optimizer == settled.train.optimizer
    kept_apart = NOT_SHARED if same_optimizer else NOT_SHARED | SHARED_BY_OPTIMIZER
    shared: dict[str, dict[str, Any]] = {}
    for section in ("model", "train"):
        before = getattr(asked, section)
        now = getattr(settled, section)
        shared[section] = {
            key: value
            for key, value in now
            if key not in kept_apart
            and (key not in before.model_fields_set or before.leaves_open(key))
        }
    if by_minutes and _is_tokenizer_open(asked) and _is_tokenizer_open(requested):
        requested = requested.model_copy(update={"tokenizer": settled.tokenizer})
    return requested.fill_open(shared)


def _is_tokenizer_open(config: Config) -> bool:
    return config.tokenizer.kind in ("auto", "bpe") and config.tokenizer.vocab_size is None
