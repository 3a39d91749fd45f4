import os
from pathlib import Path

import pytest
from conftest import WORDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptmini import shards, tokenizer
from gptmini.errors import DataError, MachineError

DOCUMENT = 256


def tokens_of(corpus: shards.Corpus) -> list[int]:
    return corpus.tokens.read(0, len(corpus.tokens)).tolist()


def test_a_file_is_one_document(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("héllo\r\nwörld\n".encode())
    corpus = shards.prepare(str(path), "byte", tmp_path / "cache")
    assert tokens_of(corpus) == [DOCUMENT, *"héllo\r\nwörld\n".encode()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")))
def test_any_text_is_cut_into_pieces_and_whole_again(tmp_path: Path, monkeypatch, text):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(shards, "BLOCK", 7)
    pieces = list(shards.pieces(str(path)))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.starts_document for piece in pieces] == [True] * bool(text) + [False] * (
        len(pieces) - 1
    )


@pytest.mark.parametrize("name", shards.BUILTIN)
def test_builtin_corpora_are_many_documents(name, tmp_path: Path):
    pieces = list(shards.pieces(name))
    assert len(pieces) > 50
    assert all(piece.starts_document for piece in pieces)
    assert sum(len(piece.text) for piece in pieces) > 300_000


def test_the_cache_is_used_again_and_repaired(text_file: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    first = shards.prepare(str(text_file), "byte", cache)
    path = first.tokens.path
    whole, made = path.read_bytes(), path.stat().st_mtime_ns
    assert shards.prepare(str(text_file), "byte", cache).tokens.path == path
    assert path.stat().st_mtime_ns == made
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for damaged in (whole[:-1], whole + b"x", bytes(flipped), b"", b"x" * 200):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=str(path)):
            shards.TokenFile(path, first.tokenizer)
        shards.prepare(str(text_file), "byte", cache)
        assert path.read_bytes() == whole
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_other_text_or_tokenizer_is_another_cache_file(text_file: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    byte = shards.prepare(str(text_file), "byte", cache)
    char = shards.prepare(str(text_file), "char", cache)
    assert byte.tokens.path != char.tokens.path
    with pytest.raises(DataError, match="another tokenizer"):
        shards.TokenFile(byte.tokens.path, char.tokenizer)
    text_file.write_text(WORDS)
    assert shards.prepare(str(text_file), "byte", cache).tokens.path != byte.tokens.path


def test_a_token_file_cut_while_in_use_is_named(text_file: Path, tmp_path: Path):
    corpus = shards.prepare(str(text_file), "byte", tmp_path / "cache")
    os.truncate(corpus.tokens.path, shards.HEADER.size + 20)
    assert len(corpus.tokens.read(0, 10)) == 10
    with pytest.raises(DataError, match=r"cut while in use \(10 of 20 bytes at token 5\)"):
        corpus.tokens.read(5, 10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no text"),
        (b" \n\t ", "holds no text"),
        (b"x" * 100 + b"\xff", "byte 100 is not UTF-8"),
        (b"\xef\xbb\xbf" + b"x" * 10 + b"\xff", "byte 13 is not UTF-8"),
        (b"x" * (shards.BLOCK + 5) + b"\xc3", f"byte {shards.BLOCK + 5} is not UTF-8"),
        ("text".encode("utf-16"), "byte 0 is not UTF-8"),
        (b"text\0text", "NUL"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content, words):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        shards.prepare(str(path), "byte", tmp_path / "cache")
    assert str(path) in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_paths_that_are_no_files(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for path, words in [
        (tmp_path, "is a directory"),
        (tmp_path / "none.txt", "no such file"),
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/null"), "not a regular file"),
    ]:
        with pytest.raises(DataError, match=words):
            shards.prepare(str(path), "byte", tmp_path / "cache")
    with pytest.raises(DataError, match="known: builtin:python-docs"):
        shards.prepare("builtin:x", "byte", tmp_path)


def test_text_that_changes_meanwhile_leaves_nothing(text_file: Path, tmp_path: Path, monkeypatch):
    create = tokenizer.create

    def change_the_file(kind, texts):
        text_file.write_text("other words")
        return create(kind, texts)

    monkeypatch.setattr(tokenizer, "create", change_the_file)
    with pytest.raises(DataError, match="changed while it was read"):
        shards.prepare(str(text_file), "byte", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_option(text_file: Path):
    with pytest.raises(MachineError, match="--cache"):
        shards.prepare(str(text_file), "byte", text_file / "below-a-file")


@pytest.mark.parametrize(("vocab_size", "size"), [(257, 2), (65536, 2), (65537, 4), (200_000, 4)])
def test_token_types_hold_the_largest_token(vocab_size, size):
    dtype = shards.token_dtype(vocab_size)
    assert dtype.itemsize == size
    assert dtype.type(vocab_size - 1) == vocab_size - 1
