"""`generate --sources`, and the same from Python."""

import copy
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gptmini import console
from gptmini.errors import DataError
from gptmini.extras.sources.find import Copies, Copy
from gptmini.generate.run import Run, load_run

FEW = ["--max-new-tokens", "6"]


def test_sources_are_marked_in_colour_and_listed(gptmini, run, monkeypatch):
    words = ["generate", "--prompt", "quick brown fox", *FEW]
    code, expected, _ = gptmini(*words)
    # The model has learned little: put the beginning of its text where it was trained.
    monkeypatch.setattr("gptmini.extras.sources.training_text.Copies", FirstFive)
    code, out, err = gptmini(*words, "--sources")
    assert (code, out) == (0, expected)  # a pipe gets the text alone
    assert "%" in err
    assert "a.txt:3" in err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "IS_WINDOWS", False)
    code, out, _ = gptmini(*words, "--sources")
    start = len("quick brown fox")
    copied = console.escape_control_characters(expected[start : start + 5])
    shown = console.escape_control_characters(expected)
    assert out == shown.replace(copied, f"{console.MARK}{copied}{console.UNMARK}", 1)
    monkeypatch.setenv("NO_COLOR", "1")
    assert gptmini(*words, "--sources")[1] == shown


class FirstFive(Copies):
    """A search that finds the beginning of every text."""

    stretches = [(0, 5)]  # noqa: RUF012
    copies = [Copy(0, 5, "a.txt", 3, 1)]  # noqa: RUF012


def test_sources_in_json_and_for_each_of_several_texts(gptmini, run):
    words = ["generate", run, "--prompt", "the quick", "--samples", "2", *FEW]
    code, out, err = gptmini(*words, "--sources", "--json")
    assert (code, err) == (0, "")
    for sample in json.loads(out)["samples"]:
        assert set(sample["sources"]) == {"share", "longest", "copies"}
    code, out, err = gptmini(*words, "--sources")
    assert out == gptmini(*words)[1]
    assert err.count("training text") == 2


def test_sources_while_typing(gptmini, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \n")))
    code, _, err = gptmini("generate", "-i", "--sources", *FEW)
    assert code == 0
    assert "training text" in err


def test_sources_need_the_text_of_training(gptmini, run, trained):
    text = trained.parents[1] / "text.txt"
    whole = text.read_bytes()
    words = ["generate", "--prompt", "the ", "--sources", *FEW]
    try:
        text.write_bytes(whole.replace(b"fox", b"cat", 1))
        code, out, err = gptmini(*words)
        assert (code, out, err.count("\n")) == (3, "", 2)  # the run is named, too
        assert "text.txt" in err
    finally:
        text.write_bytes(whole)
    assert gptmini(*words)[0] == 0
    code, _, err = gptmini("generate", run, "--prompts", "a", "--out", "b", "--sources")
    assert code == 2
    assert "--sources" in err


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
    with pytest.raises(DataError, match="no record of a text"):
        Run("runs/x", run.config, run.tokenizer, run.model).find_copies(text)


def test_evaluate_says_how_much_of_the_held_out_text_is_copied(gptmini, run):
    code, out, err = gptmini("evaluate", run)
    assert (code, err.count("\n")) == (0, 1)
    (line,) = (line for line in out.splitlines() if line.startswith("copied"))
    share = json.loads(gptmini("evaluate", run, "--json")[1])["copied"]
    assert 0.9 < share < 1  # the same sentence, with other numbers
    assert f"{100 * share:.1f} % of it stands in the training text" in line
    Path("a.txt").write_text("another text " * 50)
    assert json.loads(gptmini("evaluate", run, "--data", "a.txt", "--json")[1])["copied"] is None
