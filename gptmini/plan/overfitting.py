"""How often training reads its text, and how great the risk is that the model memorizes it.

The risk is high where a model has many weights for each token of its text and reads it often.
"""

import math
from dataclasses import dataclass

from gptmini.config.settings import Config
from gptmini.data.token_file import Corpus
from gptmini.plan.cost import count_parameters_by_part

# Below, settings for a low risk were never clearly behind (scripts/LOG.md, 2026-11-25).
MIN_EPOCHS_TO_OVERFIT = 3.0

# From here on, more training makes a model of a short text worse (scripts/LOG.md, 2026-11-25).
MAX_USEFUL_RISK = 55.0
# Less is too few updates, whatever the risk; the best is kept (scripts/LOG.md, 2026-11-25).
MIN_USEFUL_EPOCHS = 10.0
MIN_USEFUL_TOKENS = 1e6


@dataclass(frozen=True)
class TextSize:
    """How long the text to train on is, in tokens; they may be guessed, or infinitely many.

    per_epoch: tokens that training reads for an epoch. Of weighted texts, the one that is visited
    most counts, so it may differ from `total`.
    """

    total: float
    per_epoch: float


def measure_corpus(config: Config, corpus: Corpus) -> TextSize:
    """Measure the text to train on, in rows as long as this configuration has them."""
    epochs_of_row = corpus.count_epochs(config.seq_len, 1, 1, config.data.weights)
    return TextSize(sum(map(len, corpus.training)), config.seq_len / epochs_of_row)


def count_epochs(config: Config, text: TextSize) -> float:
    """Count how often training reads its text."""
    return config.train.steps * config.train.batch_size * config.seq_len / text.per_epoch


def reads_often(config: Config, text: TextSize) -> bool:
    """Return whether training reads its text so often that a model may memorize it."""
    return count_epochs(config, text) >= MIN_EPOCHS_TO_OVERFIT


def compute_overfitting_risk(config: Config, text: TextSize) -> float:
    """Compute the risk that training as configured overfits its text.

    It is the number of weights in blocks for each token, times the square root of the epochs, and 0
    below MIN_EPOCHS_TO_OVERFIT.
    """
    if not reads_often(config, text):
        return 0.0
    return _count_weights_in_blocks(config) / text.total * math.sqrt(count_epochs(config, text))


def compute_useful_steps(config: Config, text: TextSize) -> float:
    """Compute the number of steps at which the risk of overfitting becomes too high.

    More would make the model worse on text that it has not seen. Fine-tuning has no such limit, as
    its base has read other text.
    """
    if config.base.run is not None:
        return math.inf
    epochs = (MAX_USEFUL_RISK * text.total / _count_weights_in_blocks(config)) ** 2
    # A short text among longer ones may be read more often than they are.
    fewest = MIN_USEFUL_EPOCHS * max(text.total, text.per_epoch)
    tokens = max(MIN_USEFUL_TOKENS, fewest, epochs * text.per_epoch)
    return tokens / (config.train.batch_size * config.seq_len)


def _count_weights_in_blocks(config: Config) -> int:
    parts = count_parameters_by_part(config.model)
    return parts["attention"] + parts["mlp"]
