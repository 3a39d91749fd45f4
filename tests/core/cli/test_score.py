"""`gptmini score`: figures and JSON."""

import json

import pytest

from gptmini.cli import score as scoring
from gptmini.generate.score import Score
from gptmini.tokenizer.spelling import explain_labels


def test_score_prints_every_token_and_the_totals(gptmini, run):
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
    code, _, err = gptmini("score")
    assert (code, err.count("\n")) == (2, 1)


def test_the_parts_of_a_character_are_named_and_explained():
    spellings = [b"a", b"\xe4", b"\xb8\xad!", b"\xe6\x96\x87", b"\n"]
    found = Score(spellings, [1, 2, 3, 4, 5], [-0.1, -1.0, -1.9, -0.1, -0.1], [1, 2, 3, 4, 5], 9)
    assert "".join(scoring._format_table(found)).splitlines() == [
        "logprob   rank  token",
        " -0.100      1  a",
        " -1.000      2  中1/2",
        " -1.900      3  中2/2!",
        " -0.100      4  文",
        " -0.100      5  \\n",
        "中1/2: the first of 2 tokens that spell the character 中",
    ]


@pytest.mark.parametrize("spellings", [[b"a", b"\xe4"], [b"\xff", b"a"], [b"", b"a", b""]])
def test_every_token_is_listed_whatever_its_bytes(spellings):
    numbers = list(range(len(spellings)))
    found = Score(spellings, numbers, [-1.0 for _ in numbers], numbers, 3)
    table = "".join(scoring._format_table(found))
    legend = explain_labels(spellings)
    assert table.count("\n") == 1 + len(spellings) + len(legend)
