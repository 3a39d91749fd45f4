"""The tour: every block of Python runs, in order, and prints what stands below it."""

import contextlib
import importlib
import io
import operator
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.support import ROOT, WORDS

TOUR = ROOT / "docs" / "tour.md"
IDEAS = ROOT / "docs" / "ideas.md"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STEP = re.compile(r"^\| \d \|.*\| `(.+)` \|.*\|$", re.MULTILINE)  # of attention, in the table

SMALL = [
    "--set=model={n_layer: 2, n_head: 4, d_model: 16, context_length: 128}",
    "--set=train={steps: 2, batch_size: 4, compile: off}",
    "--set=sample={max_new_tokens: 4}",
    "--set=tokenizer.kind=byte",
]


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


def test_the_nine_steps_are_attention_with_several_heads():
    (chapter,) = (name for name in list_chapters() if name.startswith("7."))
    names: dict[str, object] = {}
    exec("from gptmini.model.mechanisms import *", names)
    exec(list_chapters()[chapter][0][1], names)
    steps = STEP.findall(TOUR.read_text())
    assert len(steps) == 9
    exec("\n".join(steps), names)
    torch.testing.assert_close(names["result"], names["split"])


def test_every_chapter_has_a_picture_and_a_question():
    text = TOUR.read_text()
    chapters = [name for name in list_chapters() if name[0].isdigit()]
    assert len(chapters) == 16
    pictures = re.findall(r"^!\[.+\]\(\.\./data/tour/(\d+)-\w+\.png\)$", text, re.MULTILINE)
    assert pictures == [str(number) for number in range(17)]  # the first shows the whole path
    assert text.count("\nWhere we are") == 10  # the same for chapters 3 to 9
    tries = re.split(r"^## ", text, flags=re.MULTILINE)[1:17]
    for chapter in tries:  # at its end, with at most two lines
        assert re.search(
            r"\*\*Try:\*\*(?:.+\n)+\n```python\n(?:.+\n){1,2}```\n\n```text\n(?:.+\n)+```\n\n$",
            chapter,
        )


def test_the_table_names_functions_and_tests_that_exist():
    row = re.compile(r"^\|.*?\| `([\w.]+):([\w.]+)` \|.*\| `(\w+)` \|$", re.MULTILINE)
    rows = row.findall(IDEAS.read_text())
    assert len(rows) > 25
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for module, name, test in rows:
        assert callable(operator.attrgetter(name)(importlib.import_module(f"gptmini.{module}")))
        assert f"def {test}(" in tests, test


def test_the_commands_within_the_text_run(gptmini):
    """In one folder, as a reader would type them: none is refused for what another has left."""
    pytest.importorskip("matplotlib")
    for name in ("stories.txt", "other.txt"):
        Path(name).write_text(WORDS * 20)
    own = ["--data", "stories.txt", *SMALL]
    assert gptmini("train", *own)[0] == 0
    commands = re.findall(r"`gptmini\s([^`]+ [^`]+)`", TOUR.read_text() + IDEAS.read_text())
    assert len(commands) > 25
    for command in dict.fromkeys(" ".join(each.split()) for each in commands):
        words = shlex.split(command.replace("TEXT", "'a text'"))
        if "--from" in words:
            words += ["--steps", "2"]
        elif words[0] in ("train", "compare"):
            words += own
        code, _, err = gptmini(*words)
        assert code == 0, f"{command}: {err}"
