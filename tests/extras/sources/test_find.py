"""Copies against a search by brute force."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.errors import DataError
from gptmini.extras.sources import find
from gptmini.extras.sources.find import Copy, find_first, find_matches, search
from gptmini.extras.sources.index import TextIndex, build_index
from gptmini.tokenizer.chunks import Place

LETTERS = ["a", "ab", "ab \n", "\u4e2d\u6587\u4e2c", "\xe9\xe8a", "\U0001f600\U0001f601b"]


def index_of(*documents: str) -> TextIndex:
    files = [Place(f"{number}.txt", 1) for number in range(1, len(documents) + 1)]
    texts = [document.encode() for document in documents]
    return build_index((text, True, place) for text, place in zip(texts, files, strict=True))


def search_plainly(documents: list[str], text: str, shortest: int) -> list[tuple[int, int]]:
    """The longest stretch from each character, without those that lie in one from before."""
    found = []
    furthest = 0
    for start in range(len(text)):
        end = start
        while end < len(text) and any(text[start : end + 1] in each for each in documents):
            end += 1
        if end > furthest and end - start >= shortest:
            found.append((start, end))
        furthest = max(furthest, end)
    return found


@st.composite
def texts(draw):
    letters = st.text(draw(st.sampled_from(LETTERS)), max_size=40)
    return draw(st.lists(letters, min_size=1, max_size=4)), draw(letters)


@given(texts(), st.integers(1, 6), st.booleans())
def test_copies_are_those_of_a_plain_search(case, shortest, are_long):
    documents, text = case
    index = index_of(*documents)
    with pytest.MonkeyPatch.context() as patch:
        if are_long:  # longer than what is measured at first
            patch.setattr(find, "COMPARED_BYTES", 2)
            patch.setattr(find, "MEASURED_BYTES", 24)
        found = find_matches(index, text, shortest)
    assert found == search_plainly(documents, text, shortest)
    for start, end in found:
        position = find_first(index, text[start:end].encode())
        assert position == b"\xff".join(map(str.encode, documents)).index(text[start:end].encode())


def test_a_copy_is_never_of_half_a_character():
    # These share their first two bytes of three.
    assert find_matches(index_of("ab\u4e2d"), "ab\u4e2c", 1) == [(0, 2)]
    assert find_matches(index_of("\u4e2dab"), "\u6e2dab", 1) == [(1, 3)]


def test_a_copy_may_be_longer_than_what_is_measured_and_a_text_of_one_character():
    draw = random.Random(0)
    text = "".join(draw.choices("abc", k=5000))
    index = index_of("x" * 9000, text)
    found = search(index, f"zz{text[1000:4500]}z{'x' * 8000}{text[:30]}")  # copied in part
    assert [(copy.start, copy.end, copy.document) for copy in found.copies] == [
        (2, 3502, 2),
        (3503, 11503, 1),
        (11503, 11533, 2),
    ]
    assert found.longest.length == 8000


def test_no_copy_goes_on_behind_a_document():
    index = index_of("a" * 30, "b" * 30)
    found = search(index, "a" * 30 + "b" * 30)
    assert [(copy.start, copy.end) for copy in found.copies] == [(0, 30), (30, 60)]


def test_the_prompt_is_not_counted_but_a_copy_may_begin_in_it():
    index = index_of("one\ntwo three four five six seven eight")
    found = search(index, "five six sev? no", "two three four ")
    assert found.copies == [Copy(0, 12, "1.txt", 2, 1)]
    assert found.share == 12 / 16
    assert search(index, "?", "two three four five six").copies == []
    lines = index_of("zero\none two three\nfour five six seven")
    (copy,) = search(lines, " five", "one two three\nfour").copies
    assert copy.line == 3
    # Both begin in the prompt: the one within the other is left out.
    two = index_of("abcdefghijklmnopqrstuvwxyz", "bcdefghijklmnopqrstuvwxyz!")
    (copy,) = search(two, "klmnopqrstuvwxyz!", "abcdefghij").copies
    assert (copy.start, copy.end, copy.file) == (0, 17, "2.txt")


def test_shares_count_no_character_twice():
    index = index_of("abcdefghijklmnopqrstuv", "klmnopqrstuvwxyzABCDEF")
    found = search(index, "abcdefghijklmnopqrstuvwxyzABCDEF!!!!!!!!")
    assert [(copy.start, copy.end) for copy in found.copies] == [(0, 22), (10, 32)]
    assert found.stretches == [(0, 32)]
    assert found.share == 0.8
    assert search(index, "").share == 0


def test_twenty_characters_are_a_copy_and_nineteen_are_not():
    index = index_of("\u4e00\u4e8c\u4e09\u56db\u4e94" + "abcdefghijklmnopqrs")
    assert search(index, "abcdefghijklmnopqrs").copies == []
    assert search(index, "\u4e94abcdefghijklmnopqrs").longest.length == 20


def test_surrogates_are_refused():
    with pytest.raises(DataError, match="character 2"):
        search(index_of("a"), "ab\ud800")


def test_json_has_the_place_of_each_copy(monkeypatch):
    index = index_of("x" * 5, "one\n\ntwo three four five six")
    data = search(index, "!two three four five six").to_dict()
    (copy,) = data["copies"]
    assert copy == {"start": 1, "end": 24, "length": 23, "file": "2.txt", "line": 3, "document": 2}
    assert (data["share"], data["longest"]) == (0.9583, 23)


def test_a_rule_of_dashes_is_no_copy():
    index = index_of(f"{'-' * 40}\nnot one word of this is new")
    assert search(index, f"a {'-' * 30} b").copies == []
    (copy,) = search(index, f"{'-' * 40}\nnot one").copies
    assert (copy.start, copy.end) == (0, 48)
