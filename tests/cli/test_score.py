"""`gptmini score`: figures, JSON and colors."""

import json
import sys

import pytest

from gptmini.analysis.score import Score
from gptmini.cli import score as scoring


def test_score_prints_every_token_and_the_totals(gptmini, run, monkeypatch):
    code, out, err = gptmini("score", "--text", "the fox")
    assert (code, err) == (0, "runs/text, step 4\n")
    assert gptmini("score", run, "--text", "the fox") == (0, out, "")
    lines = out.splitlines()
    assert len(lines) == 1 + 7 + 1
    assert "7 tokens, 7 bytes: loss" in lines[-1]
    found = json.loads(gptmini("score", "--text", "the fox", "--json")[1])
    assert [row["text"] for row in found["scores"]] == list("the fox")
    assert found["loss"] == pytest.approx(-sum(row["logprob"] for row in found["scores"]) / 7)
    assert f"loss {found['loss']:.4f}" in lines[-1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert list(scoring._color_tokens(rebuild_score(found)))[-1] == "\n"
    code, _, err = gptmini("score")
    assert (code, err.count("\n")) == (2, 1)


def rebuild_score(found: dict) -> Score:
    rows = found["scores"]
    columns = ("text", "token", "logprob", "rank")
    return Score(*([row[name] for row in rows] for name in columns), found["bytes"])


def test_surprise_is_a_color():
    found = Score(["a", "b\nc", "\x1b"], [1, 2, 3], [-0.1, -9.0, -2.0], [1, 2, 3], 5)
    text = "".join(scoring._color_tokens(found))
    assert text == "a\x1b[48;5;124mb\x1b[0m\n\x1b[48;5;124mc\x1b[0m\x1b[48;5;58m\\x1b\x1b[0m\n"
