from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptmini import batches, shards
from gptmini.batches import Batches, permute
from gptmini.errors import DataError
from gptmini.tokenizer import ByteTokenizer


class Counting:
    """A token file whose tokens are their own positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start <= start + count <= self.count
        return np.arange(start, start + count, dtype=np.uint32)


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_permutations_hit_every_number_once(size, key):
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_differ_by_key_and_stir():
    orders = [tuple(permute(i, 1000, key) for i in range(1000)) for key in range(50)]
    assert len(set(orders)) == 50
    # neighbours stay neighbours about as rarely as in a shuffled list (2 in 1000)
    near = np.mean([np.mean(np.abs(np.diff(order)) == 1) for order in orders])
    assert near < 0.01


@given(
    seq_len=st.integers(1, 40),
    extra=st.integers(1, 400),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_an_epoch_sees_every_window_once(seq_len, extra, batch_size, seed):
    train = seq_len + extra
    data = Batches(Counting(train), train, seq_len, batch_size, seed)  # type: ignore[arg-type]
    steps = -(-3 * data.windows // batch_size)
    starts = [start for step in range(steps) for start in data.starts(step)]
    for epoch in range(3):
        seen = sorted(starts[epoch * data.windows : (epoch + 1) * data.windows])
        assert np.all(np.diff(seen) == seq_len)  # side by side, none twice
        assert seen[0] >= 0
        assert seen[-1] + seq_len + 1 <= train
    assert data.windows * seq_len >= train - 2 * seq_len  # little is left over


def test_windows_are_a_function_of_seed_and_step():
    def make(seed: int) -> Batches:
        return Batches(Counting(5000), 5000, 16, 8, seed)  # type: ignore[arg-type]

    assert make(1).starts(77) == make(1).starts(77)
    assert make(1).starts(77) != make(2).starts(77)
    tokens, targets = make(1).batch(3)
    assert tokens.shape == targets.shape == (8, 16)
    assert torch.equal(targets, tokens + 1)
    assert tokens[:, 0].tolist() == make(1).starts(3)


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 9))
def test_validation_sees_every_target_once(total, seq_len, batch_size):
    first = total // 2 - 1
    seen = [
        target
        for tokens, targets in batches.validation_batches(
            Counting(total),
            first,
            seq_len,
            batch_size,  # type: ignore[arg-type]
        )
        for target in targets.flatten().tolist()
        if torch.equal(targets, tokens + 1)
    ]
    assert sorted(seen) == list(range(first + 1, total))


def test_splits():
    corpus = shards.Corpus("a.txt", ByteTokenizer(), Counting(1000))  # type: ignore[arg-type]
    assert batches.split(corpus, 0.1, 50) == 900
    expected = r"a.txt: has 1000 tokens, 100 of them for validation, and one window needs 101"
    with pytest.raises(DataError, match=expected):
        batches.split(corpus, 0.1, 100)
    with pytest.raises(DataError, match="100 of them for training"):
        batches.split(corpus, 0.9, 100)


def test_rows_come_from_the_file(text_file: Path, tmp_path: Path):
    corpus = shards.prepare(str(text_file), "byte", tmp_path / "cache")
    data = Batches(corpus.tokens, 2000, 32, 4, 0)
    text = b"\0" + text_file.read_bytes()  # the document token stands before it
    tokens, _ = data.batch(5)
    for row, start in zip(tokens, data.starts(5), strict=True):
        if start > 0:
            assert bytes(row.tolist()) == text[start : start + 32]
