import base64
import json
import os
import socket
from pathlib import Path

import pytest
import regex
import tiktoken
from conftest import WORDS, gpt2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from gptmini.errors import DataError
from gptmini.text import bpe
from gptmini.text import tokenizer as tokenizers
from gptmini.text.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer

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
    assert [tokenizer.token_bytes(token).decode() for token in tokens.tolist()] == list(text)


@given(TEXTS, TEXTS)
def test_unseen_characters_are_split_into_bytes(seen, text):
    tokenizer = CharTokenizer(seen)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    known = set(seen) | {chr(point) for point in range(128)}
    assert len(tokens) == sum(1 if c in known else len(c.encode()) for c in text)
    assert tokenizer.document_token not in tokens


def test_bpe_round_trips_and_keeps_special_text_as_text(tiny_encoding: tiktoken.Encoding):
    tokenizer = BpeTokenizer(tiny_encoding)
    for text in ["the thermos", "<|endoftext|>", "naïve 東京", ""]:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.document_token not in tokens
    assert tokenizer.encode("the").tolist() == [257]


def test_bpe_takes_a_million_spaces(tiny_encoding: tiktoken.Encoding):
    text = " " * 1_000_000 + "the " + "x" * 250_000
    for tokenizer in (BpeTokenizer(tiny_encoding), tokenizers.create("bpe", 300, [WORDS])):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_agrees_with_published_tokens():
    tokenizer = gpt2()
    assert tokenizer.vocab_size == 50257
    assert tokenizer.document_token == 50256
    # "hello world" in the documentation of tiktoken, the prompt of GPT-2's own paper page
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    text = "It's naïve: <|endoftext|> 東京 \n\n\t  def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS | st.text("ab1 \n\t.,'é東\u00a0\u2003!s/", max_size=200))
@pytest.mark.parametrize("kind", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base", "bpe"])
def test_a_text_cut_at_a_boundary_has_the_tokens_of_the_whole(monkeypatch, kind, text):
    if kind == "bpe":
        pattern = bpe.PATTERN
    else:  # the pattern is all that matters here, and needs no download
        monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *a, **k: {})
        monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *a, **k: {})
        pattern = getattr(openai_public, kind)()["pat_str"]
    whole = regex.findall(pattern, text)
    for limit in range(1, len(text)):
        cut = tokenizers.boundary(text, limit)
        assert 0 < cut <= limit
        if text[cut] == " " and text[cut - 1].isalnum():
            assert regex.findall(pattern, text[:cut]) + regex.findall(pattern, text[cut:]) == whole


def test_long_texts_are_encoded_in_parts(tiny_encoding: tiktoken.Encoding, monkeypatch):
    tokenizer = BpeTokenizer(tiny_encoding)
    text = WORDS * 20
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr(tokenizers, "BLOCK", 50)
    assert tokenizer.encode(text).tolist() == whole
    assert tokenizer.encode("").tolist() == []


def test_a_learned_vocabulary_encodes_any_text(tmp_path: Path):
    tokenizer = tokenizers.create("bpe", 300, [WORDS * 3])
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(WORDS)) < len(WORDS) / 2
    assert tokenizer.decode(tokenizer.encode("東京 <|endoftext|>\n")) == "東京 <|endoftext|>\n"
    path = tmp_path / "t.json"
    path.write_text(tokenizer.to_json())
    assert tokenizers.create(str(path), None, ()).fingerprint == tokenizer.fingerprint


def make_all(encoding: tiktoken.Encoding) -> list[tokenizers.Tokenizer]:
    return [ByteTokenizer(), CharTokenizer("abé東"), BpeTokenizer(encoding)]


def test_saved_tokenizers_load_unchanged(tmp_path: Path, tiny_encoding: tiktoken.Encoding):
    for tokenizer in make_all(tiny_encoding):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json())
        again = tokenizers.read(path)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode("abé東").tolist() == tokenizer.encode("abé東").tolist()
    assert len({t.fingerprint for t in make_all(tiny_encoding)}) == 3


