"""How much a text repeats itself, counted by brute force and on texts made for it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.copies import overlap
from gptmini.copies.index import Piece, build_index
from gptmini.copies.overlap import measure_overlap
from gptmini.tokenizer.chunks import Place
from tests.support import prose

LETTERS = ["a", "ab", "ab\xe9", "\u4e2d\u6587\u4e2c"]


def pieces(*documents: str) -> list[Piece]:
    return [(document.encode(), True, Place("a.txt", 1)) for document in documents]


def count_repeated(documents: list[str], length: int) -> int:
    """The bytes of all stretches of some characters that stand at two places."""
    places: dict[str, list[tuple[int, int]]] = {}
    for number, text in enumerate(documents):
        for start in range(len(text) - length + 1):
            places.setdefault(text[start : start + length], []).append((number, start))
    covered = {
        (number, at)
        for found in places.values()
        if len(found) > 1
        for number, start in found
        for at in range(start, start + length)
    }
    return sum(len(documents[number][at].encode()) for number, at in covered)


@given(st.sampled_from(LETTERS).flatmap(lambda c: st.lists(st.text(c, max_size=60), min_size=1)))
def test_what_stands_twice_is_counted_once(documents):
    index = build_index(pieces(*documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "REPEATED_CHARACTERS", 7)
        patch.setattr(overlap, "SUFFIXES_AT_ONCE", 5)
        patch.setattr(overlap, "COMPARED_BYTES", 4)
        share = measure_overlap(index, []).repeated_in_training
    assert share == round(count_repeated(documents, 7) / len(index.order), 4)


def test_a_held_out_part_that_repeats_the_training_part(monkeypatch):
    text = prose()
    index = build_index(pieces(text[:5000], text[5000:6000]))
    held_out = [text[100:200], text[7000:7100], text[200:260] + "?" * 60, text[300:330] + "?" * 10]
    for size in (1_000_000, 1):
        monkeypatch.setattr(overlap, "CHARACTERS_AT_ONCE", size)
        measured = measure_overlap(index, pieces(*held_out))
        assert measured.held_out_repeated == round(160 / 360, 4)
        assert measured.held_out_in_copies == round(190 / 360, 4)
        assert (measured.documents, measured.documents_repeated) == (4, 1)
    parts = [
        (text[100:150].encode(), True, Place("", 1)),
        (text[150:200].encode(), False, Place("", 1)),
    ]
    assert measure_overlap(index, parts).documents_repeated == 1


def test_the_command(gptmini):
    text = prose()
    Path("a.txt").write_text(text + text[:1500])
    code, out, _ = gptmini("data", "check", "--data", "a.txt", "--set", "data.validation=0.05")
    assert (code, out.count("\n")) == (0, 3)
    words = ["data", "check", "--data", "a.txt", "--set", "data.validation=0.05", "--json"]
    code, out, _ = gptmini(*words)
    assert json.loads(out)["held_out_repeated"] > 0.9
    assert json.loads(out)["documents"] == 1
    assert gptmini("data", "check", "--data", "none.txt")[0] == 3
