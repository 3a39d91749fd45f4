"""Sort all suffixes of a text, so that whatever stands in it can be found by binary search.

Prefix doubling (Manber and Myers 1993): suffixes that are sorted by their first h bytes are sorted
by 2h with what is known of the suffixes that begin h bytes later. Only groups that are still equal
are sorted again (Larsson and Sadakane 1999), a block of them at a time, which a cache holds.
"""

import numpy as np

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Positions = np.ndarray[tuple[int], np.dtype[np.int32]]
BLOCK_SIZE = 1 << 18  # suffixes sorted together
FIRST_BYTES = 2  # of a suffix, by which they are sorted first
NEXT_BYTES = 4  # read from the text itself; from then on ranks are doubled


def sort_suffixes(text: Bytes) -> Positions:
    """Return where the suffixes of a text (N,) begin, in their order, (N,).

    Takes about 25 bytes of memory for each of the text. A repetition of length L takes log2(L)
    rounds. NUL bytes at the very end of a text are as good as its end.
    """
    n = len(text)
    assert n < 1 << 30
    padded = np.append(text, np.zeros(FIRST_BYTES + NEXT_BYTES, np.uint8))
    pairs = padded[:n].astype(np.uint16) << 8 | padded[1 : n + 1]
    order = np.argsort(pairs, kind="stable").astype(np.int32)  # (N,)
    begins = _mark_changes(pairs[order])
    del pairs
    # The rank of a suffix is the place of its group in `order`, from 1 on; 0 stands for the end.
    rank = np.zeros(n + 1, np.int32)
    rank[order] = np.maximum.accumulate(np.where(begins, np.arange(1, n + 1, dtype=np.int32), 0))
    words = np.ndarray(n + FIRST_BYTES, ">u4", padded, strides=(1,))  # of every position
    unsettled, begins = _drop_settled(np.arange(n, dtype=np.int32), begins)
    known = FIRST_BYTES
    while len(unsettled) and known < n:
        kept = []
        for block in _split_at_groups(begins):
            places = unsettled[block]
            positions = order[places]
            if known == FIRST_BYTES:
                later = words[positions + known]
            else:
                later = rank[np.minimum(positions + known, n)]
            keys = rank[positions].astype(np.uint64) << np.uint64(32) | later.astype(np.uint64)
            sorting = np.argsort(keys)
            positions = positions[sorting]
            order[places] = positions
            changes = _mark_changes(keys[sorting])
            rank[positions] = np.maximum.accumulate(np.where(changes, places + 1, 0))
            kept.append(_drop_settled(places, changes))
        unsettled = np.concatenate([places for places, _ in kept])
        begins = np.concatenate([changes for _, changes in kept])
        known = 2 * known if known > FIRST_BYTES else FIRST_BYTES + NEXT_BYTES
    return order


def _mark_changes(keys: np.ndarray) -> np.ndarray:
    """Mark the keys (N,) that differ from the one before, and the first."""
    changes = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=changes[1:])
    return changes


def _drop_settled(places: Positions, begins: np.ndarray) -> tuple[Positions, np.ndarray]:
    """Drop the groups of one suffix; `begins` marks the first place of each group."""
    unsettled = ~(begins & np.append(begins[1:], True))
    return places[unsettled], begins[unsettled]


def _split_at_groups(begins: np.ndarray) -> list[slice]:
    """Split places into blocks of whole groups."""
    (firsts,) = begins.nonzero()
    wanted = np.arange(BLOCK_SIZE, len(begins), BLOCK_SIZE)
    after = np.searchsorted(firsts, wanted)
    cuts = np.unique(firsts[after[after < len(firsts)]]).tolist()
    return [slice(*pair) for pair in zip([0, *cuts], [*cuts, len(begins)], strict=True)]
