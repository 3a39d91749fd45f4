"""docs/from-python.md: its programs run, one after the other, as a reader would run them."""

import re

from tests.support import ROOT

PAGE = ROOT / "docs" / "from-python.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    programs = PROGRAM.findall(PAGE.read_text())
    assert len(programs) == 7
    names: dict[str, object] = {}
    for number, program in enumerate(programs, 1):
        exec(compile(program, f"{PAGE.name}, program {number}", "exec"), names)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "by-hand",
        "counting",
        "my",
        "sgd",
        "smooth",
        "taught",
    ]
