"""Each planted bug finds its place in the code, and the test that must see it."""

import re

import pytest

from tests.stress import plant_bugs

BUGS = plant_bugs.load()


def test_every_bug_finds_its_place_and_its_test():
    assert list(plant_bugs.find_problems(BUGS)) == []
    names = [(bug.folder, bug.function, bug.mistake) for bug in BUGS]
    assert len(set(names)) == len(names) > 150
    # A function that is listed twice would hide the bugs of the first list.
    assert plant_bugs.DATA.read_text().count("- mistake: ") == len(names)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"function": "gone"}, "gptmini/model has 0 functions gone, not one"),
        ({"code": "no such code"}, "Attention.project_qkv has 'no such code' 0 times, not once"),
        ({"code": "q"}, r"Attention.project_qkv has 'q' \d+ times, not once"),
        ({"becomes": "("}, "was never closed"),
        ({"becomes": BUGS[0].code}, r"'apply_rotary\(k, cos_sin\)' stays the same"),
        ({"seen_by": "test_gone"}, "test_gone is in 0 files, not one"),
    ],
)
def test_a_bug_that_has_lost_its_place_is_named(change, problem):
    (line,) = plant_bugs.find_problems([BUGS[0]._replace(**change)])
    assert line.startswith(f"{BUGS[0].mistake}: ")
    assert re.search(problem, line)


def test_code_is_found_however_its_lines_are_broken():
    found = plant_bugs.build_pattern("max(0, start - size)")
    assert found.search("x = max(0, start - size)")
    assert found.search("x = max(\n    0,  # the first\n    start\n    - size\n)")
    assert not found.search("x = max(0, restart - size)")
    assert not found.search("x = max(0, start - sizes)")
