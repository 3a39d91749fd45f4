"""The tour in Chinese says what the English one says: the same blocks, code, links and numbers.

Prose is not compared. But whoever changes a figure, a command or a picture of the English tour, or
adds a paragraph to it, must change the Chinese one, too. The Chinese README is a page of its own,
whose commands are among those of the English one.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

README = ROOT / "README.md"
TOUR = ROOT / "docs" / "tour.md"
PAGES = [README, TOUR]
FENCED = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ITEM = re.compile(r"^(?:-|\||\d+\.) ?", re.MULTILINE)
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")
MONTH = re.compile(r" \d+ 月")  # a word in English


class Block(NamedTuple):
    """All of a heading, a paragraph, a list, a table or a code block that has no language."""

    kind: str  # "##", "![", "```", or the marks of all items or rows
    fenced: str  # the content of a code block, of Python without its comments
    numbers: list[str]  # numerals, in the order of the text
    code: list[str]  # inline, sorted, as the order of words is the language's
    links: list[str]  # sorted; headings by their places, as their names are translated


def read_blocks(page: Path) -> list[Block]:
    """Read the blocks of a page, without the line that leads to the other language."""
    title, _, *blocks = split_blocks(page.read_text())
    return [read_block(block, page) for block in (title, *blocks)]


def split_blocks(text: str) -> Iterator[str]:
    """Split a page at its empty lines, but not inside code blocks."""
    for number, part in enumerate(FENCED.split(text)):
        if number % 2:
            yield part
        else:
            yield from re.findall(r"(?:.+\n)+", part)


def name_link(link: str, page: Path) -> str:
    """Name the target of a link by the English page and the place of the heading there."""
    path, _, anchor = link.partition("#")
    if anchor:
        target = page.parent / path if path else page
        headings = HEADING.findall(FENCED.sub("", target.read_text()))
        anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings]
        anchor = f"#{anchors.index(anchor)}"
    return path.replace(".zh.", ".") + anchor


def read_block(block: str, page: Path) -> Block:
    if block.startswith("```"):
        return Block("```", strip_comments(block), [], [], [])
    start = re.match(r"#+|!\[|-|\||\d+\.", block)
    kind = start[0] if start else ""
    if kind and kind[0] not in "#!":
        kind = "".join(ITEM.findall(block))
    links = sorted(name_link(link, page) for link in LINK.findall(block))
    prose = LINK.sub("", MONTH.sub("", block))
    code = sorted(CODE.findall(prose.replace(".zh.md", ".md").replace("\n", " ")))
    return Block(kind, "", NUMBER.findall(CODE.sub("", prose)), code, links)


def strip_comments(block: str) -> str:
    """A code block without comments and docstrings, if it is Python: these are translated."""
    if not block.startswith("```python\n"):
        return block
    code = block.removeprefix("```python\n").removesuffix("```")
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    skipped = (tokenize.COMMENT, tokenize.NL)
    kept = [each.string for each in tokens if each.type not in skipped]
    return "\n".join(word for word in kept if not word.startswith('"""'))


def test_the_chinese_tour_has_the_blocks_code_links_and_numbers_of_the_english_one():
    chinese = TOUR.with_suffix(".zh.md")
    expected = read_blocks(TOUR)
    found = read_blocks(chinese)
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
        assert theirs == ours, f"{chinese.name}, block {number}: say what {TOUR.name} says"
    assert len(found) == len(expected)


def test_the_commands_of_the_chinese_readme_are_among_those_of_the_english_one():
    def list_lines(page: Path) -> list[str]:
        return "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)).splitlines()

    commands = list_lines(README.with_suffix(".zh.md"))
    assert commands
    assert set(commands) <= set(list_lines(README))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_leads_to_the_other_language(page: Path):
    chinese = page.with_suffix(".zh.md")
    assert f"English · [中文]({chinese.name})" in page.read_text().splitlines()[:3]
    assert f"[English]({page.name}) · 中文" in chinese.read_text().splitlines()[:3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_chinese_page_lead_to_chinese_pages(page: Path):
    chinese = page.with_suffix(".zh.md")
    _, _, *blocks = split_blocks(chinese.read_text())
    for link in LINK.findall("".join(blocks)):
        target = (page.parent / link.partition("#")[0]).resolve()
        assert target not in PAGES or target == page == README, link  # README lists all commands


def test_chinese_stands_apart_from_latin_letters_and_digits():
    """By a space, as the pages do throughout; line ends would become spaces between characters."""
    for page in PAGES:
        text = FENCED.sub("", page.with_suffix(".zh.md").read_text())
        assert not re.findall(r".?(?:[一-鿿][A-Za-z0-9`]|[A-Za-z0-9`%][一-鿿]).?", text)
        assert not re.findall(r".\n[一-鿿]", text)
        assert not re.findall(r"[一-鿿][,;:?!](?=.)", text)


def test_a_figure_that_changes_in_one_page_is_noticed(tmp_path: Path):
    page = tmp_path / "a.md"
    translation = tmp_path / "a.zh.md"
    code = "```python\nx = 3  # {}\n```\n"
    english = "# A\n\nEnglish\n\nIt takes `b` 9 seconds; see [this](#a).\n\n- 1\n- 2\n\n"
    english += code.format("three")
    chinese = "# 甲\n\n中文\n\n`b` 用时 9 秒。见[这里](#甲)。\n\n- 1\n- 2\n\n" + code.format("三")
    page.write_text(english)
    translation.write_text(chinese)
    assert read_blocks(translation) == read_blocks(page)
    changes = [("9", "8"), ("`b`", "`c`"), ("- 2\n", ""), ("#甲", "x.md"), ("# 甲", "## 甲")]
    for old, new in [*changes, ("x = 3", "x = 4")]:
        translation.write_text(chinese.replace(old, new))
        assert read_blocks(translation) != read_blocks(page)
