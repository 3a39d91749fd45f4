import socket
from pathlib import Path

import pytest
import tiktoken

from gptmini.errors import DataError
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from tests.support import WORDS, bpe_file


def test_a_learned_vocabulary_encodes_any_text(tmp_path: Path):
    tokenizer = create_tokenizer("bpe", 300, [WORDS * 3])
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(WORDS)) < len(WORDS) / 2
    assert tokenizer.decode(tokenizer.encode("東京 <|endoftext|>\n")) == "東京 <|endoftext|>\n"
    path = tmp_path / "t.json"
    path.write_text(tokenizer.to_json())
    assert create_tokenizer(str(path), None, ()).fingerprint == tokenizer.fingerprint


def test_unknown_kinds_list_the_known():
    with pytest.raises(
        DataError, match=r"gpt3: no such tokenizer; choose one of auto, byte, char, bpe.*gpt2"
    ):
        create_tokenizer("gpt3", None, ())


def test_without_network_the_offline_kinds_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"gpt2: .*use byte, char or bpe"):
        create_tokenizer("gpt2", None, ())


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"format": 2, "kind": "byte"}',
        '{"format": 1, "kind": "gpt2", "ranks": 3}',
        bpe_file(ranks={"YQ==": 97}),  # not every byte has a rank
        bpe_file(special_tokens={"<|endoftext|>": 97}),
        bpe_file(special_tokens={}),
        bpe_file(pattern="("),
        bpe_file(ends=["<|im_end|>"]),
        bpe_file(chat_template=3),
    ],
)
def test_a_damaged_tokenizer_file_is_reported(tmp_path: Path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=str(path)):
        load_tokenizer(path)
