"""`gptmini evaluate`: its figures, its options, its refusals."""

import json
from pathlib import Path

import pytest

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
    assert rows["loss"].startswith(f"{facts['loss']:.4f} ± {facts['loss_error']:.4f} nats")
    assert rows["bits per byte"].startswith(f"{facts['bits_per_byte']:.4f} ± ")
    assert rows["text"] == f"{facts['tokens']:,} tokens, {facts['bytes']:,} bytes"
    assert 0 < facts["accuracy"] < 1


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


def test_evaluate_refuses_long_strides_other_text_and_missing_runs(trained, text_file):
    code, _, err = trained("evaluate", "--stride", "17")
    assert (code, "--stride 17: longer than the window of 16 tokens" in err) == (2, True)
    text_file.write_text("something else altogether, " * 40)
    code, _, err = trained("evaluate")
    assert (code, "not the text that runs/a was trained on" in err) == (3, True)
    text_file.unlink()
    code, _, err = trained("evaluate")
    assert (code, "text.txt" in err) == (3, True)
    code, _, err = trained("evaluate", "runs/none")
    assert (code, "no run here" in err) == (4, True)
