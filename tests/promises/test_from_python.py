"""docs/from-python.md and own-attention.md: their programs run in order, as a reader runs them."""

import re
from pathlib import Path

import pytest

import gptmini
from tests.support import ROOT

PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "runs"),
    [
        ("from-python", ["by-hand", "counting", "my", "schedule", "sgd", "smooth", "taught"]),
        ("own-attention", ["attentions", "differential"]),
    ],
)
def test_every_program_of_the_page_runs(page, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    used = set(re.findall(r"gptmini\.(\w+)", (ROOT / f"docs/{page}.md").read_text()))
    assert {name for name in used if hasattr(gptmini, name)} <= {*gptmini.__all__}
    names: dict[str, object] = {}
    for number, program in enumerate(PROGRAM.findall((ROOT / f"docs/{page}.md").read_text()), 1):
        few = program.replace('"steps": 200', '"steps": 4').replace("seeds=3", "seeds=1")
        # As on processors that have it, whatever this one has.
        few = few.replace('"eval_every"', '"dtype": "bfloat16", "eval_every"')
        exec(compile(few, f"{page}.md, program {number}", "exec"), names)
    assert sorted(path.name for path in Path("runs").iterdir()) == runs
