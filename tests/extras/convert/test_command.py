"""`gptmini convert` prints the command that trains further."""

from pathlib import Path

import pytest

from tests.support import SMALL

TRAIN = ["train", "--data", "text.txt", *SMALL]


@pytest.fixture
def trained(gptmini, text_file: Path):
    assert gptmini(*TRAIN, "--out", "runs/a")[0] == 0
    return gptmini


def test_convert_prints_the_command_that_trains_further(trained):
    code, _, err = trained("convert", "runs/a", "--attention", "gqa:2")
    assert code == 0
    words = err.splitlines()[-1].split()
    assert words == ["gptmini", "train", "runs/a-gqa2/config.yaml", "--out", "runs/a-gqa2"]
    assert trained("evaluate", "runs/a-gqa2")[0] == 0  # as it was pooled
    code, _, err = trained(*words[1:])
    assert code == 0, err
    assert "4 heads / 2 KV heads (GQA)" in err
    assert "gptmini generate runs/a-gqa2 --prompt TEXT\n" in err  # few steps, but no noise
    code, _, err = trained("convert", "runs/a", "--attention", "window:8")
    assert (code, "runs/a-window8: window none -> 8, from step 4" in err) == (0, True)
    code, _, err = trained("convert", "runs/a-gqa2", "--attention", "window:8", "--out", "runs/b")
    assert (code, "runs/b: window none -> 8, from" in err) == (0, True)  # and two KV heads still
    code, _, err = trained("convert", "runs/a", "--attention", "gqa:2+window:8")
    assert (code, "KV heads 4 -> 2, window none -> 8, from" in err) == (0, True)
    code, _, err = trained("convert", "runs/a")
    assert (code, "--attention: missing" in err) == (2, True)
