"""Find the most likely tokens of a large vocabulary, and draw one, without sorting all of it.

Sorting takes far longer than finding the 50 largest (scripts/LOG.md: Which instructions carry the
compiled engine?). Of equal values, the first comes first.

Letters: V vocabulary, N weights.
"""

import numpy as np

BLOCK_SIZE = 512  # weights that are summed together before one is drawn

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
    # A running sum of all weights is slow. So sum blocks first, then run through one.
    ends = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK_SIZE)).cumsum()
    target = random * ends[-1]
    block = int(ends.searchsorted(target, side="right"))
    sums = weights[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].cumsum()
    rest = target - (ends[block - 1] if block else 0)
    # Rounding must not lead past the last weight of the block, which may be followed by zeros.
    rest = min(rest, np.nextafter(sums[-1], 0))
    return block * BLOCK_SIZE + int(sums.searchsorted(rest, side="right"))


def _sort_indices(values: Logits, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> TokenIds:
    """Return the indices where `mask` is true, from the largest value to the smallest."""
    indices = np.flatnonzero(mask)
    # Integers of 64 bits, with the value in the upper half and the index in the lower, sort far
    # faster than indices do by value. The bits of a float32 are in the order of the values,
    # except that those of negative ones grow as they fall, so they are inverted. The index counts
    # down, because the sort is reversed and equal values keep their order.
    bits = values[indices].view(np.int32)
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = ordered.astype(np.int64) << 32 | 0xFFFFFFFF - indices
    return 0xFFFFFFFF - (np.sort(keys)[::-1] & 0xFFFFFFFF)
