"""Who sees whom: every mask of the model is made here. True is visible.

Letters: B batch, T queries, S keys.
"""

import torch
from torch import Tensor

from gptmini.errors import ConfigError


def visible(
    queries: Tensor, keys: Tensor, window: int | None = None, padding: Tensor | None = None
) -> Tensor:
    """The mask of queries at positions (T,) on keys at positions (S,): (T, S), or (B, 1, T, S).

    Causal: a query sees keys at its own position and before; with a window of w, only the last w
    of those. `padding` (B,) counts the positions on the left that nobody sees; they see
    themselves, so that no row is empty and no softmax gives NaN.
    """
    distance = queries[:, None] - keys
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if padding is None:
        return mask
    real = keys >= padding[:, None]
    return (mask & real[:, None] | (distance == 0))[:, None]


def cross(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """(B, 1, T, S): T queries on another sequence whose rows have lengths (B,), padded right."""
    return (torch.arange(keys) < lengths[:, None])[:, None, None].expand(-1, 1, queries, -1)


def left_padding(lengths: list[int]) -> Tensor:
    """(B,): how far rows of these lengths move to end together; ConfigError for an empty row."""
    if min(lengths) < 1:
        row = lengths.index(min(lengths))
        raise ConfigError(f"padding: hides all of row {row}; give each row 1 token or more")
    return torch.tensor([max(lengths) - length for length in lengths])
