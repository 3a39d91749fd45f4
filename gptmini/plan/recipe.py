"""Choose learning rates, weight decay, dropout and tying, by the risk of overfitting."""

from typing import Any

from gptmini.config.load import fill_open_settings
from gptmini.config.settings import Config
from gptmini.plan.overfitting import TextSize, compute_overfitting_risk, count_epochs

Settings = dict[str, dict[str, Any]]

# Low: the head is untied, AdamW learns fast and embeddings four times faster yet. High: the head is
# tied, AdamW learns slowly, and weight decay is strong. Bits per byte of `data.test`, after 1 or
# 5 minutes on one core of an AMD EPYC with AVX512-BF16, without dropout, one run each:
#
#     layers x width, text               epochs   risk   low    high
#     2 x 128, Shakespeare                  6.5    3.0  2.095  2.033
#     2 x 128, German pages, 1 MB           6.7    3.1  2.060  2.068
#     2 x 128, standard library, 1 MB       7.3    3.4  1.701  1.657
#     2 x 256, German pages, 2.4 MB         6.3    4.7  1.348  1.293
#     2 x 256, standard library, 2.4 MB     6.4    4.9  1.277  1.171
#
# docs/experiments.md has more, a recipe between the two, and each part by itself.
LOW_RISK: Settings = {
    "model": {"tie_embeddings": False},
    "train": {"lr": 12e-3, "weight_decay": 0.1},
}
HIGH_RISK: Settings = {"train": {"weight_decay": 1.0}}  # tie_embeddings is true, lr 2e-3
MIN_HIGH_RISK = 3.0
# The learning rate of untied embeddings, as a multiple of train.lr.
EMBED_LR_SCALE = 4.0

# Bits per byte without dropout and with 0.1 (* 0.2), one run each:
#
#     risk                                          0    0.1
#      1.0  2 x 64, Shakespeare, 11.5 epochs    2.073  2.127*
#      3.5  2 x 128, Shakespeare, 6.1           2.024  2.048
#      8.1  2 x 128, Python's manual, 7         1.596  1.592
#      10   3 x 128, Python's manual, 4.9       1.700  1.755
#      14   3 x 128, Python's manual, 9.3       1.694  1.637
#
# With 0.1 and 0.2, mostly after 5 minutes, tied and without an induction head:
#
#     risk                                         0.1    0.2
#     13   4 x 192, Shakespeare and manual, 14   1.887  1.930
#     18   4 x 192, Shakespeare, 12              1.958  2.001
#     25   4 x 256, Shakespeare, 7.5             1.954  1.997
#     29   4 x 256, standard library, 1 MB, 8    1.493  1.578
#     46   4 x 192, German pages, 0.3 MB, 11     1.871  1.873
#     50   4 x 192, Python's manual, 24          1.610  1.561, 1.544 (another seed)
#     56   4 x 192, Shakespeare, 0.3 MB, 14      2.131  2.121
#     56   4 x 192, standard library, 0.3 MB, 13 2.697  2.737
#     70   4 x 256, Python's manual, 15          1.606  1.555
#
# A dropout of 0.3 ends at 1.565 and 1.573 on the manual. With an induction head, the library (0.3
# MB) has 2.332 with 0.1 and 2.219 with 0.2, but 1 MB of it (risk 13) 1.545 and 1.626, and the
# manual (31) 1.521 and 1.525.
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
