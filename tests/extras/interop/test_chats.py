"""Conversations become the tokens that transformers makes of them, in training and in prompts."""

import json
import random
from pathlib import Path

import pytest

from gptmini.data.chats import IGNORED, ChatEncoder
from gptmini.extras.interop.export import export_run
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.chunks import Place
from tests.samples import CHAT_TOKENIZER, run_of
from tests.support import prose

SYSTEM = {"role": "system", "content": "Be brief"}


def test_tokens_are_those_that_transformers_makes(tmp_path):
    """Where answers begin with a word; a prompt ends before it when generating."""
    transformers = pytest.importorskip("transformers")
    run = run_of(tmp_path / "run", CHAT_TOKENIZER)
    export_run(run.path, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    draw = random.Random(3)
    words = prose(400).split()
    for _ in range(20):
        messages = [SYSTEM] if draw.random() < 0.5 else []
        for _ in range(draw.randrange(1, 4)):
            for role in ("user", "assistant"):
                content = " ".join(draw.choices(words, k=draw.randrange(1, 9)))
                messages.append({"role": role, "content": content})
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        learned = ChatEncoder(CHAT_TOKENIZER).encode(messages, Place("a.jsonl", 1))
        assert (learned & ~IGNORED)[1:].tolist() == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_prompt_ends_with_the_token_that_transformers_puts_there(tmp_path: Path, gptmini):
    transformers = pytest.importorskip("transformers")
    spaced = json.loads(CHAT_TOKENIZER.to_json())
    spaced["chat_template"] += "{% if add_generation_prompt %}Say: {% endif %}"
    run = run_of(tmp_path / "run", BpeTokenizer.from_dict(spaced))
    assert gptmini("export", "run", "--out", "there")[0] == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    messages = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert run.encode_chat(messages) == expected["input_ids"]
    assert run.tokenizer.decode_token(expected["input_ids"][-1]) == b" "
