"""The loss on held-out text, without randomness.

Letters: B batch, T positions, V vocabulary, N windows.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmini.errors import DataError
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.losses import compute_token_losses
from gptmini.train.batches import IGNORE_INDEX
from gptmini.train.group import SINGLE_PROCESS, Group

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]
# How many blocks of text are taken as independent, and what Student's |t| of their mean exceeds in
# 5 % of cases. Losses of neighboring windows correlate, so a block has five at least
# (scripts/LOG.md: How many blocks does the ± of an evaluation need?).
BLOCKS = ((16, 2.131), (8, 2.365), (4, 3.182))
WINDOWS_PER_BLOCK = 5


@dataclass(frozen=True)
class LearntRule:
    """How many places of a rule are right: a share, ± `half_width` (95 %), of `places`.

    `chance` is the share for a guess among the words that could stand there.
    """

    rule: str
    right: float
    half_width: float
    places: int
    chance: float


@dataclass(frozen=True)
class Evaluation:
    """The sums over each of N windows, and the figures that follow from them.

    `nats`, `tokens` and `bytes` of text are (N,). `correct` counts the tokens of all windows that
    the model found the most likely. `rules` are there for a run that was trained on the built-in
    stories.
    """

    nats: FloatArray
    tokens: FloatArray
    bytes: FloatArray
    correct: int
    rules: tuple[LearntRule, ...] = ()

    def __str__(self) -> str:
        """Say what most people ask for; the arrays are there for the rest."""
        return f"loss {self.loss:.4f}, {self.bits_per_byte:.4f} bits per byte"

    @property
    def loss(self) -> float:
        """Cross-entropy in nats per token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that would be as hard to guess: exp(loss)."""
        return math.exp(min(self.loss, 700))  # exp(710) overflows

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the original text: comparable across tokenizers."""
        return float(self.nats.sum() / math.log(2) / max(1, self.bytes.sum()))

    @property
    def accuracy(self) -> float:
        """The share of tokens predicted correctly (top-1)."""
        return float(self.correct / self.tokens.sum())

    @property
    def windows(self) -> float:
        """The windows that the text fills, however they overlap."""
        return float(self.tokens.sum() / self.tokens.max())

    @property
    def loss_half_width(self) -> float | None:
        """Half of the 95 % interval of the loss over text of this kind; None for a short text."""
        return _compute_half_width(self.nats, self.tokens, self.windows)

    @property
    def bits_per_byte_half_width(self) -> float | None:
        """Half of the 95 % interval of the bits per byte."""
        return _compute_half_width(self.nats / math.log(2), self.bytes, self.windows)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON data."""
        return {
            "loss": self.loss,
            "loss_half_width": self.loss_half_width,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_half_width": self.bits_per_byte_half_width,
            "accuracy": self.accuracy,
            "windows": self.windows,
            "tokens": int(self.tokens.sum()),
            "bytes": int(self.bytes.sum()),
            "rules": [asdict(rule) for rule in self.rules],
        }


def _compute_half_width(sums: FloatArray, sizes: FloatArray, windows: float) -> float | None:
    """Compute half of the 95 % interval of Σ sums / Σ sizes; None below 20 windows.

    The spread of the means of a few large blocks says how far off the total may be.
    """
    for count, t in BLOCKS:
        if windows >= WINDOWS_PER_BLOCK * count and sizes.any():
            total = _sum_blocks(sums, count)
            size = _sum_blocks(sizes, count)
            residuals = total - sums.sum() / sizes.sum() * size  # of each block
            error = np.sqrt(count / (count - 1) * (residuals @ residuals)) / sizes.sum()
            return float(t * error)
    return None


def _sum_blocks(values: FloatArray, count: int) -> FloatArray:
    """Sum each of `count` blocks of values (N,): -> (count,)."""
    return np.array([block.sum() for block in np.array_split(values, count)])


@torch.no_grad()
def evaluate(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    byte_lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    compute: Compute,
    group: Group = SINGLE_PROCESS,
) -> Evaluation:
    """Evaluate a model on batches of tokens and targets (B, T), without dropout.

    Targets that are IGNORE_INDEX do not count. `byte_lengths` (V,) says how many bytes of text each
    token stands for. Several processes take turns with the batches; the result is that of one, to
    the bit.
    """
    was_training = model.training
    model.eval()
    parts = []
    for number, (inputs, targets) in enumerate(batches):
        if number % group.world_size == group.rank:
            parts.append(_sum_over_windows(model, inputs, targets, byte_lengths, compute))  # (4, B)
        else:  # another rank's batch: its sums are added to zeros
            parts.append(torch.zeros(4, len(targets), dtype=torch.float64))
    if number % group.world_size < group.rank:
        # With sharded weights, every rank must make equally many passes, or all-gathers hang.
        compute_token_losses(model, inputs, inputs)
    model.train(was_training)
    sums = group.all_reduce(torch.cat(parts, 1))  # (4, N)
    nats, tokens, text_bytes, correct = sums.numpy()
    if not tokens.any():
        raise DataError("validation: no tokens of an answer to evaluate; hold out more of the text")
    return Evaluation(nats, tokens, text_bytes, int(correct.sum()))


def _sum_over_windows(
    model: GPT,
    inputs: Tensor,
    targets: Tensor,
    byte_lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    compute: Compute,
) -> Tensor:
    """Sum the nats, tokens, bytes and correct predictions of each row of targets (B, T): (4, B)."""
    is_target = targets != IGNORE_INDEX  # (B, T)
    safe_targets = targets.where(is_target, 0)  # (B, T)
    with compute.autocast():
        losses, target_ranks = compute_token_losses(model, inputs, safe_targets)  # (B, T) each
    n_bytes = torch.from_numpy(byte_lengths[safe_targets.numpy()])  # (B, T)
    columns = [losses, torch.ones_like(losses), n_bytes, target_ranks == 1]
    sums = [(values * is_target).double().sum(1) for values in columns]  # (B,) each
    return torch.stack(sums)
