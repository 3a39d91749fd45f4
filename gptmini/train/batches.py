"""Which windows of the corpus are read at which step: a pure function of (seed, step).

The training tokens are cut into windows of seq_len without overlap. Each epoch visits every window
once, in an order and from a first position drawn from (seed, epoch). The order is a Feistel network
over the window numbers: a permutation that needs no memory, so nothing about it is ever saved, and
any number of processes can compute it. Weighted texts have their own epochs and take turns in a
fixed pattern.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gptmini.text.tokens import CYCLE, TokenFile, shares, windows

ROUNDS = 4  # of the Feistel network
IGNORE_INDEX = -100  # a target that does not count, as in torch


def draw(*words: int) -> int:
    """A number in [0, 2⁶³) that depends on the words alone: the source of all randomness here."""
    text = ",".join(map(str, words)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class Batches:
    """The training windows of one or more texts, the latter in proportion to their weights."""

    def __init__(
        self,
        texts: list[TokenFile],
        weights: list[float] | None,
        seq_len: int,
        batch_size: int,
        seed: int,
        rows: Sequence[int] = (),
    ) -> None:
        self.rows = rows or range(batch_size)  # of the batch, that this process reads
        self.texts, self.seq_len = texts, seq_len
        self.batch_size, self.seed = batch_size, seed
        self.windows = [windows(text, seq_len) for text in texts]
        self.shares = shares(weights or [1.0], CYCLE)  # places of each text in a cycle
        # Which text owns each place of a cycle, and how many places it owns before that one.
        key = draw(seed)
        order = sorted(range(CYCLE), key=lambda place: permute(place, CYCLE, key))
        owners = np.repeat(np.arange(len(self.shares)), self.shares)[order]
        self.owners = owners.tolist()
        self.before = [int((owners[:place] == owner).sum()) for place, owner in enumerate(owners)]

    def starts(self, step: int) -> list[tuple[int, int]]:
        """The text, and the position in it, of each of the batch_size windows of a step."""
        first = step * self.batch_size
        return [self._start(place) for place in range(first, first + self.batch_size)]

    def _start(self, place: int) -> tuple[int, int]:
        cycle, place = divmod(place, CYCLE)
        which = self.owners[place]
        text, count = self.texts[which], self.windows[which]
        epoch, index = divmod(cycle * self.shares[which] + self.before[place], count)
        window = permute(index, count, draw(self.seed, which, epoch))
        # Each epoch begins the first window elsewhere, as far as the last one still fits.
        offsets = min(self.seq_len, len(text) - count * self.seq_len)
        offset = draw(self.seed, which, epoch, 1) % offsets
        return which, offset + window * self.seq_len

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens, and as targets the tokens one position later, both (B, T), of this process."""
        return stack(
            self.texts[which].read(start, self.seq_len + 1)
            for which, start in (self._start(step * self.batch_size + row) for row in self.rows)
        )


def validation_batches(
    texts: list[TokenFile],
    seq_len: int,
    batch_size: int,
    stride: int | None = None,
    limit: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets (B, T) in which each token of a text but its first is a target once.

    All other targets are IGNORE_INDEX. Windows of seq_len lie side by side or begin `stride` apart;
    with a stride, each token after the first window has more than seq_len - stride before it. The
    last window of a text may be shorter. With a `limit`, only about as many targets: of each text
    the same share of its windows, spread evenly and always the same.
    """
    total = sum(map(len, texts))
    for text in texts:
        rows: list[np.ndarray] = []
        counts: list[int] = []
        chosen = _overlapping(len(text), seq_len, stride or seq_len)
        if limit is not None and limit < total:
            count = -(-(len(text) - 1) // (stride or seq_len))
            chosen = _spread(chosen, count, limit / total)
        for start, end, count in chosen:
            row = text.read(start, end - start + 1)
            if rows and (len(rows) == batch_size or len(row) != len(rows[0])):
                yield _counted(rows, counts)
                rows, counts = [], []
            rows.append(row)
            counts.append(count)
        if rows:
            yield _counted(rows, counts)


def _overlapping(length: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """First and last position of each window, and how many targets at its end are new."""
    start = done = 0
    while done < length - 1:
        end = min(start + seq_len, length - 1)
        yield start, end, end - done
        start, done = start + stride, end


def _spread(
    windows: Iterator[tuple[int, int, int]], count: int, share: float
) -> Iterator[tuple[int, int, int]]:
    """A share of so many windows, at least one, at equal distances."""
    kept = max(1, round(count * share))
    return (window for place, window in enumerate(windows) if place * kept % count < kept)


def _counted(rows: list[np.ndarray], counts: list[int]) -> tuple[Tensor, Tensor]:
    inputs, targets = stack(rows)
    new = torch.arange(targets.shape[1]) >= targets.shape[1] - torch.tensor(counts)[:, None]
    return inputs, targets.where(new, IGNORE_INDEX)  # (B, T)


def stack(rows: Iterable[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Rows of T + 1 tokens as inputs (B, T) and targets (B, T)."""
    both = torch.from_numpy(np.stack(list(rows)).astype(np.int64))  # (B, T + 1)
    return both[:, :-1], both[:, 1:]


def permute(index: int, size: int, key: int) -> int:
    """The image of an index under a permutation of range(size) chosen by a key.

    A balanced Feistel network permutes all numbers of an even number of bits. Applying it until the
    number falls below `size` makes it a permutation of range(size) (Black and Rogaway 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(ROUNDS):
            left, right = right, left ^ (_mix(right, key + round_) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(number: int, key: int) -> int:
    """A hash of two numbers (the finalizer of SplitMix64, Steele et al. 2014)."""
    z = (number * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
