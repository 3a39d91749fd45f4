"""`gptmini evaluate`: its figures, its options, its refusals."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from gptmini.runs.directory import RunDirectory
from gptmini.train import evaluate_run
from tests.support import SMALL

TRAIN = ["train", "--data", "text.txt", *SMALL]


@pytest.fixture
def trained(gptmini, text_file: Path):
    assert gptmini(*TRAIN, "--out", "runs/a")[0] == 0
    return gptmini


def test_evaluate_prints_the_figures_of_its_json_and_the_same_every_time(trained):
    code, out, _ = trained("evaluate", "--json")
    assert code == 0
    facts = json.loads(out)
    assert trained("evaluate", "runs/a", "--json")[1] == out
    code, words, _ = trained("evaluate")
    rows = {line[:13].strip(): line[15:] for line in words.splitlines()}
    assert rows["loss"] == f"{facts['loss']:.4f} nats per token"
    assert rows["bits per byte"] == f"{facts['bits_per_byte']:.4f}"
    assert rows["text"] == f"{facts['tokens']:,} tokens, {facts['bytes']:,} bytes"
    assert 0 < facts["accuracy"] < 1
    assert list(facts["compressors"]) == ["xz", "PPMd"]
    for name, figure in facts["compressors"].items():
        assert f"\nfor scale      {figure:.2f} bits per byte by {name}, a compressor" in words


def test_compressors_are_a_scale_for_the_held_out_text(gptmini, tmp_path, monkeypatch):
    """Text that repeats what was trained on costs them next to nothing, noise all of its bits."""
    noise = np.random.default_rng(0).integers(0, 2**32, 4000)
    repeated = "".join(f"{number:08x}\n" for number in noise[:1000])
    (tmp_path / "noise.txt").write_text("".join(f"{number:08x}\n" for number in noise))
    (tmp_path / "repeated.txt").write_text(repeated * 4)

    def measure(*words: str) -> dict[str, float]:
        return json.loads(gptmini("evaluate", *words, "--json")[1])["compressors"]

    for name in ("noise", "repeated"):
        assert gptmini("train", "--data", f"{name}.txt", *SMALL, "--out", f"runs/{name}")[0] == 0
    assert max(measure("runs/repeated").values()) < 0.1
    noise_figures = measure("runs/noise")
    for figure in noise_figures.values():
        assert 8 * 4 / 9 < figure < 5  # four bits a digit, nine bytes a line
    assert measure("runs/noise", "--data", "repeated.txt") == {}  # no text of its own
    monkeypatch.setitem(sys.modules, "pyppmd", None)  # not installed
    assert measure("runs/noise") == {"xz": noise_figures["xz"]}
    monkeypatch.setattr(evaluate_run, "MAX_COMPRESSED_BYTES", 1)
    assert measure("runs/noise") == {}


def test_the_test_part_has_its_own_figures(gptmini, tmp_path):
    """It repeats what was trained on; what is validated on does not."""
    noise = np.random.default_rng(0).integers(0, 2**32, 1000)
    lines = [f"{number:08x}\n" for number in noise]
    (tmp_path / "text.txt").write_text("".join(lines[:500] * 4 + lines[500:]))
    parts = ["--set", "data.validation=0.2", "--set", "data.test=0.2"]
    assert gptmini(*TRAIN, *parts)[0] == 0
    test, validation = (
        json.loads(gptmini("evaluate", "--split", split, "--json")[1])
        for split in ("test", "validation")
    )
    assert test["compressors"]["xz"] < 0.1
    assert validation["compressors"]["xz"] > 3
    if find_spec("gptmini.extras"):
        assert test["copied"] > 0.9
        assert validation["copied"] < 0.1


def test_evaluate_says_how_far_to_trust_its_interval(trained):
    """None of a few windows, a rough one below 50."""
    for lines, expected in [(1, ""), (4, "rough"), (20, "±")]:
        Path("other.txt").write_text("".join(f"{n}. some words\n" for n in range(10 * lines)))
        windows = json.loads(trained("evaluate", "--data", "other.txt", "--json")[1])["windows"]
        words = trained("evaluate", "--data", "other.txt")[1]
        found = "rough" if "(rough)" in words else "±" if "±" in words else ""
        assert found == expected, windows
        assert found == ("" if windows < 20 else "rough" if windows < 50 else "±")


def test_evaluate_takes_other_text_strides_and_precisions(trained, tmp_path):
    def facts(*words: str) -> dict:
        code, out, err = trained("evaluate", *words, "--json")
        assert code == 0, err
        return json.loads(out)

    (tmp_path / "other.txt").write_text("ab")
    assert facts("--data", "other.txt")["bytes"] == 2
    assert facts("--data", "text.txt")["bytes"] == Path("text.txt").stat().st_size
    plain, often = facts(), facts("--stride", "4")
    assert plain["tokens"] == often["tokens"]
    assert plain["loss"] != often["loss"]
    assert facts("--weights", "int8")["loss"] == pytest.approx(plain["loss"], abs=0.05)
    assert facts("--batch-size", "1")["loss"] == pytest.approx(plain["loss"], rel=1e-6)


def test_a_text_that_the_run_was_trained_on_is_not_measured_without_a_warning(trained):
    Path("book").mkdir()
    Path("book/a.txt").symlink_to(Path("text.txt").resolve())
    Path("other.txt").write_text("ab")
    shutil.copy("text.txt", "copy.txt")
    texts = {"./text.txt": True, "book": True, "copy.txt": True, "other.txt": False}
    for text, is_own in texts.items():
        code, _, err = trained("evaluate", "--data", text)
        warning = f"warning: {text}: runs/a was trained on it, so this looks better than it"
        assert (code, warning in err) == (0, is_own), err


def test_evaluate_refuses_long_strides_other_text_and_missing_runs(trained, text_file):
    code, _, err = trained("evaluate", "--stride", "17")
    assert (code, "--stride 17: longer than the window of 16 tokens" in err) == (2, True)
    text_file.write_text("something else altogether, " * 40)
    code, _, err = trained("evaluate")
    said = (
        "the text has changed since runs/a began; restore it, or give a text that it has not read"
    )
    assert (code, said in err) == (3, True)
    text_file.unlink()
    code, _, err = trained("evaluate")
    assert (code, "text.txt" in err) == (3, True)
    code, _, err = trained("evaluate", "runs/none")
    assert (code, "no run here" in err) == (4, True)


def test_weights_that_are_not_finite_are_refused_wherever_they_are_read(trained):
    """A NaN would otherwise be the best of all losses, with an accuracy of 100 %."""
    directory = RunDirectory(Path("runs/a"))
    for step in directory.list_steps():
        checkpoint = directory.load_checkpoint(step, with_optimizer=True)
        checkpoint.model["blocks.0.attn_norm.weight"][0] = float("nan")
        directory.save(checkpoint, keep=99)
    for words in (
        ["evaluate", "runs/a", "--json"],
        ["generate", "runs/a", "--prompt", "a"],
        ["score", "runs/a", "--text", "abc"],
        ["inspect", "runs/a", "--prompt", "abc"],
        ["train", "--from", "runs/a", "--data", "text.txt", "--out", "runs/b"],
    ):
        code, out, err = trained(*words)
        assert code == 4, (words, out, err)
        assert "blocks.0.attn_norm.weight" in err
        assert "NaN" not in out
