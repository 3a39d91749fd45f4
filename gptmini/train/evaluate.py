"""The loss on held-out text: every token once, the same number every time."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmini.model.gpt import GPT
from gptmini.train.batches import IGNORE_INDEX

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
ROWS = 1024  # of logits at a time
BLOCKS = 100  # of text, at most, whose losses are taken for independent of each other


@dataclass(frozen=True)
class Evaluation:
    """Sums over each of W windows, (W,): nats, tokens, bytes of text; and how many were correct.

    A token is correct if no other was likelier.
    """

    nats: Numbers
    tokens: Numbers
    bytes: Numbers
    correct: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many tokens the model is as unsure as it was."""
        return math.exp(min(self.loss, 700))  # or it would be no number of this machine

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the original text: comparable across tokenizers."""
        return float(self.nats.sum() / math.log(2) / max(1, self.bytes.sum()))

    @property
    def accuracy(self) -> float:
        """The share of tokens that were correct."""
        return float(self.correct / self.tokens.sum())

    @property
    def loss_error(self) -> float | None:
        """Standard error of the loss, as of a sample of such text; None for a single window."""
        return _standard_error(self.nats, self.tokens)

    @property
    def bits_per_byte_error(self) -> float | None:
        """The same of the bits per byte."""
        return _standard_error(self.nats / math.log(2), self.bytes)

    def facts(self) -> dict[str, Any]:
        """All of it as JSON data."""
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


def _standard_error(sums: Numbers, sizes: Numbers) -> float | None:
    """Of Σ sums / Σ sizes, by the method of batch means.

    Losses of neighbouring tokens go together, those of blocks of many windows hardly: the spread
    of the blocks' means says how far the whole one may be off.
    """
    count = min(len(sums), BLOCKS)
    if count < 2 or not sizes.sum():
        return None
    parts = [np.array_split(values, count) for values in (sums, sizes)]
    total, size = (np.array([part.sum() for part in values]) for values in parts)
    rest = total - sums.sum() / sizes.sum() * size
    return float(np.sqrt(count / (count - 1) * (rest @ rest)) / sizes.sum())


@torch.no_grad()
def evaluate(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    byte_lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    precision: Callable[[], AbstractContextManager[object]],
) -> Evaluation:
    """Run the model over batches of (B, T) tokens and targets; dropout is off meanwhile.

    Targets that are IGNORE_INDEX do not count.
    """
    was_training = model.training
    model.eval()
    nats: list[Tensor] = []
    tokens: list[Tensor] = []
    sizes: list[np.ndarray] = []
    correct = 0
    for inputs, targets in batches:
        counted = targets != IGNORE_INDEX
        goals = targets.where(counted, 0)
        with precision():
            costs, hits = _costs(model, inputs, goals)
        nats.append((costs * counted).sum(1))
        correct += int((hits & counted).sum())
        tokens.append(counted.sum(1))
        sizes.append((byte_lengths[goals.numpy()] * counted.numpy()).sum(1))
    model.train(was_training)
    return Evaluation(
        torch.cat(nats).numpy(),
        torch.cat(tokens).double().numpy(),
        np.concatenate(sizes).astype(np.float64),
        correct,
    )


def _costs(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of targets (B, T) in float64, and whether none was likelier, (B, T); on the CPU.

    Some rows of logits at a time: all of them would be the largest tensors of a run.
    """
    device = model.embed.weight.device
    hidden = model.hidden(tokens.to(device)).flatten(0, 1)
    costs, hits = [], []
    for rows, goals in zip(hidden.split(ROWS), targets.flatten().split(ROWS), strict=True):
        logits = model.logits(rows).float()
        own = logits.gather(1, goals[:, None].to(device))[:, 0]
        costs.append((logits.logsumexp(1) - own).double().cpu())
        hits.append((own >= logits.amax(1)).cpu())
    return torch.cat(costs).view_as(targets), torch.cat(hits).view_as(targets)
