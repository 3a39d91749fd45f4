"""Sorting suffixes, against Python's own sorting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.extras.sources import suffixes


def sort(data: bytes) -> list[int]:
    return suffixes.sort_suffixes(np.frombuffer(data, np.uint8)).tolist()


@given(st.lists(st.sampled_from([1, 97, 98, 255]), max_size=80), st.sampled_from([1, 3, 1000]))
def test_suffixes_are_sorted_in_blocks_of_any_size(letters, block_size):
    data = bytes([2, *letters])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffixes, "BLOCK_SIZE", block_size)
        assert sort(data) == sorted(range(len(data)), key=lambda at: data[at:])


def test_one_character_and_a_text_that_comes_twice():
    assert sort(b"a" * 5000) == list(range(4999, -1, -1))
    text = np.random.default_rng(0).integers(97, 101, 3000, np.uint8).tobytes() * 2
    assert sort(text) == sorted(range(len(text)), key=lambda at: text[at:])


def test_repetitions_of_repetitions():
    one, other = b"a", b"ab"  # Fibonacci words
    while len(other) < 3000:
        one, other = other, other + one
    assert sort(other) == sorted(range(len(other)), key=lambda at: other[at:])


def test_nul_bytes_at_the_end_are_its_end():
    order = sort(b"b\0a" + bytes(40))
    assert sorted(order) == list(range(43))
    assert order[-2:] == [2, 0]
