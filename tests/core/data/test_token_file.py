import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptmini.config.settings import DataConfig
from gptmini.data import sources
from gptmini.data import token_file as token_files
from gptmini.data.token_file import (
    MIXTURE_CYCLE_WINDOWS,
    Corpus,
    TokenFile,
    apportion,
    count_windows,
)
from gptmini.errors import DataError
from gptmini.tokenizer.chunks import TextChunk
from gptmini.tokenizer.tokenizers import ByteTokenizer, CharTokenizer

BYTES = ByteTokenizer()


def write(path: Path, chunks: Iterator[TextChunk], digest: str = "00" * 32) -> None:
    """Write the bytes of a text as a token file."""
    output = token_files.TokenOutput(path, digest)
    token_files.write_token_file(output, chunks, BYTES, lambda count: None)


@pytest.fixture
def token_file(text_file: Path, tmp_path: Path, monkeypatch) -> Path:
    """The tokens of the small text, hashed in small blocks."""
    monkeypatch.setattr(token_files, "HASH_BLOCK_BYTES", 512)
    path = tmp_path / "a.tokens"
    source = sources.find_source([str(text_file)], DataConfig())
    write(path, source.iter_chunks(), source.digest)
    return path


def test_tokens_are_read_by_position(token_file: Path, text_file: Path):
    tokens = TokenFile(token_file, BYTES)
    expected = [256, *text_file.read_bytes()]
    assert len(tokens) == len(expected)
    assert tokens.text_bytes == text_file.stat().st_size
    for start, count in [(0, len(expected)), (0, 1), (250, 20), (len(expected) - 1, 1), (5, 0)]:
        assert tokens.read(start, count).tolist() == expected[start : start + count]


def test_documents_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_files.chunks, "TEXT_BLOCK_SIZE", 4)  # several batches
    path = tmp_path / "a.tokens"
    texts = [("one", True), (" and more", False), ("two", True), ("", True)]
    pieces = (TextChunk(*each) for each in texts)
    write(path, pieces)
    assert TokenFile(path, BYTES).documents == 3


def test_the_first_document_of_a_file_has_no_text_before_it(tmp_path: Path):
    files = []
    for count in (1, 3, 0):
        path = tmp_path / f"{count}.tokens"
        write(path, iter([TextChunk("text", True)] * count))
        files.append(TokenFile(path, BYTES))
    inner = [file.read(0, len(file)).tolist()[1:].count(256) for file in files]
    assert inner == [0, 2, 0]
    for file, expected in zip(files, inner, strict=True):
        assert Corpus("", BYTES, [file], [], [], "").inner_document_count == expected
    assert Corpus("", BYTES, files, files, [], "").inner_document_count == 2


def test_several_files_are_written_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_files.chunks, "TEXT_BLOCK_SIZE", 4)  # several batches
    texts = [("a", "one", True), ("b", "two", True), ("a", " more", False), ("c", "é", True)]
    labeled = ((label, TextChunk(text, starts)) for label, text, starts in texts)
    outputs = {
        label: token_files.TokenOutput(tmp_path / f"{label}.tokens", f"{number:064x}")
        for number, label in enumerate("abcd")
    }
    encoded: list[int] = []
    token_files.write_token_files(outputs, labeled, BYTES, encoded.append)
    assert sum(encoded) == len("onetwo more") + 2
    for label, text in {"a": "one more", "b": "two", "c": "é"}.items():
        tokens = TokenFile(tmp_path / f"{label}.tokens", BYTES)
        assert tokens.read(0, len(tokens)).tolist() == [256, *text.encode()]
        assert tokens.text_bytes == len(text.encode())
        assert tokens.documents == 1
    assert len(TokenFile(tmp_path / "d.tokens", BYTES)) == 0


