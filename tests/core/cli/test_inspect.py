"""`gptmini inspect`: numbers."""

from pathlib import Path

import pytest

from tests.support import SMALL


def test_inspect_prints_numbers(gptmini, text_file: Path):
    assert gptmini("train", "--data", str(text_file), "--attention", "gqa:2", *SMALL)[0] == 0
    code, out, err = gptmini("inspect", "--prompt", "the fox")
    assert (code, err) == (0, "runs/text-gqa2: step 4\nas a page to explore: --out FILE.html\n")
    assert [line.split()[:2] for line in out.splitlines()[1:5]] == [["0", n] for n in "0123"]
    for words, line in [
        ([], "--prompt: missing"),
        (["--prompt", "x" * 99], "--prompt: 99 tokens; give between 1 and 16"),
        (["--prompt", "x", "--layer", "1"], "--layer 1: this model has layers 0 to 0"),
        (["--prompt", "x", "--head", "-1"], "--head -1: this model has heads 0 to 3"),
        (["--mask", "window:0"], "--mask window:0: unknown mask"),
        (["--mask", "causal", "--prompt", "x"], "--prompt: does not work with --mask"),
        (["runs/text-gqa2", "--mask", "causal"], "RUN: does not work with --mask"),
        (["--prompt", "x", "--size", "9"], "--size: works only with --mask"),
    ]:
        code, _, err = gptmini("inspect", *words)
        assert (code, err.count("\n")) == (2, 1)
        assert line in err
    assert gptmini("inspect", "--mask", "window:2")[1].startswith("x . .")
    assert gptmini("inspect", "--mask", "causal", "--size", "24")[1].count("\n") == 24 + 2


def test_only_a_picture_of_its_own_is_replaced(gptmini):
    pytest.importorskip("matplotlib")
    pytest.importorskip("gptmini.extras.plots")
    for suffix in ("png", "pdf", "svg"):
        Path(f"mine.{suffix}").write_text("a photo")
        for name, expected in [("mask", 0), ("mask", 0), ("mine", 2)]:
            out = f"{name}.{suffix}"
            code, _, err = gptmini("inspect", "--mask", "causal", "--size", "3", "--out", out)
            assert (code, "did not write" in err) == (expected, expected == 2)
        assert Path(f"mine.{suffix}").read_text() == "a photo"
