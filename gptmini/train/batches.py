"""Batches of windows of the corpus: which ones a step reads is a pure function of (seed, step).

The training tokens are cut into windows of seq_len tokens, side by side. Each epoch visits every
window once, in a shuffled order and from an offset, both functions of (seed, text, epoch). So
nothing about the order is ever saved, and any number of processes can compute it. Weighted texts
have epochs of their own and take turns in a fixed pattern, the mixture cycle.

Letters: B batch, T positions (seq_len: the context of the model, unless set).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from gptmini.data.chats import IGNORED
from gptmini.data.token_file import MIXTURE_CYCLE_WINDOWS, TokenFile, apportion, count_windows
from gptmini.errors import ConfigError
from gptmini.train.seeds import seed_from

IGNORE_INDEX = -100  # a target that does not count, as in torch


def shuffle(count: int, seed: int) -> Tensor:
    """Return the numbers below `count` in a random order that the seed decides."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


class Batches:
    """The training windows of a text, or of several texts in proportion to their weights.

    `rows` are the rows of each batch that this process reads; by default, all.
    """

    def __init__(
        self,
        texts: list[TokenFile],
        weights: list[float] | None,
        seq_len: int,
        batch_size: int,
        seed: int,
        rows: Sequence[int] = (),
    ) -> None:
        self.texts = texts
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.rows = rows or range(batch_size)
        self.window_counts = [count_windows(text, seq_len) for text in texts]
        # The mixture cycle: how many of its places each text has, and the text at each place.
        self.cycle_shares = apportion(weights or [1.0], MIXTURE_CYCLE_WINDOWS)
        self.turns = np.repeat(np.arange(len(self.cycle_shares)), self.cycle_shares)
        self.turns = self.turns[shuffle(MIXTURE_CYCLE_WINDOWS, seed_from(seed))]
        # Of each text the epoch that was read last, and the order of its windows.
        self._orders: dict[int, tuple[int, Tensor]] = {}
        self._ahead: dict[int, tuple[Tensor, Tensor]] = {}  # the batch of a step, or nothing

    def read_ahead(self, step: int) -> None:
        """Read the batch of a step, so that the next `get_batch` has it at once."""
        self._ahead = {step: self._read_batch(step)}

    def get_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this process's tokens of a step, and as targets those one later: (B, T) each."""
        return self._ahead.pop(step, None) or self._read_batch(step)

    def _read_batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows = []
        for row in self.rows:
            which, start = self._locate_window(step * self.batch_size + row)
            rows.append(self.texts[which].read_marked(start, self.seq_len + 1))
        return stack_inputs_and_targets(rows)

    def _locate_window(self, number: int) -> tuple[int, int]:
        """Find the text and the position of a window, by its number in the whole training."""
        cycle, place = divmod(number, MIXTURE_CYCLE_WINDOWS)
        which = int(self.turns[place])
        text = self.texts[which]
        count = self.window_counts[which]
        in_cycle = int((self.turns[:place] == which).sum())  # earlier places of this text
        epoch, index = divmod(cycle * self.cycle_shares[which] + in_cycle, count)
        if which not in self._orders or self._orders[which][0] != epoch:
            self._orders[which] = (epoch, shuffle(count, seed_from(self.seed, which, epoch)))
        window = int(self._orders[which][1][index])
        # Each epoch shifts all windows by a random offset; the last window must still fit.
        offsets = min(self.seq_len, len(text) - count * self.seq_len)
        offset = seed_from(self.seed, which, epoch, 1) % offsets
        return which, offset + window * self.seq_len


@dataclass
class CustomBatches(Batches):
    """Batches that a function makes; `read` gives the tokens and targets (B, T) of a step."""

    read: Callable[[int], tuple[Tensor, Tensor]]
    vocab_size: int
    seq_len: int
    batch_size: int
    rows: Sequence[int]
    _ahead: dict[int, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)

    def _read_batch(self, step: int) -> tuple[Tensor, Tensor]:
        given = self.read(step)
        found = [
            (each.dtype, *each.shape) if isinstance(each, Tensor) else type(each)
            for each in (given if isinstance(given, tuple | list) else [given])
        ]
        expected = (torch.int64, self.batch_size, self.seq_len)
        if found != [expected, expected]:
            raise ConfigError(
                f"batches: step {step} gives {found}; must be tokens and targets, {expected} each "
                f"(train.batch_size, train.seq_len)"
            )
        tokens, targets = given  # (B, T) each
        if tokens.min() < 0 or torch.cat(given).max() >= self.vocab_size:
            raise ConfigError(f"batches: step {step} has tokens beyond 0 to {self.vocab_size - 1}")
        own_rows = torch.tensor([*self.rows])
        return tokens[own_rows], targets[own_rows]


def iter_validation_batches(
    texts: list[TokenFile],
    seq_len: int,
    batch_size: int,
    stride: int | None = None,
    limit: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets (B, T) in which each token of a text but its first is a target once.

    All other targets are IGNORE_INDEX, and so are those of conversations that are not learned.
    Windows of seq_len lie side by side or begin `stride` apart; with a stride, each token after the
    first window has more than seq_len - stride tokens of context. The last window of a text may be
    shorter. With a `limit`, only about that many tokens are targets: those of the same fraction of
    each text's windows, spread evenly, always the same.
    """
    total = sum(map(len, texts))
    stride = stride or seq_len
    for text in texts:
        windows = _iter_windows(len(text), seq_len, stride)
        if limit is not None and limit < total:
            n_windows = -(-(len(text) - 1) // stride)
            windows = _spread_evenly(windows, n_windows, limit / total)
        for length, same_length in groupby(windows, lambda window: window[1] - window[0]):
            while batch := list(islice(same_length, batch_size)):
                rows = [text.read_marked(start, length + 1) for start, _, _ in batch]
                inputs, targets = stack_inputs_and_targets(rows)
                # Only the last few targets of a row are new.
                first_new = length - torch.tensor([[new] for _, _, new in batch])  # (B, 1)
                yield inputs, targets.where(torch.arange(length) >= first_new, IGNORE_INDEX)


def _iter_windows(length: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last position of each window, and how many targets at its end are new."""
    start = 0
    done = 0  # the last position that has been a target
    while done < length - 1:
        end = min(start + seq_len, length - 1)
        yield start, end, end - done
        start += stride
        done = end


def _spread_evenly(
    windows: Iterator[tuple[int, int, int]], n_windows: int, share: float
) -> Iterator[tuple[int, int, int]]:
    """Yield a share of the windows, at least one, at equal distances."""
    n_kept = max(1, round(n_windows * share))
    for number, window in enumerate(windows):
        if number * n_kept % n_windows < n_kept:
            yield window


def stack_inputs_and_targets(rows: Iterable[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Stack rows of T + 1 tokens to inputs (B, T) and, one position later, targets (B, T).

    Those with the bit `IGNORED`, which chats.py sets, become IGNORE_INDEX among the targets.
    """
    marked = np.stack(list(rows))  # (B, T + 1)
    tokens = torch.from_numpy((marked & ~IGNORED).astype(np.int64))  # (B, T + 1)
    is_ignored = torch.from_numpy(marked >= IGNORED)  # (B, T + 1)
    return tokens[:, :-1], tokens.masked_fill(is_ignored, IGNORE_INDEX)[:, 1:]
