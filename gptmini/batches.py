"""Which windows of the corpus are seen at which step: a pure function of (seed, step).

The training tokens are cut into windows of seq_len, without overlap. Each epoch visits every window
once, in an order and from a first position drawn from (seed, epoch). The order is a Feistel network
over the window numbers: a permutation that needs no memory, so nothing about it is ever saved.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gptmini.errors import DataError
from gptmini.shards import Corpus, TokenFile

ROUNDS = 4


def draw(*words: int) -> int:
    """A number in [0, 2⁶³) that depends on the words alone: the source of all randomness here."""
    text = ",".join(map(str, words)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def split(corpus: Corpus, validation: float, seq_len: int) -> int:
    """The number of training tokens, the rest being held out; DataError if either is too short."""
    total = len(corpus.tokens)
    train = total - max(round(total * validation), 1)
    for name, have in (("training", train), ("validation", total - train)):
        if have < seq_len + 1:
            raise DataError(
                f"{corpus.source}: has {total} tokens, {have} of them for {name}, and one "
                f"window needs {seq_len + 1}; take more text, or lower "
                f"model.context_length or train.seq_len"
            )
    return train


class Batches:
    """The training windows of a token file."""

    def __init__(self, tokens: TokenFile, train: int, seq_len: int, batch_size: int, seed: int):
        """Draw from the first `train` tokens of the file."""
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.windows = max(1, (train - seq_len) // seq_len)
        # Where the first window may begin, so that the last one still fits.
        self.offsets = min(seq_len, train - self.windows * seq_len)

    def starts(self, step: int) -> list[int]:
        """The positions in the corpus at which the batch_size windows of a step begin."""
        first = step * self.batch_size
        return [self._start(place) for place in range(first, first + self.batch_size)]

    def _start(self, place: int) -> int:
        epoch, index = divmod(place, self.windows)
        window = permute(index, self.windows, draw(self.seed, epoch))
        return draw(self.seed, epoch, 1) % self.offsets + window * self.seq_len

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the targets one place further on, both (B, T)."""
        return stack(self.tokens.read(start, self.seq_len + 1) for start in self.starts(step))

    def epochs(self, steps: int) -> float:
        """How often that many steps visit the training text."""
        return steps * self.batch_size / self.windows


def validation_batches(
    tokens: TokenFile, first: int, seq_len: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every token after `first` as a target once, in windows side by side, the last shorter."""
    last = len(tokens) - 1  # the last position that has a target
    whole = (last - first) // seq_len
    for begin in range(0, whole, batch_size):
        rows = range(begin, min(begin + batch_size, whole))
        yield stack(tokens.read(first + row * seq_len, seq_len + 1) for row in rows)
    if rest := (last - first) % seq_len:
        yield stack([tokens.read(last - rest, rest + 1)])


def stack(rows: Iterator[np.ndarray] | list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Rows of T + 1 tokens as inputs (B, T) and targets (B, T)."""
    both = torch.from_numpy(np.stack(list(rows)).astype(np.int64))
    return both[:, :-1], both[:, 1:]


def permute(index: int, size: int, key: int) -> int:
    """The image of index under a permutation of range(size) chosen by key.

    A balanced Feistel network permutes the numbers of an even number of bits; walking along its
    cycle until it comes back below size (Black and Rogaway 2002) makes it one of range(size).
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
    """A well-stirred function of two numbers (the finalizer of SplitMix64, Steele et al. 2014)."""
    z = (number * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