def test_of_several_files_none_appears_if_one_fails(tmp_path: Path):
    def fail_after(chunk: TextChunk) -> Iterator[tuple[str, TextChunk]]:
        yield "a", chunk
        raise DataError("changed")

    outputs = {label: token_files.TokenOutput(tmp_path / label, "00" * 32) for label in "ab"}
    with pytest.raises(DataError, match="changed"):
        token_files.write_token_files(
            outputs, fail_after(TextChunk("one", True)), BYTES, lambda count: None
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", [0, 1 << 30])
def test_every_flipped_bit_and_every_truncation_is_detected(token_file: Path, monkeypatch, at_once):
    """Small files are checked at once, large ones where they are read."""
    monkeypatch.setattr(token_files, "CHECK_ON_OPEN_MAX_BYTES", at_once)
    whole = token_file.read_bytes()
    damages = [whole[:cut] for cut in range(0, len(whole), 97)] + [whole + b"x"]
    for byte in range(0, len(whole), 41):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << byte % 8
        damages.append(bytes(flipped))
    harmless = range(56, 88)  # the SHA-256 of the content, which only names the file
    for damage in damages:
        token_file.write_bytes(damage)
        if len(damage) == len(whole) and damage[harmless.start] != whole[harmless.start]:
            continue
        changed = [at for at, (a, b) in enumerate(zip(damage, whole, strict=False)) if a != b]
        if changed and changed[0] in harmless:
            continue
        with pytest.raises(DataError, match=str(token_file)):
            tokens = TokenFile(token_file, BYTES)
            assert at_once == 0
            tokens.read(0, len(tokens))
    token_file.write_bytes(whole)
    tokens = TokenFile(token_file, BYTES)
    tokens.read(0, len(tokens))


def test_a_large_file_is_checked_where_it_is_read(token_file: Path, monkeypatch):
    monkeypatch.setattr(token_files, "CHECK_ON_OPEN_MAX_BYTES", 0)
    with token_file.open("r+b") as file:
        file.seek(token_files.HEADER.size + 1024)
        file.write(b"\7")
    tokens = TokenFile(token_file, BYTES)
    assert len(tokens.read(0, 512)) == 512  # two blocks before the damage
    assert len(tokens.read(768, 100)) == 100
    with pytest.raises(DataError, match="damaged after byte 1024 of its tokens; delete it"):
        tokens.read(500, 20)


def test_a_file_truncated_while_in_use_is_reported(token_file: Path):
    tokens = TokenFile(token_file, BYTES)
    os.truncate(token_file, token_files.HEADER.size + 20)
    assert len(tokens.read(0, 10)) == 10
    with pytest.raises(DataError, match=r"truncated while in use \(10 of 20 bytes at byte"):
        tokens.read(5, 10)


def test_another_tokenizer_or_kind_of_file_is_refused(token_file: Path, tmp_path: Path):
    with pytest.raises(DataError, match="another tokenizer"):
        TokenFile(token_file, CharTokenizer("é"))
    (tmp_path / "other").write_bytes(b"x" * 200)
    with pytest.raises(DataError, match="not a gptmini token file"):
        TokenFile(tmp_path / "other", BYTES)
    whole = token_file.read_bytes()
    token_file.write_bytes(whole[:8] + struct.pack("<I", 1) + whole[12:])
    with pytest.raises(DataError, match="version 1"):
        TokenFile(token_file, BYTES)


def test_a_token_outside_the_vocabulary_is_reported(token_file: Path):
    tokens = TokenFile(token_file, BYTES)
    tokens.vocab_size = 122  # as if y and z were none
    place = token_file.read_bytes()[token_files.HEADER.size :: 2].index(b"z")
    with pytest.raises(DataError, match=f"token {place} is 122, not below 122"):
        tokens.read(place - 1, 3)


def test_positions_need_64_bits(tmp_path: Path, monkeypatch):
    """The end of a sparse file of five billion tokens."""
    monkeypatch.setattr(token_files, "HASH_BLOCK_BYTES", 1 << 33)
    monkeypatch.setattr(token_files, "CHECK_ON_OPEN_MAX_BYTES", 0)
    count = 5_000_000_000
    path = tmp_path / "large.tokens"
    table = bytes(64)
    root = hashlib.sha256(table).digest()
    print_ = bytes.fromhex(BYTES.fingerprint)
    sizes = (token_files.VERSION, 2, count, count, 1)
    header = token_files.HEADER.pack(token_files.MAGIC, *sizes, print_, bytes(32), root)
    with path.open("wb") as file:
        file.write(header)
        file.seek(token_files.HEADER.size + 2 * count - 6)
        file.write(np.array([7, 8, 9], "<u2").tobytes() + table)
    tokens = TokenFile(path, BYTES)
    tokens._unchecked.clear()
    assert len(tokens) == count
    assert tokens.read(count - 4, 4).tolist() == [0, 7, 8, 9]


@pytest.mark.parametrize(("vocab_size", "size"), [(257, 2), (65536, 2), (65537, 4), (200_000, 4)])
def test_token_types_hold_the_largest_token(vocab_size, size):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    dtype = token_files.get_token_dtype(tokenizer)
    assert dtype.itemsize == size
    assert dtype.type(vocab_size - 1) == vocab_size - 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    texts=st.lists(st.text("ab", min_size=1, max_size=40), min_size=1),
    block=st.integers(1, 40),
    batch=st.integers(1, 60),
)
def test_the_blocks_of_a_file_do_not_depend_on_how_its_text_comes(tmp_path, texts, block, batch):
    path = tmp_path / "a.tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "HASH_BLOCK_BYTES", block)
        patch.setattr(token_files.chunks, "TEXT_BLOCK_SIZE", batch)
        write(path, (TextChunk(text, number == 0) for number, text in enumerate(texts)))
    tokens = b"".join(bytes([byte, 0]) for byte in "".join(texts).encode())
    tokens = b"\0\1" + tokens  # after the document token, 256
    blocks = [tokens[start : start + block] for start in range(0, len(tokens), block)]
    table = b"".join(hashlib.sha256(each).digest() for each in blocks)
    assert path.read_bytes()[token_files.HEADER.size :] == tokens + table


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), total=st.integers(40, 5000))
def test_shares_are_whole_positive_and_near_the_weights(weights, total):
    parts = apportion(weights, total)
    assert sum(parts) == total
    assert min(parts) >= 1
    for part, weight in zip(parts, weights, strict=True):
        exact = weight / sum(weights) * total
        if exact >= 1:
            assert exact - len(weights) < part < exact + 1
        else:
            assert part == 1


