from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptmini.data.corpus import prepare_corpus
from gptmini.data.token_file import Corpus, TokenFile
from gptmini.tokenizer.tokenizers import ByteTokenizer
from gptmini.train import batches
from gptmini.train.batches import Batches
from tests.support import tiny


class Counting:
    """A token file whose tokens are their own positions, from `first` on."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self.first = first

    def __len__(self) -> int:
        return self.count

    def read_marked(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start <= start + count <= self.count
        return self.first + np.arange(start, start + count, dtype=np.uint32)


def text_of(count: int) -> TokenFile:
    """A text whose tokens are their positions."""
    return Counting(count)  # type: ignore[return-value]


def texts_of(*counts: int) -> list[TokenFile]:
    """Texts whose tokens are their positions, those of text n from n million on."""
    return [Counting(count, 10**6 * n) for n, count in enumerate(counts)]  # type: ignore[misc]


def windows(data: Batches, step: int) -> list[tuple[int, int]]:
    """The text of each window of a step, and the position where it begins."""
    tokens, _ = data.get_batch(step)
    return [divmod(int(first), 10**6) for first in tokens[:, 0]]


@given(
    seq_len=st.integers(1, 40),
    extra=st.integers(1, 400),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_an_epoch_sees_every_window_once(seq_len, extra, batch_size, seed):
    train = seq_len + extra
    data = Batches([text_of(train)], None, seq_len, batch_size, seed)
    (count,) = data.window_counts
    steps = -(-3 * count // batch_size)
    starts = [start for step in range(steps) for _, start in windows(data, step)]
    for epoch in range(3):
        seen = sorted(starts[epoch * count : (epoch + 1) * count])
        assert np.all(np.diff(seen) == seq_len)  # side by side, none twice
        assert seen[0] >= 0
        assert seen[-1] + seq_len + 1 <= train
    assert count * seq_len >= train - 2 * seq_len  # little is left over


def test_epochs_differ_in_order_and_in_where_their_windows_begin():
    """So do texts of one length, and seeds."""

    def epochs(weights: list[float] | None, seed: int) -> list[tuple[int, list[int]]]:
        """The text of each epoch, and where its windows begin, in order."""
        data = Batches(texts_of(*[1007] * len(weights or [1])), weights, 20, 1, seed)
        (count,) = set(data.window_counts)
        found: list[list[int]] = [[] for _ in data.texts]
        for step in range(500):
            ((which, start),) = windows(data, step)
            found[which].append(start)
        return [
            (which, starts[first : first + count])
            for which, starts in enumerate(found)
            for first in range(0, len(starts) - count, count)
        ]

    for several in (epochs(None, 1), epochs([1.0, 1.0], 1), epochs(None, 1) + epochs(None, 2)):
        assert len(several) >= 8
        orders = [tuple(start - min(starts) for start in starts) for _, starts in several]
        assert len(set(orders)) == len(orders)
        assert len({min(starts) for _, starts in several}) > len(several) // 2


def test_texts_take_turns_in_another_order_for_another_seed():
    turns = [
        [which for which, _ in windows(Batches(texts_of(900, 900), [1.0, 1.0], 20, 50, seed), 0)]
        for seed in range(3)
    ]
    assert len(set(map(tuple, turns))) == 3


def test_the_first_window_may_begin_at_every_place_of_a_window():
    data = Batches([text_of(45)], None, 20, 1, 0)  # one window, and the token after it
    starts = [start for step in range(2000) for _, start in windows(data, step)]
    assert data.window_counts == [1]
    assert set(starts) == set(range(20))
    counts = np.bincount(starts)
    assert ((counts - 100) ** 2 / 100).sum() < 43.8  # 1 in 1000 with 19 degrees of freedom
    data = Batches([text_of(22)], None, 20, 1, 0)  # one token to spare: two places
    assert {start for step in range(99) for _, start in windows(data, step)} == {0, 1}


def test_windows_are_a_function_of_seed_and_step():
    def make(seed: int) -> Batches:
        return Batches([text_of(5000)], None, 16, 8, seed)

    assert windows(make(1), 77) == windows(make(1), 77)
    assert windows(make(1), 77) != windows(make(2), 77)
    tokens, targets = make(1).get_batch(3)
    assert tokens.shape == targets.shape == (8, 16)
    assert torch.equal(targets, tokens + 1)


def test_any_step_reads_the_same_after_any_other():
    """As a resumed run does, and a step whose windows lie in two epochs."""

    def make() -> Batches:
        return Batches(texts_of(330, 95), [1.0, 2.0], 10, 8, 5)

    data = make()
    for step in (0, 1, 5, 4, 40, 2, 41, 0):
        assert windows(data, step) == windows(make(), step)


def test_several_processes_read_the_rows_of_one():
    whole = Batches(texts_of(330, 95), [1.0, 2.0], 10, 8, 5)
    parts = [Batches(texts_of(330, 95), [1.0, 2.0], 10, 8, 5, range(n, n + 4)) for n in (0, 4)]
    for step in range(20):
        assert windows(whole, step) == [each for part in parts for each in windows(part, step)]


def test_a_batch_that_was_read_ahead_is_the_same_and_no_other(monkeypatch):
    def make() -> Batches:
        return Batches([text_of(500)], None, 16, 4, 0)

    data = make()
    reads = []
    read = data._read_batch
    monkeypatch.setattr(data, "_read_batch", lambda step: reads.append(step) or read(step))
    data.read_ahead(3)
    assert reads == [3]
    for step in (2, 3, 3):  # another step; then the one that was read; again
        for ours, right in zip(data.get_batch(step), make().get_batch(step), strict=True):
            assert torch.equal(ours, right)
    assert reads == [3, 2, 3]


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 9), st.data())
def test_validation_sees_every_target_once_behind_enough_of_the_text(
    total, seq_len, batch_size, data
):
    stride = data.draw(st.none() | st.integers(1, seq_len))
    seen = []
    for tokens, targets in batches.iter_validation_batches(
        [text_of(total)], seq_len, batch_size, stride
    ):
        assert len(tokens) <= batch_size
        counted = targets != batches.IGNORE_INDEX
        assert torch.equal(targets[counted], tokens[counted] + 1)
        seen += targets[counted].tolist()
        for row, new in zip(tokens, counted, strict=True):
            place = int(new.nonzero()[0])
            assert place + 1 > seq_len - (stride or seq_len) or row[0] == 0
    assert sorted(seen) == list(range(1, total))


@given(st.integers(60, 3000), st.integers(1, 20), st.integers(1, 9), st.integers(1, 3000))
def test_a_part_of_the_validation_text_is_spread_over_it(total, seq_len, batch_size, limit):
    def targets(**limited: int) -> list[int]:
        seen = batches.iter_validation_batches([text_of(total)], seq_len, batch_size, **limited)
        return [int(token) for _, each in seen for token in each[each != batches.IGNORE_INDEX]]

    part = targets(limit=limit)
    assert set(part) <= set(targets())
    assert len(set(part)) == len(part)
    if limit >= total:
        assert part == targets()
    else:
        assert abs(len(part) - limit) <= 2 * seq_len
        gaps = np.diff([0, *part, total])
        windows = max(1, round(limit / seq_len))
        assert gaps.max() <= 2 * total / windows + 3 * seq_len


def test_weighted_texts_share_the_windows_and_have_epochs_of_their_own():
    sizes, weights = [500, 3000, 10_000], [1.0, 2.0, 7.0]
    data = Batches(texts_of(*sizes), weights, 10, 20, 3)
    visits = [visit for step in range(200) for visit in windows(data, step)]
    for which in range(3):
        starts = [start for one, start in visits if one == which]
        assert len(starts) == pytest.approx(400 * weights[which], abs=10)
        count = data.window_counts[which]
        for epoch in range(len(starts) // count):
            assert len(set(starts[epoch * count : (epoch + 1) * count])) == count
    first = [sum(one == which for one, _ in visits[:100]) for which in range(3)]
    assert first == pytest.approx([10, 20, 70], abs=12)  # mixed from the start
    corpus = Corpus("", ByteTokenizer(), data.texts, [], [], "")
    assert corpus.count_epochs(10, 20, 200, weights) == pytest.approx(4000 * 0.1 / 49, rel=0.02)


def test_rows_come_from_the_file(text_file: Path, tmp_path: Path):
    corpus = prepare_corpus(tiny(data={"path": str(text_file)}))
    data = Batches(corpus.training, None, 32, 4, 0)
    tokens, _ = data.get_batch(5)
    for row in tokens.tolist():
        read = row[1:] if row[0] == 256 else row  # the end-of-text token stands before the text
        assert bytes(read) in text_file.read_bytes()
