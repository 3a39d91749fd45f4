import json
import os
import socket
from pathlib import Path

import pytest
import tiktoken
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st

from gptmini import tokenizer as tokenizers
from gptmini.errors import DataError
from gptmini.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, StreamDecoder

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
    assert [sorted(set(text)).index(c) for c in text] == tokens.tolist()
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("text", ["adx", "é", "\x00", "z" * 9])
def test_an_unseen_character_is_named(text):
    tokenizer = CharTokenizer("abcd")
    unseen = next(c for c in text if c not in "abcd")
    with pytest.raises(DataError, match=rf"U\+{ord(unseen):04X}.*4 characters"):
        tokenizer.encode(text)


def test_bpe_round_trips_and_keeps_special_text_as_text(tiny_encoding: tiktoken.Encoding):
    tokenizer = BpeTokenizer(tiny_encoding)
    for text in ["the thermos", "<|endoftext|>", "naïve 東京", ""]:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.document_token not in tokens
    assert tokenizer.encode("the").tolist() == [257]


def test_bpe_takes_a_million_spaces(tiny_encoding: tiktoken.Encoding):
    tokenizer = BpeTokenizer(tiny_encoding)
    text = " " * 1_000_000 + "the " + "x" * 250_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_agrees_with_published_tokens(monkeypatch: pytest.MonkeyPatch):
    folder = SHARED / "data" / "tiktoken-cache"
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        if not folder.is_dir():
            pytest.skip("no folder with the gpt2 files; name one in TIKTOKEN_CACHE_DIR")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    tokenizer = tokenizers.create("gpt2", [])
    assert tokenizer.vocab_size == 50257
    assert tokenizer.document_token == 50256
    # "hello world" in the documentation of tiktoken, the prompt of GPT-2's own paper page
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    text = "It's naïve: <|endoftext|> 東京 \n\n\t  def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def make_all(encoding: tiktoken.Encoding) -> list[tokenizers.Tokenizer]:
    return [ByteTokenizer(), CharTokenizer("abé東"), BpeTokenizer(encoding)]


def test_saved_tokenizers_are_the_same_when_read(tmp_path: Path, tiny_encoding: tiktoken.Encoding):
    for tokenizer in make_all(tiny_encoding):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json())
        again = tokenizers.read(path)
        assert again.fingerprint() == tokenizer.fingerprint()
        assert again.encode("abé東").tolist() == tokenizer.encode("abé東").tolist()
    assert len({t.fingerprint() for t in make_all(tiny_encoding)}) == 3


def test_byte_lengths_add_up_to_the_text(tiny_encoding: tiktoken.Encoding):
    text = "abé東"
    for tokenizer in make_all(tiny_encoding):
        lengths = tokenizer.byte_lengths()
        assert lengths[tokenizer.document_token] == 0
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


@given(st.binary())
def test_streaming_gives_the_bytes_of_the_whole_wherever_it_is_cut(data):
    decoder = StreamDecoder(ByteTokenizer())
    pieces = [decoder.feed(byte) for byte in data]
    assert "".join(pieces) + decoder.flush() == data.decode("utf-8", "replace")


def test_a_character_in_two_tokens_appears_once_and_whole():
    decoder = StreamDecoder(ByteTokenizer())
    assert [decoder.feed(byte) for byte in "é!".encode()] == ["", "é", "!"]


def test_unknown_kinds_list_the_known():
    with pytest.raises(DataError, match=r"gpt3: no such tokenizer; known: byte, char.*gpt2"):
        tokenizers.create("gpt3", [])


def test_without_network_the_offline_choices_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"gpt2: .*use byte or char"):
        tokenizers.create("gpt2", [])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"format": 2, "kind": "byte"}',
        '{"format": 1, "kind": "gpt2", "ranks": 3}',
        '{"format": 1, "kind": "x", "pattern": "", "special_tokens": {}, "ranks": {"%": 1}}',
    ],
)
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=str(path)):
        tokenizers.read(path)


def test_tokenizer_json_is_json():
    assert json.loads(CharTokenizer("ba").to_json()) == {
        "format": 1,
        "kind": "char",
        "characters": "ab",
    }
