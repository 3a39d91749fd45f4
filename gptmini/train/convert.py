"""Converts a trained model to fewer key/value heads, as the start of a shorter training.

Each new head is the mean of the heads it replaces, the best of the initializations that Ainslie et
al. (2023) tried. Training for another twentieth to tenth of the steps recovers most of the loss.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from gptmini.config.load import validate
from gptmini.config.settings import Config, ModelConfig
from gptmini.errors import ConfigError, DataError
from gptmini.files import atomic_output
from gptmini.generate.run import Run
from gptmini.plan.decide import decide
from gptmini.runs.directory import RunDirectory
from gptmini.train.state import build_training, save_checkpoint, write_run

STEPS_SHARE = 0.1  # of the original steps
# Tried on one model of 3M parameters (600 steps, four KV heads to two and to one): a quarter of the
# learning rates is best for two heads and all of them for one; half is close to the best for both.
LR_SCALE = 0.5


def convert_run(
    run: Run, attention: dict[str, Any], steps: int | None, out: Path, cache: Path
) -> Config:
    """Create a run at step 0 with the weights of another and different attention settings.

    It is configured to train at half the learning rates, by default for a tenth of the steps.
    ConfigError if the heads do not pool that way or `out` is taken, DataError if the text changed.
    """
    directory = RunDirectory(out)
    if directory.exists:
        raise ConfigError(f"--out {out}: already holds a run; choose another directory")
    config = _build_uptraining_config(run, attention, steps)
    old, new = run.config.model.n_kv_head, config.model.n_kv_head
    if old % new:
        divisors = ", ".join(str(n) for n in range(1, old + 1) if old % n == 0)
        raise ConfigError(
            f"--attention: {run.path} has {old} KV heads, which do not pool into {new}; choose one "
            f"of {divisors}"
        )
    if config.model == run.config.model:
        raise ConfigError(
            f"--attention: {run.path} has this attention already; choose fewer KV heads or a window"
        )
    if not run.corpus:  # imported, so it has no text to train on
        weights = pool_kv_heads(run.model.state_dict(), config.model)
        with atomic_output(out) as partial:
            write_run(RunDirectory(partial), config, weights, run.tokenizer)
        return config
    training = build_training(decide(config, None, cache, dry_run=True), directory)
    corpus = training.corpus
    same_tokenizer = corpus.tokenizer.fingerprint == run.tokenizer.fingerprint
    if corpus.content != run.corpus or not same_tokenizer:
        raise DataError(
            f"{corpus.name}: not the text and tokenizer that {run.path} was trained with; restore "
            f"them"
        )
    training.model.load_state_dict(pool_kv_heads(run.model.state_dict(), config.model))
    with directory.lock():
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
        save_checkpoint(
            training
        )  # before `create`: a run without a checkpoint would start from scratch
        directory.create(training.config, corpus.tokenizer)
    return training.config


def _build_uptraining_config(run: Run, attention: dict[str, Any], steps: int | None) -> Config:
    train = run.config.train
    steps = steps or max(1, round(STEPS_SHARE * train.steps))
    tree = run.config.model_dump()
    if tree.pop("base")["run"] is not None:  # its tokenizer cannot be learned from its text
        tree["tokenizer"] = {"kind": str(run.path / "tokenizer.json")}
    tree["model"]["attention"] |= attention
    tree["train"] |= {
        "lr": LR_SCALE * train.lr,
        "muon_lr": LR_SCALE * train.muon_lr,
        "min_lr": LR_SCALE * train.min_lr,
        "minutes": None,
        "steps": steps,
        "warmup_steps": steps // 10,
        "eval_every": max(1, steps // 5),
        "save_every": max(1, steps // 5),
        "log_every": max(1, steps // 20),
    }
    return validate(tree, {("model", "attention"): "--attention", ("train", "steps"): "--steps"})


def pool_kv_heads(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by name for a configuration with fewer KV heads: (G·K, D) -> (G'·K, D).

    Consecutive heads become one, since their query heads are consecutive too.
    """
    groups, head_dim = config.n_kv_head, config.head_dim
    return {
        name: tensor.view(groups, -1, head_dim, *tensor.shape[1:])
        .mean(dim=1)
        .reshape(groups * head_dim, *tensor.shape[1:])
        if name.split(".")[-2] in ("k_proj", "v_proj")
        else tensor
        for name, tensor in weights.items()
    }
