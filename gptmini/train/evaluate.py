"""The loss on held-out text: every token but the first is predicted once, without randomness.

Letters: B batch, T positions, V vocabulary, W windows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmini.distributed.group import SINGLE_PROCESS, Group
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.train.batches import IGNORE_INDEX

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]
LOGIT_ROWS_AT_ONCE = (
    1024  # rows of logits held at a time; all at once would be the largest tensors of a run
)
MAX_ERROR_BLOCKS = 100  # at most as many blocks of text, whose losses are treated as independent


@dataclass(frozen=True)
class Evaluation:
    """Sums over each of W windows, (W,): nats, tokens, bytes of text.

    `correct` counts the tokens that the model found the most likely.
    """

    nats: FloatArray
    tokens: FloatArray
    bytes: FloatArray
    correct: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp(loss): the number of equally likely tokens that would be as hard to guess."""
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
    def loss_error(self) -> float | None:
        """Standard error of the loss over text of this kind; None for a single window."""
        return _compute_standard_error(self.nats, self.tokens)

    @property
    def bits_per_byte_error(self) -> float | None:
        """Standard error of the bits per byte."""
        return _compute_standard_error(self.nats / math.log(2), self.bytes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON data."""
        return {
            "loss": self.loss,
            "loss_error": self.loss_error,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_error": self.bits_per_byte_error,
            "accuracy": self.accuracy,
            "tokens": int(self.tokens.sum()),
            "bytes": int(self.bytes.sum()),
        }


def _compute_standard_error(sums: FloatArray, sizes: FloatArray) -> float | None:
    """The standard error of Σ sums / Σ sizes, by batch means.

    Losses of neighboring tokens are correlated, those of large blocks hardly: the spread of the
    blocks' means says how far off the total may be.
    """
    count = min(len(sums), MAX_ERROR_BLOCKS)
    if count < 2 or not sizes.sum():
        return None
    blocks = [np.array_split(values, count) for values in (sums, sizes)]
    total, size = (np.array([block.sum() for block in values]) for values in blocks)
    rest = total - sums.sum() / sizes.sum() * size
    return float(np.sqrt(count / (count - 1) * (rest @ rest)) / sizes.sum())


@torch.no_grad()
def evaluate(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    byte_lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    compute: Compute,
    group: Group = SINGLE_PROCESS,
) -> Evaluation:
    """Evaluate a model on batches of tokens and targets (B, T), without dropout.

    Targets that are IGNORE_INDEX do not count. `byte_lengths` (V,) are the tokens' bytes of text.
    Ranks take turns, and add zeros to each other's sums: the result is that of one, to the bit.
    """
    was_training = model.training
    model.eval()
    parts = []
    for number, (inputs, targets) in enumerate(batches):
        sums = torch.zeros(4, len(targets), dtype=torch.float64)  # (4, B)
        if number % group.world_size == group.rank:
            counted = targets != IGNORE_INDEX
            known = targets.where(counted, 0)
            with compute.autocast():
                losses, places = compute_token_losses(model, inputs, known)
            sizes = torch.from_numpy(byte_lengths[known.numpy()])
            kinds = (losses, torch.ones_like(losses), sizes, places == 1)  # (B, T) each
            sums = torch.stack([(kind * counted).double().sum(1) for kind in kinds])  # (4, B)
        parts.append(sums)
    if (
        number % group.world_size < group.rank
    ):  # ranks that share the weights make equally many passes
        compute_token_losses(model, inputs, inputs)
    model.train(was_training)
    nats, tokens, text_bytes, correct = group.all_gather(torch.cat(parts, 1)).sum(0).numpy()  # (W,)
    return Evaluation(nats, tokens, text_bytes, int(correct.sum()))


def compute_token_losses(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses in nats (float64) and ranks (from 1) of targets (B, T) given tokens; on the CPU."""
    hidden = model.forward_hidden(tokens.to(model.device)).flatten(0, 1)  # (B·T, D)
    losses, target_ranks = [], []
    for rows, wanted in zip(
        hidden.split(LOGIT_ROWS_AT_ONCE), targets.flatten().split(LOGIT_ROWS_AT_ONCE), strict=True
    ):
        logits = model.compute_logits(rows).float()  # (ROWS, V)
        target_logits = logits.gather(1, wanted[:, None].to(model.device))  # (ROWS, 1)
        losses.append((logits.logsumexp(1) - target_logits[:, 0]).double().cpu())
        target_ranks.append((1 + (logits > target_logits).sum(1)).cpu())
    return torch.cat(losses).view_as(targets), torch.cat(target_ranks).view_as(targets)
