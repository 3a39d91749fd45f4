import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer, create_bpe_tokenizer
from gptmini.tokenizer.load import load_tokenizer
from gptmini.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_bytes_round_trip_every_text(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert bytes(tokens.tolist()) == text.encode()
    assert tokenizer.decode(tokens) == text


@given(TEXTS)
def test_characters_round_trip_their_own_text(text):
    tokenizer = CharTokenizer(text)
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode_token(token).decode() for token in tokens.tolist()] == list(text)


@given(TEXTS, TEXTS)
def test_unseen_characters_are_split_into_bytes(seen, text):
    tokenizer = CharTokenizer(seen)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    known = set(seen) | {chr(point) for point in range(128)}
    assert len(tokens) == sum(1 if c in known else len(c.encode()) for c in text)
    assert tokenizer.eos_token_id not in tokens


@pytest.mark.parametrize("point", [0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF])
def test_unseen_characters_have_as_many_bytes_as_in_utf_8(point):
    text = f"a{chr(point)}\xe9"
    assert bytes(CharTokenizer("").encode(text).tolist()) == text.encode()


def make_all(encoding: tiktoken.Encoding) -> list[Tokenizer]:
    return [ByteTokenizer(), CharTokenizer("abé東"), BpeTokenizer(encoding)]


def test_saved_tokenizers_load_unchanged(tmp_path: Path, tiny_encoding: tiktoken.Encoding):
    for tokenizer in make_all(tiny_encoding):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json())
        again = load_tokenizer(path)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode("abé東").tolist() == tokenizer.encode("abé東").tolist()
    assert len({t.fingerprint for t in make_all(tiny_encoding)}) == 3


def test_byte_lengths_add_up_to_the_text(tiny_encoding: tiktoken.Encoding):
    text = "abé東"
    for tokenizer in make_all(tiny_encoding):
        lengths = tokenizer.compute_byte_lengths()
        assert lengths[tokenizer.eos_token_id] == 0
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_tokenizer_json_is_json():
    assert json.loads(CharTokenizer("üaéb").to_json()) == {
        "format": 1,
        "kind": "char",
        "characters": "éü",
    }


def test_half_a_character_is_refused(tiny_encoding: tiktoken.Encoding):
    for tokenizer in make_all(tiny_encoding):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a\ud800")


def test_special_tokens_are_read_by_name_the_longest_first(tiny_encoding: tiktoken.Encoding):
    special = {"<|endoftext|>": 259, "<|end": 260, "<|end|>": 261}
    ranks = tiny_encoding._mergeable_ranks
    tokenizer = create_bpe_tokenizer("tiny", tiny_encoding._pat_str, ranks, special)
    assert tokenizer.encode_special("the<|end|> the<|end<|endoftext|>").tolist() == [
        *[257, 261, 258, 260, 259]
    ]
    assert tokenizer.encode_special("").tolist() == []
    assert tokenizer.encode("<|end|>").max() < 259
