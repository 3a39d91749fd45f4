"""Find the most likely tokens of a large vocabulary, and draw one, without sorting all of it.

Sorting takes far longer than finding the 50 largest (scripts/LOG.md: Which instructions carry the
compiled engine?). Of equal values, the first comes first.

Letters: V vocabulary, N weights.
"""

import numpy as np

TokenIds = np.ndarray[tuple[int], np.dtype[np.intp]]
Logits = np.ndarray[tuple[int], np.dtype[np.float32]]
TokenWeights = np.ndarray[tuple[int], np.dtype[np.float64]]


def find_top_k(values: Logits, k: int) -> TokenIds:
    """Find the indices of the k largest of values (V,), largest first."""
    # Lay the values out in 16 k columns. The k largest are rarely in the same column, so the maxima
    # of the columns hold most of them: at least k values reach the k-th largest maximum, and hardly
    # more.
    columns = 16 * k
    rows = len(values) // columns
    maxima = values
    if rows > 1:
        maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)  # (columns,)
    reaches = values >= np.partition(maxima, -k)[-k]  # (V,)
    return _sort_indices(values, reaches)[:k]


def find_heaviest(values: Logits, weights: TokenWeights, min_weight: float) -> TokenIds:
    """Find the indices of the largest of values (V,), largest first, as many as weigh `min_weight`.

    There may be more of them, never fewer. The largest weight is 1.
    """
    floor = 1.0
    while floor and (weights >= floor) @ weights < min_weight:
        floor /= 16
    return _sort_indices(values, weights >= floor)


def sample_index(weights: TokenWeights, random: float) -> int:
    """Draw an index in proportion to weights (N,), by a random number in [0, 1)."""
    sums = weights.cumsum()
    # Rounding must not lead past the last weight, which may be followed by zeros.
    target = min(random * sums[-1], np.nextafter(sums[-1], 0))
    return int(sums.searchsorted(target, side="right"))


def _sort_indices(values: Logits, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> TokenIds:
    """Return the indices where `mask` is true, from the largest value to the smallest."""
    indices = np.flatnonzero(mask)
    return indices[np.argsort(-values[indices], kind="stable")]
