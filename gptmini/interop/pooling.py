"""Fewer key/value heads from a trained model: pooled, then trained a little further.

Each new head is the mean of those it stands for, the best of the starts that Ainslie et al. (2023)
tried; a twentieth to a tenth of the training, again, then heals most of what that lost.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from gptmini.config.load import validate
from gptmini.config.settings import Config, ModelConfig
from gptmini.errors import ConfigError, DataError
from gptmini.generate.run import Run
from gptmini.plan.decide import decide
from gptmini.runs.directory import RunDirectory
from gptmini.train.state import prepare, save

# Tried on one model of 3M (600 steps, four KV heads to two and to one): a quarter of the rates is
# best for two and all of them for one, half is near the best for both.
SHARE = 0.1  # of the steps
RATE = 0.5  # of the learning rates


def convert(
    run: Run, attention: dict[str, Any], steps: int | None, out: Path, cache: Path
) -> Config:
    """Make a run at step 0 whose weights are those of another, with other attention settings.

    It is to be trained as the other was, at half the rates, for a tenth of the steps by default.
    ConfigError if the heads cannot be pooled so or `out` is taken, DataError for another text.
    """
    directory = RunDirectory(out)
    if directory.exists:
        raise ConfigError(f"--out {out}: holds a run already; name another directory")
    config = _changed(run.config, attention, steps)
    ours, theirs = run.config.model.n_kv_head, config.model.n_kv_head
    if ours % theirs:
        legal = ", ".join(str(n) for n in range(1, ours + 1) if ours % n == 0)
        raise ConfigError(
            f"--attention: {ours} KV heads of {run.path} do not pool into {theirs}; take one of "
            f"{legal}"
        )
    training = prepare(decide(config, None, cache, here=False), directory)
    corpus = training.corpus
    same = corpus.tokenizer.fingerprint == run.tokenizer.fingerprint
    if corpus.content != run.corpus or not same:
        raise DataError(f"{corpus.name}: not the text and tokenizer of {run.path}; restore them")
    training.model.load_state_dict(pooled(run.model.state_dict(), config.model))
    with directory.lock():
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
        save(training)  # a run without a checkpoint would begin anew
        directory.create(training.config, corpus.tokenizer)
    return training.config


def _changed(config: Config, attention: dict[str, Any], steps: int | None) -> Config:
    """The configuration with other attention, and what a shorter training needs."""
    train = config.train
    steps = steps or max(1, round(SHARE * train.steps))
    tree = config.model_dump()
    tree["model"]["attention"] |= attention
    tree["train"] |= {
        **{"lr": RATE * train.lr, "muon_lr": RATE * train.muon_lr, "min_lr": RATE * train.min_lr},
        "minutes": None,
        "steps": steps,
        "warmup_steps": steps // 10,
        "eval_every": max(1, steps // 5),
        "save_every": max(1, steps // 5),
        "log_every": max(1, steps // 20),
    }
    return validate(tree, {("model", "attention"): "--attention", ("train", "steps"): "--steps"})


def pooled(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by name for a configuration with other KV heads: (G·K, D) -> (G'·K, D).

    Consecutive heads share a new one, as the query heads that read them do.
    """
    size = config.n_kv_head * config.head_dim
    return {
        name: tensor.view(config.n_kv_head, -1, config.head_dim, *tensor.shape[1:])
        .mean(dim=1)
        .reshape(size, *tensor.shape[1:])
        if name.split(".")[-2] in ("k_proj", "v_proj")
        else tensor
        for name, tensor in weights.items()
    }
