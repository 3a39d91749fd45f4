"""Choose learning rates, weight decay, dropout, tying and how samples start, by the epochs.

The risk is that a model memorizes its text: high where it has many weights for each token of the
text and reads it often.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from gptmini.config.settings import Config
from gptmini.data.token_file import Corpus
from gptmini.plan.cost import count_parameters_by_part

Settings = dict[str, dict[str, Any]]

# An untied head and fast rates learn most, but memorize first (scripts/LOG.md: At which risk does
# the slow recipe win?, Which rates learn to copy without learning a text by heart?).
LOW_RISK: Settings = {
    "model": {"tie_embeddings": False},
    "train": {"lr": 12e-3, "weight_decay": 0.1},
}
HIGH_RISK: Settings = {"train": {"muon_lr": 0.01, "weight_decay": 1.0}}  # tied, lr 2e-3
MIN_HIGH_RISK = 3.0
EMBED_LR_SCALE = 6.0  # the learning rate of the embeddings, as a multiple of train.lr

# Dropout helps where a model memorizes, and does harm elsewhere (scripts/LOG.md: How much dropout,
# and from which risk on?).
DROPOUT = 0.1
MIN_RISK_TO_DROP = 10.0
MIN_EPOCHS_TO_DROP = 6.0
STRONG_DROPOUT = 0.2
MIN_RISK_TO_DROP_MORE = 40.0

# Below, settings for a low risk were never clearly behind (scripts/LOG.md: Should the risk or the
# epochs choose the recipe?).
MIN_EPOCHS_TO_OVERFIT = 3.0

# From here on, more training makes a model of a short text worse (scripts/LOG.md: When does more
# training make a model of a short text worse?).
MAX_USEFUL_RISK = 55.0
# Less is too few updates, whatever the risk; the best is kept (scripts/LOG.md: When does more
# training make a model of a short text worse?).
MIN_USEFUL_EPOCHS = 10.0
MIN_USEFUL_TOKENS = 1e6

# Document tokens read in training from which a model knows what follows them. Nats for the first 20
# bytes of a held-out paragraph (2 layers, width 64, 180 kB in 1 to 100 documents, 9 epochs):
# tokens read          0     9    18    36    82   264   901
# after that token  29.9  29.2  28.2  26.5  26.7  25.4  24.8
# after a newline   25.4  26.0  25.3  25.0  25.1  25.7  24.9
MIN_DOCUMENT_TOKENS_READ = 100


@dataclass(frozen=True)
class TextSize:
    """How long the text to train on is, in tokens; they may be guessed, or infinitely many.

    per_epoch: tokens that training reads for an epoch. Of weighted texts, the one that is visited
    most counts, so it may differ from `total`.
    shortest: those of its shortest file, training or held out; rows must be shorter.
    """

    total: float
    per_epoch: float
    shortest: float = math.inf


def measure_corpus(config: Config, corpus: Corpus) -> TextSize:
    """Measure the text to train on, in rows as long as this configuration has them."""
    epochs_of_row = corpus.count_epochs(config.seq_len, 1, 1, config.data.weights)
    return TextSize(
        total=sum(map(len, corpus.training)),
        per_epoch=config.seq_len / epochs_of_row,
        shortest=min(map(len, corpus.training + corpus.validation)),
    )


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


def is_text_small(config: Config, text: TextSize) -> bool:
    """Tell whether the model is so large for its text that the slow recipe serves it better."""
    return compute_overfitting_risk(config, text) >= MIN_HIGH_RISK


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


def choose_recipe(config: Config, text: TextSize) -> Config:
    """Choose learning rates, weight decay and whether the head is tied by the risk of overfitting.

    The figures are Muon's; fine-tuning has its recipe from the base.
    """
    if config.train.optimizer != "muon" or config.base.run is not None:
        return config
    config = config.fill_open(HIGH_RISK if is_text_small(config, text) else LOW_RISK)
    embed_lr = float(f"{EMBED_LR_SCALE * config.train.lr:g}")  # 0.072, not 0.07200000000000001
    return config.fill_open({"train": {"embed_lr": embed_lr}})


def choose_dropout(config: Config, text: TextSize) -> Config:
    """Choose dropout by the risk of overfitting, and by how often training reads the text."""
    if config.model.dropout is not None:
        return config
    risk = compute_overfitting_risk(config, text)
    dropout = 0.0
    if risk >= MIN_RISK_TO_DROP and count_epochs(config, text) >= MIN_EPOCHS_TO_DROP:
        dropout = STRONG_DROPOUT if risk >= MIN_RISK_TO_DROP_MORE else DROPOUT
    return config.fill_open({"model": {"dropout": dropout}})


def choose_sample_start(config: Config, corpus: Corpus, text: TextSize) -> Config:
    """Choose what stands before a text without a prompt: the end-of-text token, if it was learned.

    A model of a single document has hardly ever read that token, and continues it with garbage. It
    knows what begins after line breaks, as many as the text mostly has: where blank lines separate
    all paragraphs, the token of a single break is never trained. A text without those has a
    character that is common, and that the tokenizer does not drop.
    """
    if "start" in config.sample.model_fields_set:
        return config
    start = None  # the end-of-text token
    document_tokens_read = count_epochs(config, text) * corpus.inner_document_count
    if document_tokens_read < MIN_DOCUMENT_TOKENS_READ:
        excerpt = corpus.read_excerpt()
        breaks = re.findall(r"[\r\n]+", excerpt)
        common = [each for part in (breaks, excerpt) for each, _ in Counter(part).most_common()]
        start = next((each for each in common if len(corpus.tokenizer.encode(each))), None)
    return config.fill_open({"sample": {"start": start}})
