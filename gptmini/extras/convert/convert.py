"""Converts a trained model to fewer key/value heads, as the start of a shorter training.

Each new head is the mean of the heads it replaces, the best of the initializations that Ainslie et
al. (2023) tried. Training for another twentieth to tenth of the steps recovers most of the loss.

Letters: G KV heads before, G' after, K head_dim, D d_model.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from gptmini.config.load import validate
from gptmini.config.settings import Config, ModelConfig
from gptmini.errors import ConfigError
from gptmini.files import atomic_output
from gptmini.generate.run import Run
from gptmini.runs.directory import RunDirectory
from gptmini.runs.write import write_run

STEPS_SHARE = 0.1  # of the original steps
# Of the original learning rates. Tried on one model of 3M parameters (600 steps, four KV heads to
# two and to one): a quarter is best for two heads and all of them for one; half is close to the
# best for both.
LR_SCALE = 0.5


def convert_run(run: Run, attention: dict[str, Any], steps: int | None, out: Path) -> Config:
    """Create a run at step 0 with the weights of another and different attention settings.

    It is configured to train at half the learning rates, by default for a tenth of the steps. An
    imported run keeps its rates: it is trained by `train --from`, which halves them.
    ConfigError if the heads do not pool that way or `out` is taken.
    """
    config = _build_uptraining_config(run, attention, steps, out)
    _check_heads(run, config)
    weights = pool_kv_heads(run.model.state_dict(), config.model)
    with atomic_output(out) as partial:
        write_run(
            RunDirectory(partial),
            config,
            weights.items(),
            run.tokenizer,
            run.state.get("source", ""),
            run.corpus,
            bool(run.state.get("saw_held_out")),
        )
    return config


def _check_heads(run: Run, config: Config) -> None:
    """Raise ConfigError unless the KV heads of a run pool into those of a configuration."""
    before = run.config.model.n_kv_head
    after = config.model.n_kv_head
    if before % after:
        divisors = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0)
        raise ConfigError(
            f"--attention: the {before} KV heads of {run.path} cannot be averaged into {after}; "
            f"choose one of {divisors}"
        )


def _build_uptraining_config(
    run: Run, attention: dict[str, Any], steps: int | None, out: Path
) -> Config:
    """Return the configuration of the shorter training that follows the pooling."""
    train = run.config.train
    lr_scale = LR_SCALE if run.corpus else 1.0
    steps = steps or max(1, round(STEPS_SHARE * train.steps))
    tree = run.config.model_dump()
    if tree.pop("base")["run"] is not None:  # its tokenizer cannot be learned from its text
        tree["tokenizer"] = {"kind": str(out / "tokenizer.json")}
    tree["model"]["attention"] |= attention
    tree["train"] |= {
        "lr": lr_scale * train.lr,
        "embed_lr": lr_scale * train.embed_lr if train.embed_lr else None,
        "muon_lr": lr_scale * train.muon_lr,
        "min_lr": lr_scale * train.min_lr,
        "minutes": None,
        "steps": steps,
        "warmup_steps": steps // 10,
        "eval_every": max(1, steps // 5),
        "save_every": max(1, steps // 5),
        "log_every": max(1, steps // 20),
    }
    return validate(tree, {("model", "attention"): "--attention", ("train", "steps"): "--steps"})


def pool_kv_heads(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Average KV heads down to those of a configuration: (G·K, D) -> (G'·K, D).

    Consecutive heads become one, since their query heads are consecutive too.
    """
    pooled = {}
    for name, tensor in weights.items():
        module_name = name.split(".")[-2]
        if module_name in ("k_proj", "v_proj"):  # weights (G·K, D), and biases (G·K,)
            rest = tensor.shape[1:]
            heads = tensor.view(config.n_kv_head, -1, config.head_dim, *rest)  # (G', G / G', K, D)
            mean = heads.mean(dim=1)  # (G', K, D)
            pooled[name] = mean.reshape(config.n_kv_head * config.head_dim, *rest)  # (G'·K, D)
        else:
            pooled[name] = tensor
    return pooled
