"""The rules of the built-in stories determine what they say they do; nothing is told twice."""

import re
from itertools import islice

import pytest

from gptmini.data.stories import BOYS, COUNT, DAYS, GIRLS, NUMBERS, RULES, Story, iter_stories
from gptmini.data.text import find_text
from tests.support import tiny

STORIES = list(islice(iter_stories(), 600))


def read_places(story: Story, rule: str) -> list[tuple[str, str]]:
    """Return each place of a rule, with what stands before it."""
    places = [place for place in story.places if place.rule == rule]
    return [(story.text[place.start : place.end], story.text[: place.start]) for place in places]


def test_the_same_seed_tells_the_same_stories_and_another_seed_others():
    assert [story.text for story in islice(iter_stories(), 600)] == [s.text for s in STORIES]
    assert STORIES[0].text.startswith("Carl wrote a letter to Noah. He wrote:")
    others = {story.text for story in islice(iter_stories(seed=2), 600)}
    assert len(others & {story.text for story in STORIES}) <= 1


def test_no_story_is_told_twice():
    texts = [story.text for story in islice(iter_stories(), COUNT)]
    assert len(set(texts)) == COUNT
    assert 600_000 < sum(map(len, texts)) < 800_000
    assert all(text.isascii() for text in texts)  # so that bytes are characters


def test_each_rule_has_places_and_each_place_a_rule():
    assert {place.rule for story in STORIES for place in story.places} == RULES.keys()


@pytest.mark.parametrize("rule", ["name", "copy", "place", "turn", "rank"])
def test_what_is_determined_was_named_before(rule: str):
    for story in STORIES:
        for word, before in read_places(story, rule):
            assert re.search(rf"\b{word}\b", before), story.text


def test_pronouns_follow_the_names():
    for story in STORIES:
        for word, before in read_places(story, "pronoun"):
            people = GIRLS if word.lower() in ("she", "her") else BOYS
            assert set(people) & set(re.findall(r"\w+", before)), story.text


def test_days_follow_each_other():
    for story in STORIES:
        for day, before in read_places(story, "day"):
            named = re.findall("|".join(DAYS), before)
            assert DAYS.index(day) == (DAYS.index(named[-1]) + 1) % 7


def test_sums_are_right():
    count = dict(zip(NUMBERS, range(len(NUMBERS)), strict=True))
    for story in STORIES:
        for word, before in read_places(story, "sum"):
            numbers = [count[each] for each in re.findall(r"\w+", before) if each in count]
            n, m = (number for number in numbers if number not in (0, 1))
            assert count[word] == (n - m if "had none" in before else n + m), story.text


def test_things_keep_their_colours_when_they_are_swapped():
    for story in STORIES:
        for colour, before in read_places(story, "binding"):
            thing = re.match(r" (\w+)", story.text[len(before) + len(colour) :])
            assert thing is not None
            assert f"{colour} {thing[1]}" in before


def test_the_text_has_a_document_for_each_story():
    text = find_text(["builtin:stories"], tiny().data)
    chunks = list(text.iter_chunks())
    assert [chunk.text for chunk in chunks[:600]] == [story.text for story in STORIES]
    assert str(chunks[7].place) == "builtin:stories, story 8:1"
