"""Copies against a search by brute force."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.extras.sources import find
from gptmini.extras.sources.find import Copies, Copy, SourceText, find_matches
from gptmini.tokenizer.chunks import Place

LETTERS = ["a", "ab", "ab \n", "\u4e2d\u6587\u4e2c", "\xe9\xe8a", "\U0001f600\U0001f601b"]


def join(*documents: str) -> SourceText:
    numbered = enumerate(documents, 1)
    return SourceText((text, True, Place(f"{number}.txt", 1)) for number, text in numbered)


def search_plainly(documents: list[str], text: str, shortest: int) -> list[tuple[int, int]]:
    """From left to right, the longest stretch from a character on."""
    found = []
    start = 0
    while start < len(text):
        end = start
        while end < len(text) and any(text[start : end + 1] in each for each in documents):
            end += 1
        if end - start >= shortest:
            found.append((start, end))
            start = end
        else:
            start += 1
    return found


@st.composite
def texts(draw):
    letters = st.text(draw(st.sampled_from(LETTERS)), max_size=40)
    return draw(st.lists(letters, min_size=1, max_size=4)), draw(letters)


@given(texts(), st.integers(2, 6))
def test_copies_are_those_of_a_plain_search(case, shortest):
    documents, query = case
    source = join(*documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "SHORTEST_COPY", shortest)
        patch.setattr(find, "_has_words", bool)
        found = find_matches(source.text, query)
    assert [(start, end) for start, end, _ in found] == search_plainly(documents, query, shortest)
    for start, end, position in found:
        assert source.text.index(query[start:end]) == position


def test_a_copy_may_be_long_and_a_text_of_one_character():
    draw = random.Random(0)
    text = "".join(draw.choices("abc", k=5000))
    source = join("x" * 9000, text)
    found = Copies(source, f"zz{text[1000:4500]}z{'x' * 8000}{text[:30]}")  # copied in part
    assert [(copy.start, copy.end, copy.file) for copy in found.copies] == [
        (2, 3502, "2.txt"),
        (3503, 11503, "1.txt"),
        (11503, 11533, "2.txt"),
    ]
    assert found.longest.length == 8000


def test_no_copy_goes_on_behind_a_document():
    source = join("a" * 30, "b" * 30)
    found = Copies(source, "a" * 30 + "b" * 30)
    assert [(copy.start, copy.end) for copy in found.copies] == [(0, 30), (30, 60)]


def test_the_prompt_is_not_counted_but_a_copy_may_begin_in_it():
    source = join("one\ntwo three four five six seven eight")
    found = Copies(source, "five six sev? no", "two three four ")
    assert found.copies == [Copy(0, 12, "1.txt", 2)]
    assert found.share == 12 / 16
    assert Copies(source, "?", "two three four five six").copies == []
    lines = join("zero\none two three\nfour five six seven")
    (copy,) = Copies(lines, " five", "one two three\nfour").copies
    assert copy.line == 3


def test_a_copy_begins_behind_the_last():
    source = join("abcdefghijklmnopqrstuv", "klmnopqrstuvwxyzABCDEFGHIJKLMNOP")
    found = Copies(source, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP????????")
    assert [(copy.start, copy.end) for copy in found.copies] == [(0, 22), (22, 42)]
    assert found.share == 0.84
    assert Copies(source, "").share == 0


def test_twenty_characters_are_a_copy_and_nineteen_are_not():
    source = join("\u4e00\u4e8c\u4e09\u56db\u4e94" + "abcdefghijklmnopqrs")
    assert Copies(source, "abcdefghijklmnopqrs").copies == []
    assert Copies(source, "\u4e94abcdefghijklmnopqrs").longest.length == 20


def test_json_has_the_place_of_each_copy(monkeypatch):
    source = join("x" * 5, "one\n\ntwo three four five six")
    data = Copies(source, "!two three four five six").to_dict()
    (copy,) = data["copies"]
    assert copy == {"start": 1, "end": 24, "length": 23, "file": "2.txt", "line": 3}
    assert (data["share"], data["longest"]) == (0.9583, 23)


def test_a_rule_of_dashes_is_no_copy():
    source = join(f"{'-' * 40}\nnot one word of this is new")
    assert Copies(source, f"a {'-' * 30} b").copies == []
    (copy,) = Copies(source, f"{'-' * 40}\nnot one").copies
    assert (copy.start, copy.end) == (22, 48)
