import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.config.settings import DataConfig
from gptmini.data import token_file as token_files
from gptmini.data.text import find_text
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


def write(path: Path, chunks: Iterator[TextChunk]) -> None:
    """Write the bytes of a text as a token file."""
    write_together({"": path}, (("", chunk) for chunk in chunks))


def write_together(paths: dict[str, Path], labeled: Iterator[tuple[str, TextChunk]]) -> int:
    """Write several token files; returns the bytes of text that progress was told of."""
    told: list[int] = []
    encoded = token_files.encode_chunks(labeled, BYTES, told.append)
    token_files.write_token_files(paths, encoded, BYTES)
    return sum(told)


@pytest.fixture
def token_file(text_file: Path, tmp_path: Path) -> Path:
    """The tokens of the small text."""
    path = tmp_path / "a.bin"
    write(path, find_text([str(text_file)], DataConfig()).iter_chunks())
    return path


def test_tokens_are_read_by_position(token_file: Path, text_file: Path):
    tokens = TokenFile(token_file, BYTES)
    expected = [256, *text_file.read_bytes()]
    assert len(tokens) == len(expected)
    assert tokens.text_bytes == text_file.stat().st_size
    for start, count in [(0, len(expected)), (0, 1), (250, 20), (len(expected) - 1, 1), (5, 0)]:
        assert tokens.read(start, count).tolist() == expected[start : start + count]


def test_the_first_document_of_a_file_has_no_text_before_it(tmp_path: Path):
    files = []
    for count in (1, 3, 0):
        path = tmp_path / f"{count}.bin"
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
    paths = {label: tmp_path / f"{label}.bin" for label in "abcd"}
    assert write_together(paths, labeled) == len("onetwo more") + 2
    for label, text in {"a": "one more", "b": "two", "c": "é"}.items():
        tokens = TokenFile(paths[label], BYTES)
        assert tokens.read(0, len(tokens)).tolist() == [256, *text.encode()]
        assert tokens.text_bytes == len(text.encode())
        assert tokens.documents == 1
    assert len(TokenFile(paths["d"], BYTES)) == 0


def test_of_several_files_none_appears_if_one_fails(tmp_path: Path):
    def fail_after(chunk: TextChunk) -> Iterator[tuple[str, TextChunk]]:
        yield "a", chunk
        raise DataError("changed")

    paths = {label: tmp_path / label for label in "ab"}
    with pytest.raises(DataError, match="changed"):
        write_together(paths, fail_after(TextChunk("one", True)))
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_and_every_truncation_is_detected(token_file: Path):
    for path in (token_file, token_file.with_suffix(".json")):
        whole = path.read_bytes()
        damages = [whole[:cut] for cut in range(0, len(whole), 97)] + [whole + b"x"]
        for byte in range(0, len(whole), 97 if path == token_file else 9):
            flipped = bytearray(whole)
            flipped[byte] ^= 1 << byte % 8
            damages.append(bytes(flipped))
        for damage in damages:
            path.write_bytes(damage)
            with pytest.raises(DataError, match=f"{token_file}: "):
                TokenFile(token_file, BYTES)
        path.write_bytes(whole)
    assert len(TokenFile(token_file, BYTES)) > 0


def test_a_file_truncated_while_in_use_is_reported(token_file: Path):
    tokens = TokenFile(token_file, BYTES)
    os.truncate(token_file, 2 * 20)
    assert len(tokens.read(0, 20)) == 20
    with pytest.raises(DataError, match=r"a.bin: truncated while in use"):
        tokens.read(15, 10)


def test_another_tokenizer_or_version_is_refused(token_file: Path, monkeypatch):
    with pytest.raises(DataError, match="another version or tokenizer"):
        TokenFile(token_file, CharTokenizer("é"))
    monkeypatch.setattr(token_files, "VERSION", token_files.VERSION + 1)
    with pytest.raises(DataError, match="another version or tokenizer"):
        TokenFile(token_file, BYTES)


@pytest.mark.parametrize(("vocab_size", "size"), [(257, 2), (65536, 2), (65537, 4), (200_000, 4)])
def test_token_types_hold_the_largest_token(vocab_size, size):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    dtype = token_files.get_token_dtype(tokenizer)
    assert dtype.itemsize == size
    assert dtype.type(vocab_size - 1) == vocab_size - 1


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
