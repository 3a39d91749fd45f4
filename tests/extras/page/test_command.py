"""`gptmini inspect --out page.html` as it is typed."""

import json
from pathlib import Path

import pytest

from gptmini.tokenizer.spelling import spell_token
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import SMALL, data_of


def test_inspect_writes_a_page_of_prompt_and_continuation(gptmini, text_file: Path):
    assert gptmini("train", "--data", str(text_file), *SMALL)[0] == 0
    words = ["inspect", "--prompt", "the <b>", "--out", "a.html"]
    code, _, err = gptmini(*words, "--generate", "5", "--layer", "0", "--head", "2")
    assert (code, err) == (0, "runs/text: step 4\na.html: written\n")
    data = data_of(Path("a.html").read_bytes())
    assert data["title"] == "runs/text"
    assert data["lead"].endswith("It reads 12 tokens, the last 5 of which it generated itself.")
    (part,) = data["parts"]
    assert part["start"] == [0, 2]
    drawn = gptmini(
        *("generate", "--prompt", "the <b>", "--max-new-tokens", "5"),
        *("--weights", "float32", "--json"),
    )[1]
    tokens = [*b"the <b>", *json.loads(drawn)["samples"][0]["tokens"]]
    spelled = [part["spellings"][n] for n in part["tokens"]]
    assert spelled == [spell_token(ByteTokenizer(), token) for token in tokens]
    assert gptmini(*words)[0] == 0
    assert data_of(Path("a.html").read_bytes())["parts"][0]["drawn"] == 0


@pytest.mark.parametrize(
    ("words", "name"),
    [(["--prompt", "x" * 99], "--prompt"), (["--prompt", "x", "--generate", "16"], "--generate")],
)
def test_a_text_that_does_not_fit_the_context_is_refused(gptmini, run, words, name):
    code, _, err = gptmini("inspect", run, *words, "--out", "a.html")
    assert code == 2
    assert name in err