@pytest.mark.parametrize(
    ("weights", "total", "shares"),
    [
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([1.0, 1.0, 1.3], 13, [4, 4, 5]),  # of 3.94, 3.94 and 5.12
        ([1, 3], 1000, [250, 750]),
        ([99, 1], 1000, [990, 10]),
        ([1000, 1], 1000, [999, 1]),
        ([1e-9, 1.0], 1000, [1, 999]),
        ([1e-9, 1e-9, 0.3, 0.7], 10, [1, 1, 3, 5]),  # the largest gives
    ],
)
def test_what_is_left_goes_to_the_largest_remainders(weights, total, shares):
    assert apportion(weights, total) == shares


def test_windows_fit_from_any_first_position():
    for length in range(2, 60):
        for seq_len in range(1, min(length, 20)):
            count = count_windows(range(length), seq_len)
            # The last first position is seq_len - 1; one more token is the last window's target.
            fitting = [n for n in range(length) if seq_len - 1 + n * seq_len + 1 <= length]
            assert count == max(1, *fitting)
            offsets = min(seq_len, length - count * seq_len)
            assert offsets >= 1
            assert offsets - 1 + count * seq_len + 1 <= length


def test_epochs_are_those_of_the_most_visited_text():
    texts = [range(500), range(1000)]
    corpus = Corpus("a", BYTES, texts, [], [], "")
    assert corpus.count_epochs(10, 20, 200, [1.0, 1.0]) == pytest.approx(4000 * 0.5 / 49, rel=0.01)
    assert corpus.count_epochs(10, 20, 200, [1.0, 99.0]) == pytest.approx(
        4000 * 0.99 / 99, rel=0.01
    )
    alone = Corpus("a", BYTES, texts[:1], [], [], "")
    assert (
        alone.count_epochs(10, 20, 200, None)
        == 200 * 20 * MIXTURE_CYCLE_WINDOWS / MIXTURE_CYCLE_WINDOWS / 49
    )


def test_token_files_load_no_file_formats():
    check = (
        "import sys, gptmini.data.token_file as t; sys.exit('gptmini.data.formats' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
