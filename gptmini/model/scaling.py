"""Rotary frequencies for contexts longer than a model was first trained on."""

import torch
from torch import Tensor


def scaled(frequencies: Tensor, scaling: list[float] | None) -> Tensor:
    """Frequencies (K/2,) slowed down as in Llama 3.1, or as they are without `scaling`.

    `scaling` is (factor, low, high, context). What turns at most `low` times in the old context is
    divided by the factor, what turns at least `high` times stays, and between them it is mixed.
    """
    if scaling is None:
        return frequencies
    factor, low, high, context = scaling
    turns = context * frequencies / (2 * torch.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)
