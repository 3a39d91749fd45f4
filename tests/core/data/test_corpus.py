import gzip
import json
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gptmini.config.settings import DataConfig
from gptmini.data import corpus as corpora
from gptmini.data import formats
from gptmini.data.text import Split, Text, find_text
from gptmini.data.token_file import Corpus, TokenFile
from gptmini.errors import DataError, MachineError
from gptmini.tokenizer import chunks
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.support import WORDS, tiny

DOCUMENT = 256


@pytest.fixture(autouse=True)
def in_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path / "cache"))


def prepared(path: object, kind: str = "byte", **data: Any) -> Corpus:
    given = data | {"path": list(map(str, path)) if isinstance(path, list) else str(path)}
    config = tiny(data=given, tokenizer={"kind": kind}, model={"context_length": 2, "n_head": 1})
    return corpora.prepare_corpus(config)


def tokens_of(*texts: TokenFile) -> list[int]:
    return [token for text in texts for token in text.read(0, len(text)).tolist()]


def test_the_tail_is_held_out(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("héllo\r\nwörld\n".encode())
    corpus = prepared(path, validation=0.34)
    expected = [DOCUMENT, *"héllo\nwörld\n".encode()]
    assert tokens_of(*corpus.training) == expected[:-6]  # no character is cut in two
    assert tokens_of(*corpus.validation) == expected[-6:]
    assert corpus.format_summary() == (
        f"  text      {path}: 14 bytes cut into 15 tokens (byte, 257 different ones); "
        f"6 are held out"
    )


def whole(path: Path) -> Text:
    return find_text([str(path)], DataConfig())


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_vocabulary_is_learned_from_the_training_part_alone(tmp_path: Path, kind):
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat " * 90 + "the zyzzyva 東 " * 10)
    corpus = prepared(path, kind, validation=0.02, test=0.05)
    known = {corpus.tokenizer.decode([token]) for token in range(corpus.tokenizer.vocab_size)}
    assert not {"東", "zy", " zyzzyva"} & known
    assert "東" in corpora.learn_tokenizer("char", None, [whole(path)], chat=False).characters
    if kind == "bpe":
        assert {" the", " cat"} <= known


def test_a_vocabulary_suits_the_text_and_not_its_file(tmp_path: Path):
    letters = random.Random(0)
    words = " ".join("".join(letters.choices("abcdefgh", k=5)) for _ in range(500))
    (tmp_path / "a.txt").write_text(60 * words)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(60 * words.encode()))
    assert (tmp_path / "a.txt.gz").stat().st_size < 40_000
    for name in ("a.txt", "a.txt.gz"):
        corpus = prepared(tmp_path / name, "auto")
        assert corpus.tokenizer.vocab_size == 512, name


def test_characters_are_learned_from_all_of_a_large_text(tmp_path: Path, monkeypatch):
    """Of a vocabulary of words a sample is enough, but each missing character is spelled out."""
    monkeypatch.setattr(corpora, "MAX_LEARNED_FROM_BYTES", 50)
    monkeypatch.setattr(formats, "TEXT_BLOCK_SIZE", 64)
    monkeypatch.setattr(chunks, "TEXT_BLOCK_SIZE", 64)
    characters = "".join(chr(0x4E00 + number) for number in range(20))
    (tmp_path / "a.txt").write_text(" the cat sat. ".join(characters))
    found = corpora.learn_tokenizer("char", None, [whole(tmp_path / "a.txt")], chat=False)
    assert found.characters == characters


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=50,
)
@given(
    lines=st.lists(st.text("ab é東", min_size=1, max_size=30), min_size=1, max_size=20),
    validation=st.floats(1e-6, 0.49),
    test=st.floats(1e-6, 0.49),
    split=st.sampled_from(["tail", "documents"]),
)
def test_the_parts_of_a_split_are_the_whole_text(tmp_path, lines, validation, test, split):
    assume("".join(lines).strip())  # blank texts are refused
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines))
    whole = find_text([str(path)], DataConfig(split=split, separator="\n"))
    documents = [piece.text for piece in whole.iter_chunks()]
    source = replace(whole, validation=validation, test=test)
    sides: dict[Split, list[str]] = {"training": [], "test": [], "validation": []}
    with suppress(DataError):  # at the end, where a split has no document
        for side, piece in source.iter_splits(sides):
            sides[side].append(piece.text)
    for side, alone in sides.items():
        part = []
        with suppress(DataError):
            part.extend(piece.text for _, piece in source.iter_splits([side]))
        assert part == alone
    parts = [*sides["training"], *sides["test"], *sides["validation"]]
    if split == "tail":
        assert "".join(parts) == "".join(documents)
    else:
        assert sorted(parts) == sorted(documents)