def test_byte_lengths_add_up_to_the_text(tiny_encoding: tiktoken.Encoding):
    text = "abé東"
    for tokenizer in make_all(tiny_encoding):
        lengths = tokenizer.byte_lengths()
        assert lengths[tokenizer.document_token] == 0
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_ends_and_chat_template_are_kept_and_do_not_change_the_tokens(tmp_path: Path):
    special = {"<|endoftext|>": 256, "<|im_end|>": 257}
    files = []
    for more in ({}, {"ends": ["<|im_end|>", "<|endoftext|>"], "chat_template": "{{ messages }}"}):
        (tmp_path / "t.json").write_text(bpe_file(special_tokens=special, **more))
        files.append(tokenizers.read(tmp_path / "t.json"))
    plain, chat = files
    assert (plain.end_tokens, plain.chat_template) == ([256], None)
    assert (chat.end_tokens, chat.chat_template) == ([257, 256], "{{ messages }}")
    assert plain.fingerprint == chat.fingerprint  # one may guess for the other
    (tmp_path / "t.json").write_text(chat.to_json())
    again = tokenizers.read(tmp_path / "t.json")
    assert (again.end_tokens, again.chat_template) == ([257, 256], "{{ messages }}")


def test_unknown_kinds_list_the_known():
    with pytest.raises(
        DataError, match=r"gpt3: no such tokenizer; choose one of auto, byte, char, bpe.*gpt2"
    ):
        tokenizers.create("gpt3", None, ())


def test_without_network_the_offline_kinds_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"gpt2: .*use byte, char or bpe"):
        tokenizers.create("gpt2", None, ())


def bpe_file(**changes: object) -> str:
    """The JSON of a BPE tokenizer of bytes, with some things changed."""
    ranks = {base64.b64encode(bytes([byte])).decode(): byte for byte in range(256)}
    special = {"<|endoftext|>": 256}
    whole = {"format": 1, "kind": "x", "pattern": "a|.", "special_tokens": special, "ranks": ranks}
    return json.dumps(whole | changes)


def test_a_bpe_file_is_read(tmp_path: Path):
    (tmp_path / "t.json").write_text(bpe_file())
    assert tokenizers.read(tmp_path / "t.json").encode("abc").tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"format": 2, "kind": "byte"}',
        '{"format": 1, "kind": "gpt2", "ranks": 3}',
        '{"format": 1, "kind": "x", "pattern": "", "special_tokens": {}, "ranks": {"%": 1}}',
        bpe_file(ranks={"YQ==": 97}),  # not every byte has a rank
        bpe_file(special_tokens={"<|endoftext|>": 97}),
        bpe_file(special_tokens={}),
        bpe_file(special_tokens={"<|endoftext|>": 2_000_000_000}),
        bpe_file(pattern="("),
        bpe_file(kind="imported", ranks={"YQ==": 97, "YWI=": 98}),  # "ab", but no "b"
        bpe_file(ends=["<|im_end|>"]),
        bpe_file(document="<s>"),
        bpe_file(chat_template=3),
        bpe_file(kind=None),
    ],
)
def test_a_damaged_tokenizer_file_is_reported(tmp_path: Path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=str(path)):
        tokenizers.read(path)


def test_a_fifo_is_not_a_tokenizer_file(tmp_path: Path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer.json: not a regular file; give a run"):
        tokenizers.read(tmp_path / "tokenizer.json")


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


def test_a_pattern_that_backtracks_forever_is_one_error(tmp_path: Path):
    (tmp_path / "t.json").write_text(bpe_file(pattern=r"((a|aa)+)(?!x)b|."))
    tokenizer = tokenizers.read(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"tokenizer x: .*backtracking.*; choose another"):
        tokenizer.encode("a" * 70)


@pytest.mark.parametrize(
    ("tokens", "vocab_size"), [(0, 512), (500_000, 512), (1_200_000, 1024), (10**8, 4096)]
)
def test_few_tokens_get_a_small_vocabulary(tokens, vocab_size):
    assert tokenizers.choose("auto", 10**7, 192, tokens) == ("bpe", vocab_size)
    assert tokenizers.choose("auto", 30_000, 192, tokens) == ("byte", None)


@pytest.mark.parametrize(
    ("text_bytes", "d_model", "expected"),
    [
        (0, 192, ("byte", None)),
        (30_000, 192, ("byte", None)),
        (100_000, 192, ("bpe", 1024)),
        (500_000, 192, ("bpe", 4096)),
        (10**12, 192, ("bpe", 4096)),
        (10**12, 64, ("bpe", 1024)),
        (10**12, 768, ("bpe", 16384)),
        (10**12, 10**6, ("bpe", 32768)),
    ],
)
def test_the_vocabulary_fits_text_and_model(text_bytes, d_model, expected):
    assert tokenizers.choose("auto", text_bytes, d_model, 10**12) == expected
    assert tokenizers.choose("auto", text_bytes, d_model) == expected
    kind, vocab_size = tokenizers.choose("bpe", text_bytes, d_model)
    assert (kind, vocab_size) == ("bpe", expected[1] or 512)
