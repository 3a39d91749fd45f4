"""`gptmini copies`, and the same from Python."""

import copy
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gptmini import console
from gptmini.errors import DataError
from gptmini.extras.sources import command
from gptmini.generate.run import Run, load_run

PHRASE = "quick brown fox jumps over the lazy dog"


def test_copies_are_listed_and_marked_in_colour(gptmini, run, monkeypatch):
    words = ["copies", "--text", f"? {PHRASE}!"]
    code, out, err = gptmini(*words)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert "the longest copy is" in first
    assert second.endswith(f"text.txt:1: {PHRASE}")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "IS_WINDOWS", False)
    code, coloured, _ = gptmini(*words)
    assert coloured == f"?{command.MARK} {PHRASE}{console.UNMARK}!\n\n{out}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert gptmini(*words)[1] == out


def test_copies_in_json_of_a_file_or_what_another_command_writes(gptmini, run, monkeypatch):
    Path("a.txt").write_text(f"brown {PHRASE}")
    code, out, err = gptmini("copies", run, "--file", "a.txt", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"share", "longest", "copies"}
    assert 0 < found["share"] < 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"brown {PHRASE}".encode())))
    words = ["copies", run, "--file", "-", "--prompt", "brown quick", "--json"]
    without_prompt = json.loads(gptmini(*words)[1])
    assert without_prompt["copies"][-1]["end"] == len(PHRASE) - len("quick")
    beginning = ["--text", f"lazy dog {PHRASE}", "--prompt", "lazy dog ", "--json"]
    assert json.loads(gptmini("copies", run, *beginning)[1])["share"] == 1


def test_copies_need_the_text_of_training(gptmini, run, trained):
    text = trained.parents[1] / "text.txt"
    whole = text.read_bytes()
    words = ["copies", "--text", PHRASE]
    try:
        text.write_bytes(whole.replace(b"fox", b"cat", 1))
        code, out, err = gptmini(*words)
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert "text.txt" in err
    finally:
        text.write_bytes(whole)
    assert gptmini(*words)[0] == 0
    code, _, err = gptmini("copies", run)
    assert (code, "give exactly one of them" in err) == (2, True)


def test_threads_share_a_text_and_a_copied_run_has_its_own(trained: Path, tmp_path: Path):
    run = load_run(trained)
    text = "? quick brown fox jumps over the lazy dog"
    with ThreadPoolExecutor(4) as pool:  # one of them reads it
        results = list(pool.map(run.find_copies, [text] * 8))
    for sources in results:
        (found,) = sources.copies
        assert (found.start, found.end, found.line) == (1, len(text), 1)
        assert Path(found.file).name == "text.txt"
    copied = copy.deepcopy(run)
    assert copied.find_copies("lazy dog", "jumps over the ").share == 1
    assert copied.find_copies("lazy dog").share == 0
    with pytest.raises(DataError, match="no training text on record"):
        Run("runs/x", run.config, run.tokenizer, run.model).find_copies(text)


def test_evaluate_says_how_much_of_the_held_out_text_is_copied(gptmini, run):
    code, out, err = gptmini("evaluate", run)
    assert (code, err.count("\n")) == (0, 1)
    (line,) = (line for line in out.splitlines() if line.startswith("copied"))
    share = json.loads(gptmini("evaluate", run, "--json")[1])["copied"]
    assert 0.9 < share < 1  # the same sentence, with other numbers
    assert f"{100 * share:.1f} % of the held-out text stands in the training text" in line
    Path("a.txt").write_text("another text " * 50)
    assert json.loads(gptmini("evaluate", run, "--data", "a.txt", "--json")[1])["copied"] is None