def test_the_test_part_changes_nothing_but_is_left_out(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text(WORDS * 40)
    corpus = prepared(path, validation=0.1, test=0.2)
    assert corpus.test == []
    config = tiny(data={"path": str(path), "validation": 0.1, "test": 0.2})
    with_test = corpora.prepare_corpus(config, with_test=True)
    assert with_test.content == corpus.content
    sides = [with_test.training, with_test.test, with_test.validation]
    whole = [token for side in sides for token in tokens_of(*side)]
    assert whole == [DOCUMENT, *(WORDS * 40).encode()]
    lengths = [sum(map(len, side)) / len(WORDS * 40) for side in sides]
    assert lengths == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    other = prepared(path, validation=0.2, test=0.1)
    assert other.content != corpus.content


@pytest.mark.parametrize("split", ["tail", "documents"])
def test_all_sides_are_prepared_in_one_pass(tmp_path: Path, monkeypatch, split):
    """A pass before that looks for conversations and measures the text, a look at its beginning."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {WORDS}"}) + "\n" for n in range(200)))
    read: list[Path] = []

    def note_and_read(file: formats.File, *options: str) -> Iterator[chunks.TextChunk]:
        read.append(file.path)
        return formats.read_documents(file, *options)

    monkeypatch.setattr("gptmini.data.text.read_documents", note_and_read)
    settings = {"path": str(path), "split": split, "validation": 0.1, "test": 0.2}
    config = tiny(data=settings, model={"context_length": 2, "n_head": 1})
    cache = tmp_path / "cache"
    corpus = corpora.prepare_corpus(config, with_test=True)
    assert read == [path] * 3
    whole = {file: file.read_bytes() for file in cache.iterdir()}
    assert len(whole) == 7

    damaged = corpus.validation[0].path
    damaged.write_bytes(b"")
    others = {file: file.stat().st_mtime_ns for file in whole if file.stem != damaged.stem}
    read.clear()
    corpora.prepare_corpus(config, with_test=True)
    assert read == [path]
    assert {file: file.read_bytes() for file in cache.iterdir()} == whole
    assert {file: file.stat().st_mtime_ns for file in others} == others


def test_of_a_text_in_the_cache_nothing_is_decoded(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {WORDS}"}) + "\n" for n in range(200)))
    first = prepared(path, "auto")

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("gptmini.data.text.read_documents", fail)
    assert prepared(path, "auto").tokenizer.vocab_size == first.tokenizer.vocab_size
    (kept,) = (tmp_path / "cache").glob("*.size")
    whole = kept.read_bytes()
    size = sum(file.text_bytes for file in first.training + first.validation)
    monkeypatch.undo()
    monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path / "cache"))
    for at in range(len(whole)):
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert find_text([str(path)], DataConfig()).spans["validation"][1] == size
        assert kept.read_bytes() == whole


def test_a_long_first_line_does_not_move_the_cut(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("title\n" + "x" * 20_000)
    corpus = prepared(path, validation=0.1)
    assert sum(map(len, corpus.validation)) == pytest.approx(2000, abs=10)


def test_whole_documents_are_held_out(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("|".join(f"document {n}" for n in range(200)))
    corpus = prepared(path, split="documents", separator="|", validation=0.2)
    sides = [tokens_of(*side) for side in (corpus.training, corpus.validation)]
    assert all(side[0] == DOCUMENT for side in sides)
    assert sum(side.count(DOCUMENT) for side in sides) == 200
    path.write_text("one document")
    with pytest.raises(DataError, match=r"leaves no document for validation; .*data.split=tail"):
        prepared(path, split="documents", validation=1e-9)


def test_a_separate_text_is_held_out(tmp_path: Path):
    ours, theirs = tmp_path / "a.txt", tmp_path / "b.txt"
    ours.write_text("all of this")
    theirs.write_text("none of that")
    corpus = prepared(ours, validation_path=str(theirs))
    assert tokens_of(*corpus.training) == [DOCUMENT, *b"all of this"]
    assert tokens_of(*corpus.validation) == [DOCUMENT, *b"none of that"]
    theirs.write_text("something else")
    again = prepared(ours, validation_path=str(theirs))
    assert again.content != corpus.content


def test_weighted_texts_are_kept_apart_and_others_together(tmp_path: Path):
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(path.stem * 20)
    apart = prepared(paths, weights=[3.0, 1.0], validation=0.2)
    assert [set(tokens_of(one)) - {DOCUMENT} for one in apart.training] == [{97}, {98}]
    assert [len(one) for one in apart.validation] == [4, 4]
    together = prepared(paths, validation=0.2)
    expected = [DOCUMENT, *b"a" * 20, DOCUMENT, *b"b" * 20]
    assert tokens_of(*together.training, *together.validation) == expected


def test_too_short_a_text_is_refused_with_a_length_that_is_enough(tmp_path: Path):
    path = tmp_path / "a.txt"
    config = tiny(data={"path": str(path)}, model={"context_length": 256})
    for length in (15, 257, 2490):  # of which training, validation or both are too short
        path.write_text("x" * length)
        with pytest.raises(DataError) as error:
            corpora.prepare_corpus(config)
        needed = "training needs about 3,000"
        assert error.value.lines == (f"{path}: too short: {length:,} bytes; {needed}",)
    path.write_text("x" * 3000)
    corpora.prepare_corpus(config)
    with pytest.raises(DataError, match=r" 20,000, or fewer with --set train\.seq_len=256"):
        corpora.prepare_corpus(tiny(data={"path": str(path)}, model={"context_length": 1024}))


def test_one_window_and_the_token_after_it_are_enough(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 50)
    held_out = tmp_path / "b.txt"
    data = {"path": str(tmp_path / "a.txt"), "validation_path": str(held_out)}
    config = tiny(data=data, model={"context_length": 10})
    held_out.write_text("y" * 10)  # the end-of-text token stands before them
    assert corpora.prepare_corpus(config).held_out == 11
    held_out.write_text("y" * 9)
    with pytest.raises(DataError, match=r"b\.txt: too short: 9 bytes; training needs about 20$"):
        corpora.prepare_corpus(config)


@pytest.mark.parametrize("content", [b"", b" \n\t ", b"\xef\xbb\xbf"])
def test_blank_text_is_refused_and_leaves_nothing(tmp_path: Path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.txt: contains no text"):
        prepared(path)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("kind", ["bpe", "auto"])
def test_the_cache_is_reused_and_repaired(text_file: Path, tmp_path: Path, kind):
    cache = tmp_path / "cache"
    first = prepared(text_file, kind)
    path = first.training[0].path
    made = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in cache.iterdir()}
    assert prepared(text_file, kind).training[0].path == path
    assert made == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in cache.iterdir()}
    for file, (whole, _) in made.items():
        flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (9, 70, -9)]
        for damaged in (whole[: len(whole) // 2], b"x" * 200, *flips):
            file.write_bytes(damaged)
            prepared(text_file, kind)
            assert file.read_bytes() == whole
    assert made.keys() == set(cache.iterdir())


def test_vocabularies_of_several_sizes_have_places_of_their_own(text_file: Path, tmp_path: Path):
    sizes = []
    for vocab_size in (300, 280, 300):
        config = tiny(
            data={"path": str(text_file)}, tokenizer={"kind": "bpe", "vocab_size": vocab_size}
        )
        corpus = corpora.prepare_corpus(config)
        sizes.append(corpus.tokenizer.vocab_size)
    assert sizes == [300, 280, 300]


def test_text_that_changes_while_read_leaves_nothing(text_file: Path, tmp_path: Path, monkeypatch):
    def change_the_file(*arguments: Any, **options: Any) -> Tokenizer:
        text_file.write_text("other words")
        return create_tokenizer(*arguments, **options)

    monkeypatch.setattr(corpora, "create_tokenizer", change_the_file)
    with pytest.raises(DataError, match="changed while being read"):
        prepared(text_file)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_variable(text_file: Path, monkeypatch):
    monkeypatch.setenv("GPTMINI_CACHE", "/dev/null/x")
    with pytest.raises(MachineError, match=r"/dev/null/x: .*GPTMINI_CACHE"):
        prepared(text_file)


def test_token_files_are_the_same_on_any_number_of_cores(
    text_file: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(chunks, "TEXT_BLOCK_SIZE", 64)
    whole = []
    for cores in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path / f"cache{cores}"))
        corpus = prepared(text_file, "bpe")
        whole.append(corpus.training[0].path.read_bytes())
    assert whole[0] == whole[1] == whole[2]
    assert len(whole[0]) > 100


def test_leftovers_of_killed_processes_are_deleted_after_a_day(text_file: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in (".tmp-2-x.bin", ".tmp-3-x.bin"):
        (cache / name).write_bytes(b"x")
    os.utime(cache / ".tmp-2-x.bin", (0, 0))
    # As one that a process renames while the folder is read.
    (cache / ".tmp-4-x.bin").symlink_to("renamed")
    prepared(text_file)
    assert {file.name for file in cache.glob(".tmp-*")} == {".tmp-3-x.bin", ".tmp-4-x.bin"}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=25,
)
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_any_bytes_round_trip_or_are_one_error(tmp_path: Path, kind, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    try:
        corpus = prepared(path, kind, errors="replace", validation=0.5)
    except DataError as error:
        short = len(content) < 20
        no_text = b"\0" in content or not content.strip() or "not plain text" in error.lines[0]
        assert short or no_text, error
        assert len(error.lines) == 1
        return
    text = content.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
    tokens = tokens_of(*corpus.training, *corpus.validation)
    assert tokens[0] == corpus.tokenizer.eos_token_id
    assert corpus.tokenizer.eos_token_id not in tokens[1:]
    assert corpus.tokenizer.decode(tokens) == text


def test_tokens_beyond_16_bits_keep_their_numbers(tmp_path: Path):
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {f" {number}".encode(): number for number in range(256, 70_000)}
    encoding = tiktoken.Encoding(
        "large", pat_str=r" \d+|.", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 70_000}
    )
    (tmp_path / "t.json").write_text(BpeTokenizer(encoding).to_json())
    numbers = [256, 300, 65_535, 65_536, 69_999] * 100
    (tmp_path / "a.txt").write_text("".join(f" {number}" for number in numbers))
    kind = str(tmp_path / "t.json")
    corpus = prepared(tmp_path / "a.txt", kind, validation=0.3)
    assert tokens_of(*corpus.training, *corpus.validation) == [70_000, *numbers]
    assert corpus.training[0].dtype.itemsize == 4


@pytest.mark.parametrize("split", ["tail", "documents"])
def test_of_a_large_text_less_than_a_tenth_is_held_out(tmp_path: Path, monkeypatch, split):
    path = tmp_path / "a.txt"
    path.write_text("|".join(f"document {number:5}" for number in range(2000)))
    for held_out, expected in [(1_500_000, 0.1), (600, 0.02)]:
        monkeypatch.setattr(corpora, "MAX_HELD_OUT_BYTES", held_out)
        corpus = prepared(path, split=split, separator="|")
        ((training,), (validation,)) = corpus.training, corpus.validation
        share = len(validation) / (len(training) + len(validation))
        assert share == pytest.approx(expected, rel=0.3)
    corpus = prepared(path, split=split, separator="|", validation=0.5)
    assert len(corpus.validation[0]) == pytest.approx(len(corpus.training[0]), rel=0.2)
