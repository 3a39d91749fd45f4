"""The tour: every block of Python runs, in order, and prints what stands below it."""

import contextlib
import io
import re

import pytest

from tests.support import ROOT

TOUR = ROOT / "docs" / "tour.md"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def list_chapters() -> dict[str, list[tuple[str, str]]]:
    """The blocks of each chapter, as pairs of language and content."""
    chapters = re.split(r"^## ", TOUR.read_text(), flags=re.MULTILINE)[1:]
    return {chapter.split("\n")[0]: BLOCK.findall(chapter) for chapter in chapters}


def assert_prints(printed: str, expected: str) -> None:
    """Compare words exactly, numbers to what other processors may round differently."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected)
    found, wanted = (
        [float(number.replace(",", "")) for number in NUMBER.findall(text)]
        for text in (printed, expected)
    )
    assert found == pytest.approx(wanted, abs=2e-4)


def test_every_block_prints_what_the_page_says():
    names: dict[str, object] = {}
    n_compared = 0
    for chapter, blocks in list_chapters().items():
        for number, (language, content) in enumerate(blocks):
            if language == "text":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(content, f"{chapter}, block {number}", "exec"), names)
            follows = blocks[number + 1] if number + 1 < len(blocks) else ("python", "")
            expected = follows[1] if follows[0] == "text" else ""
            assert_prints(printed.getvalue(), expected)
            n_compared += bool(expected)
    assert n_compared > 20


def test_every_chapter_has_a_picture_and_is_listed():
    text = TOUR.read_text()
    chapters = [name for name in list_chapters() if name[0].isdigit()]
    assert len(chapters) == 12
    for chapter in chapters:
        assert f". [{chapter.partition('. ')[2]}](#" in text
    assert len(re.findall(r"^!\[.+\]\(\.\./data/tour/.+\.png\)$", text, re.MULTILINE)) >= 12
