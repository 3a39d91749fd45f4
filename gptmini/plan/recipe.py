"""Choose learning rates, weight decay, dropout and tying, by the risk of overfitting."""

from typing import Any

from gptmini.config.load import fill_open_settings
from gptmini.config.settings import Config
from gptmini.plan.overfitting import TextSize, compute_overfitting_risk, count_epochs

Settings = dict[str, dict[str, Any]]

# An untied head and fast rates learn most, but memorize first (scripts/LOG.md, 2026-11-25).
LOW_RISK: Settings = {
    "model": {"tie_embeddings": False},
    "train": {"lr": 12e-3, "weight_decay": 0.1},
}
HIGH_RISK: Settings = {"train": {"weight_decay": 1.0}}  # tie_embeddings is true, lr 2e-3
MIN_HIGH_RISK = 3.0
# The learning rate of untied embeddings, as a multiple of train.lr.
EMBED_LR_SCALE = 4.0

# Dropout helps where a model memorizes, and does harm elsewhere (scripts/LOG.md, 2026-11-25).
DROPOUT = 0.1
MIN_RISK_TO_DROP = 10.0
MIN_EPOCHS_TO_DROP = 6.0
STRONG_DROPOUT = 0.2
MIN_RISK_TO_DROP_MORE = 40.0


def choose_recipe(config: Config, text: TextSize) -> Config:
    """Choose learning rates, weight decay and whether the head is tied by the risk of overfitting.

    The figures are Muon's; fine-tuning has its recipe from the base.
    """
    if config.train.optimizer != "muon" or config.base.run is not None:
        return config
    risk = compute_overfitting_risk(config, text)
    if risk >= MIN_HIGH_RISK:
        return fill_open_settings(config, HIGH_RISK)
    config = fill_open_settings(config, LOW_RISK)
    if config.model.tie_embeddings:
        return config
    embed_lr = EMBED_LR_SCALE * config.train.lr
    return fill_open_settings(config, {"train": {"embed_lr": embed_lr}})


def choose_dropout(config: Config, text: TextSize) -> Config:
    """Choose dropout by the risk of overfitting, and by how often training reads the text."""
    if config.model.dropout is not None:
        return config
    risk = compute_overfitting_risk(config, text)
    dropout = 0.0
    if risk >= MIN_RISK_TO_DROP and count_epochs(config, text) >= MIN_EPOCHS_TO_DROP:
        dropout = STRONG_DROPOUT if risk >= MIN_RISK_TO_DROP_MORE else DROPOUT
    return fill_open_settings(config, {"model": {"dropout": dropout}})


def get_risk_level(risk: float) -> str:
    return "high" if risk >= MIN_HIGH_RISK else "low"
