"""The loss on held-out text: every token once, the same number every time."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gptmini.model import GPT, loss


@dataclass(frozen=True)
class Evaluation:
    """Sums over a split: nats of all tokens, and how many tokens and bytes of text they are."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the original text: comparable across tokenizers."""
        return self.nats / math.log(2) / max(1, self.bytes)


@torch.no_grad()
def evaluate(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    byte_lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    precision: Callable[[], AbstractContextManager[object]],
) -> Evaluation:
    """Run the model over batches of (B, T) tokens and targets; dropout is off meanwhile."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    nats, tokens, text = 0.0, 0, 0
    for inputs, targets in batches:
        with precision():
            nats += loss(model, inputs.to(device), targets.to(device), "sum").item()
        tokens += targets.numel()
        text += int(byte_lengths[targets.numpy()].sum())
    model.train(was_training)
    return Evaluation(nats, tokens, text)
