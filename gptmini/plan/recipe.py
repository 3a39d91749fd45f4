"""Choose rates, weight decay, dropout and whether the head is tied, by the risk of overfitting.

The risk is high where a model has many weights for each token of its text and reads it often, so
that it could memorize it.
"""

import math
from typing import Any

from gptmini.config.load import fill_open_settings
from gptmini.config.settings import Config, ModelConfig
from gptmini.data.token_file import Corpus
from gptmini.plan.cost import count_parameters_by_part

Settings = dict[str, dict[str, Any]]

# With a low risk, AdamW learns fast, embeddings four times faster yet, and the head has weights of
# its own. A high risk takes a tied head, slow rates and a strong decay; a medium one the decay,
# slower rates and the head of its own. Bits per byte of the text's end, after 0.5 to 2 minutes on
# one core of a Xeon with AMX, without dropout but for *, one run each:
#
#     layers x width, text             epochs   risk    low  medium  high
#     2 x 64, Shakespeare                10.6    0.9  2.127*         2.294*
#     2 x 128, Shakespeare                2.9    1.9  2.038  2.096   2.140
#     2 x 128, standard library, 1 MB     3.3    2.3  1.749          2.055
#     2 x 128, Shakespeare                6.1    3.4  2.071  2.024
#     2 x 128, German pages, 1 MB         5.9    3.5  1.993* 2.020*
#     2 x 128, standard library, 1 MB     6.3    3.8  1.868* 1.949*
#     2 x 128, Shakespeare               12.7    4.1  2.030* 2.081*
#     2 x 192, Shakespeare and manual     5.2    5.0  1.968  1.924   1.976
#     2 x 192, Shakespeare                4.5    6.6  2.065  2.001   2.025
#     2 x 192, German pages, 1 MB         4.7    7.0  2.004  1.924   2.000
#     2 x 192, standard library, 1 MB     4.9    7.5  1.887  1.822   1.907
#     2 x 128, Python's manual            7.0    8.1  1.665* 1.592*  1.664*
#     2 x 192, Python's manual            5.2   16.0  1.735  1.575   1.659
#     4 x 192, Shakespeare                6.9   16.4  2.109  2.004   1.946
#     2 x 192, Python's manual           11.5   29.3  1.771* 1.616*  1.595*
#
# The two runs at 16 were planned for 16.5 and 15. Differences below 0.02 mean little. In all of
# these, tied models were without an induction head. With it, on one core of an AMD EPYC with
# AVX512-BF16:
#
#     2 x 192, Shakespeare                4.0    5.2         2.020   2.006
#     2 x 192, German pages, 1 MB         4.2    5.5         1.966   2.011
#     2 x 192, standard library, 1 MB     4.5    6.0         1.556   1.532
#     4 x 192, Shakespeare and manual     6.4    8.9         1.902   1.900
#     4 x 192, Shakespeare                5.7   12.4         1.979   1.952
#     4 x 192, German pages, 1 MB         5.6   12.8         1.922   1.929
#     4 x 192, standard library, 1 MB     5.5   13.5         1.549   1.490
#     4 x 192, standard library, 0.3 MB  15.0   59.4         2.344*  2.332*
#
# docs/experiments.md has more, and each part by itself.
LOW_RISK: Settings = {
    "model": {"tie_embeddings": False},
    "train": {"lr": 12e-3, "weight_decay": 0.1},
}
MEDIUM_RISK: Settings = {
    "model": {"tie_embeddings": False},
    "train": {"lr": 4e-3, "weight_decay": 1.0},
}
HIGH_RISK: Settings = {"train": {"weight_decay": 1.0}}  # the head is tied, lr 2e-3
MIN_MEDIUM_RISK = 4.5
MIN_HIGH_RISK = 10.0
# Below these, the settings for a low risk were never clearly behind, at any size.
MIN_EPOCHS_TO_OVERFIT = 3.0
# How much faster embeddings learn that the head does not share.
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
# 0.3 has 1.565 and 1.573 on the manual. With an induction head, the library (0.3 MB) has 2.332 with
# 0.1 and 2.219 with 0.2.
DROPOUT = 0.1
MIN_EPOCHS_TO_DROP = 6.0
STRONG_DROPOUT = 0.2
MIN_RISK_TO_DROP_MORE = 40.0


def choose_recipe(config: Config, corpus: Corpus) -> Config:
    """Choose rates, decay and whether the head is tied by the risk of overfitting.

    The figures are Muon's; fine-tuning has its recipe from the base.
    """
    if config.train.optimizer != "muon" or config.base.run is not None:
        return config
    risk = compute_overfitting_risk(config, corpus)
    if risk >= MIN_HIGH_RISK:
        return fill_open_settings(config, HIGH_RISK)
    config = fill_open_settings(config, MEDIUM_RISK if risk >= MIN_MEDIUM_RISK else LOW_RISK)
    if config.model.tie_embeddings:
        return config
    embed_lr = EMBED_LR_SCALE * config.train.lr
    return fill_open_settings(config, {"train": {"embed_lr": embed_lr}})


def choose_dropout(config: Config, corpus: Corpus) -> Config:
    """Choose dropout by the risk of overfitting, and by how often training reads the text."""
    if config.model.dropout is not None:
        return config
    risk = compute_overfitting_risk(config, corpus)
    dropout = 0.0
    if risk >= MIN_HIGH_RISK and count_epochs(config, corpus) >= MIN_EPOCHS_TO_DROP:
        dropout = STRONG_DROPOUT if risk >= MIN_RISK_TO_DROP_MORE else DROPOUT
    return fill_open_settings(config, {"model": {"dropout": dropout}})


def compute_overfitting_risk(config: Config, corpus: Corpus) -> float:
    """Compute the risk that training as configured overfits its text."""
    n_tokens = sum(map(len, corpus.training))
    return estimate_overfitting_risk(config.model, n_tokens, count_epochs(config, corpus))


def estimate_overfitting_risk(model: ModelConfig, n_tokens: int, epochs: float) -> float:
    """Estimate the risk that a model overfits a text of `n_tokens` that it reads `epochs` times.

    It is the number of weights in blocks for each token, times the square root of the epochs, and 0
    below MIN_EPOCHS_TO_OVERFIT.
    """
    if epochs < MIN_EPOCHS_TO_OVERFIT:
        return 0.0
    parts = count_parameters_by_part(model)
    return (parts["attention"] + parts["mlp"]) / n_tokens * math.sqrt(epochs)


def count_epochs(config: Config, corpus: Corpus) -> float:
    """Count how often training reads its text."""
    train = config.train
    return corpus.count_epochs(config.seq_len, train.batch_size, train.steps, config.data.weights)
