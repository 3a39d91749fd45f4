import csv
import gzip
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptmini.config.settings import DataConfig
from gptmini.data import formats
from gptmini.data.text import find_text
from gptmini.errors import DataError, MachineError
from gptmini.tokenizer import chunks

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"))
IN_A_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
)


def documents(path: Path, **options: str) -> list[str]:
    """The documents of a file, joined from their pieces."""
    texts: list[str] = []
    settings = DataConfig.model_validate(options)
    separator = with_line_feeds(settings.separator or "")
    for file in find_text([str(path)], settings).files:
        for piece in formats.read_documents(file, settings.text_key, separator):
            texts += [""] if piece.starts_document else []
            texts[-1] += piece.text
    return texts


def with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


@IN_A_FOLDER
@given(text=TEXTS, block=st.integers(1, 9))
def test_a_file_is_a_document_whatever_its_pieces(tmp_path: Path, monkeypatch, text, block):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(formats, "TEXT_BLOCK_SIZE", block)
    monkeypatch.setattr(chunks, "TEXT_BLOCK_SIZE", block)
    assert documents(path) == [with_line_feeds(text)] * bool(text)


@IN_A_FOLDER
@given(text=st.text("ab-\r\n é", max_size=60), block=st.integers(1, 9))
@pytest.mark.parametrize("separator", ["-", "\n\n", "-\n-", "ab"])
def test_separators_split_documents_wherever_blocks_end(
    tmp_path: Path, monkeypatch, text, separator, block
):
    path = tmp_path / "a.md"
    path.write_bytes(text.encode())
    monkeypatch.setattr(formats, "TEXT_BLOCK_SIZE", block)
    monkeypatch.setattr(chunks, "TEXT_BLOCK_SIZE", block)
    expected = [document for document in with_line_feeds(text).split(separator) if document]
    assert documents(path, separator=separator) == expected


def packed(data: bytes, packing: str) -> bytes:
    if packing == ".gz":  # in two members, as `cat a.gz b.gz` makes
        return gzip.compress(data[:5], mtime=0) + gzip.compress(data[5:], mtime=0)
    if packing == ".zst":
        return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:5], data[5:]))
    return data


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@IN_A_FOLDER
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_lines_rows_and_columns_are_documents(tmp_path: Path, packing, texts):
    expected = [text for text in texts if text]
    lines = "".join(json.dumps({"n": 1, "body": text}) + "\n\n" for text in texts)
    table = io.StringIO()
    rows = csv.writer(table)
    rows.writerows([["n", "body"], *([1, text] for text in texts)])
    for name, content in (("a.jsonl", lines), ("a.CSV", table.getvalue())):
        path = tmp_path / (name + packing)
        path.write_bytes(packed(content.encode(), packing))
        assert documents(path, text_key="body") == expected


def test_a_field_may_be_as_long_as_a_book(tmp_path: Path):
    csv.field_size_limit(131_072)  # Python's own limit, which another test may have raised
    (tmp_path / "a.csv").write_text("text\n" + "word " * 40_000 + "\n")
    assert documents(tmp_path / "a.csv") == ["word " * 40_000]


def test_parquet_columns_are_documents(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "text": ["one", "", "zwölf"]}), path)
    assert documents(path) == ["one", "zwölf"]
    with pytest.raises(
        DataError, match=r"no field 'body' \(it has: n, text\); .*data.text_key=KEY"
    ):
        documents(path, text_key="body")
    with pytest.raises(DataError, match=r"a.parquet:1: field 'n' is 1, not text"):
        documents(path, text_key="n")


def test_json_lines_may_be_appended_with_their_marks(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n' + b'\xef\xbb\xbf{"text": "two"}\n')
    assert documents(path) == ["one", "two"]


def test_a_record_with_no_text_among_others_is_counted(tmp_path: Path, capsys):
    """A null, or a field left out where it would be null, is no text, as an empty one is."""
    records = [{"text": "a"}, {"n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (tmp_path / "a.jsonl").write_text(lines)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        source = find_text([str(tmp_path / name)], DataConfig())
        assert [chunk.text for chunk in source.iter_chunks()] == ["a"]
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"warning: {tmp_path}/{name}:2: ")
        assert "2 of 4 records" in line


def test_rows_of_parquet_are_counted_through_all_groups(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two", "three"]}), path, row_group_size=2)
    source = find_text([str(path)], DataConfig())
    assert [chunk.place.line for chunk in source.iter_chunks()] == [1, 2, 3]


def test_a_long_document_comes_in_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(chunks, "TEXT_BLOCK_SIZE", 10)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "seven words are in this one sentence"}) + "\n")
    source = find_text([str(path)], DataConfig())
    pieces = [piece.text for piece in source.iter_chunks()]
    assert pieces == ["seven", " words", " are in", " this one", " sentence"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"x" * 100 + b"\xff", "a.txt: not UTF-8 at byte 100; .*data.errors=replace"),
        ("a.txt", b"\xef\xbb\xbf" + b"x" * 10 + b"\xff", "not UTF-8 at byte 13;"),
        (
            "a.txt",
            b"x" * (formats.TEXT_BLOCK_SIZE + 5) + b"\xc3",
            f"not UTF-8 at byte {formats.TEXT_BLOCK_SIZE + 5};",
        ),
        (
            "a.txt",
            "text".encode("utf-16"),
            "a.txt: UTF-16 or UTF-32, not plain text; convert it: iconv",
        ),
        (
            "a.txt",
            "text".encode("utf-32"),
            "a.txt: UTF-16 or UTF-32, not plain text; convert it: iconv",
        ),
        ("a.txt", "text".encode("utf-16-le"), "a.txt: binary data, not plain text"),
        ("a.txt", b"x" * 9999 + b"\0", "NUL bytes, so it is not text"),
        (
            "a.png",
            b"\x89PNG\r\n\x1a\n\0\0\0",
            "a.png: binary data, not plain text; unpack it, or choose a text file",
        ),
        ("a.gz", gzip.compress(b"\0", mtime=0), "a.gz: binary data"),
        ("a.docx", b"PK\3\4...", "a.docx: a Word document, not plain text; save it as plain text"),
        ("a.PDF", b"%PDF-1.4\n", "a.PDF: a PDF document, .*pdftotext"),
        ("a.txt.bz2", b"BZh91AY", "a.txt.bz2: bzip2 data, .*bzcat FILE . gptmini train --data -"),
        ("a.rtf", b"{\\rtf1", "a.rtf: an RTF document"),
        ("a.txt", gzip.compress(b"text", mtime=0), "a.txt: gzip data, .*; end its name in .gz"),
        (
            "a.txt",
            "déjà vu".encode("latin-1"),
            "at byte 1; convert it, .*a.txt > .*a-utf8.txt; or mark",
        ),
        (
            "a.txt",
            "déjà ".encode() + b"\xff",
            "at byte 7; convert it, .*a.txt > .*a-utf8.txt; or mark",
        ),
        ("a.txt.gz", b"no gzip at all", r"a.txt.gz: damaged \(Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], r"a.txt.gz: damaged \("),
        ("a.txt.zst", b"no zstd at all", r"a.txt.zst: damaged \("),
        ("a.txt.zst", packed(b"x" * 999, ".zst")[:-9], r"a.txt.zst: damaged \("),
        ("a.parquet", b"no table", r"a.parquet: damaged \("),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a.jsonl:2: not valid JSON \(Expecting"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not valid JSON"),
        ("a.jsonl", b"<!DOCTYPE html>\n<p>", "a.jsonl:1: not valid JSON .* if it is plain text"),
        ("a.jsonl", b'{"text": "a"}\n\n7\n', "a.jsonl:3: not a JSON object; write it as"),
        (
            "a.jsonl",
            b'{"title": "a", "body": "b"}\n',
            r"a.jsonl:1: no field 'text' \(it has: title, body\)",
        ),
        ("a.jsonl", b'{"instruction": "a", "output": "b"}\n', "a.jsonl:1: .* messages"),
        ("a.jsonl", b'{"text": 1}\n', "a.jsonl:1: field 'text' is 1, not text"),
        ("a.jsonl", b'{"messages": "a"}\n', r"a.jsonl:1: .*messages"),
        ("a.jsonl", b"null\n", "a.jsonl:1: not a JSON object"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not UTF-8 at byte 10; convert"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "field 'text' has half a character .* at position 0"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "a.jsonl: UTF-16 or .*-t utf-8"),
        ("a.csv", "text\na\n".encode("utf-16"), "a.csv: UTF-16 or .*-t utf-8"),
        ("a.csv", b"PK\3\4...", "a.csv: a ZIP archive or an Office document, "),
        ("a.csv", b"text\nfine\n\xff\n", "a.csv:3: not UTF-8 at byte 0; convert"),
        ("a.csv", b"text\n" + b"fine\r\n" * 9999 + b"\xff", "a.csv:10001: not UTF-8 "),
        ("a.csv", "text\né".encode() + b"\n\xff\n", "a.csv:3: not UTF-8 at byte 0; convert it,"),
        ("a.csv", b"title,body\na,b\n", r"a.csv:1: no field 'text' \(it has: title, body"),
        ("a.csv", b"title;body\na;b\n", r"a.csv:1: no field 'text' \(it has: title, body"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: several columns 'text'"),
        ("a.csv", b"title,text\na\n", "a.csv:2: 1 fields, but the header has 2"),
        ("a.csv", b'title,text\n"two\nlines"\n', "a.csv:2: 1 fields"),
        ("a.csv", b'title,text\n"b\nc",d\n\n\n"two\nlines"\n', "a.csv:6: 1 fields"),
        ("a.csv", b"id,text\n1,Hello there, my friend\n", "a.csv:2: 3 fields, .* header has 2"),
        ("a.csv", b"text\nfine\nHello, you\n", "a.csv:3: 2 fields, .* header has 1"),
        ("a.csv", b"id;text\n1;Hello; you\n", "a.csv:2: 3 fields, .* header has 2"),
        ("a.csv", b'id,text\n2,"second \\"escaped\\", more"\n', "a.csv:2: not valid CSV"),
        ("a.csv", b'id,text\n1,"a\nb"\n2,"never\n3,closed\n', "a.csv:4: not valid CSV"),
    ],
)
def test_invalid_text_is_reported_with_its_position(tmp_path: Path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        documents(path)
    assert len(error.value.lines) == 1


@pytest.mark.parametrize("delimiter", formats.CSV_DELIMITERS)
def test_the_header_of_a_csv_file_says_its_delimiter(tmp_path: Path, delimiter):
    rows = [["id", "text", "note"], ["1", "a, b; c", ""], ["2", 'say "hi"\tnow\nhere', "d"]]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([*rows, ["3", "short"]])
    assert documents(tmp_path / "a.csv") == ["a, b; c", 'say "hi"\tnow\nhere', "short"]
    for content in (
        b"id,text\r1,one\r2,two\r",  # as on the first Macs
        b"\xef\xbb\xbfid;text\r\n1;one\r\n2;two\r\n",  # as Excel writes it
        b'id, "text"\n1,one\n2,two\n',
    ):
        (tmp_path / "b.csv").write_bytes(content)
        assert documents(tmp_path / "b.csv") == ["one", "two"]


def test_long_rows_of_parquet_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch):
    texts = [f"{number} " + "x" * 1000 for number in range(50)]
    path = tmp_path / "a.parquet"
    table = pa.table({"text": texts})
    pq.write_table(table, path, row_group_size=30, use_dictionary=False, write_batch_size=1)
    rows = []
    read = pq.ParquetFile.iter_batches

    def count(file, *arguments, **options):
        for batch in read(file, *arguments, **options):
            rows.append(batch.num_rows)
            yield batch

    assert documents(path) == texts  # and its beginning will not be looked at again
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", count)
    monkeypatch.setattr(formats, "PARQUET_BATCH_BYTES", 5500)
    assert documents(path) == texts
    assert sum(rows) == 50
    assert max(rows) == 5
    monkeypatch.setattr(formats, "PARQUET_BATCH_BYTES", 10)
    assert documents(path) == texts


def test_line_ends_become_line_feeds_in_plain_text(tmp_path: Path):
    for name, content, expected in [
        ("a.txt", b"one\r\ntwo\rthree\n\r\n", ["one\ntwo\nthree\n\n"]),
        ("b.txt.gz", gzip.compress(b"one\r\ntwo", mtime=0), ["one\ntwo"]),
        ("a.jsonl", b'{"text": "one\\r\\ntwo"}\r\n', ["one\r\ntwo"]),
    ]:
        (tmp_path / name).write_bytes(content)
        assert documents(tmp_path / name) == expected
    path = tmp_path / "a.txt"
    assert documents(path, separator="\r\n") == documents(path, separator="\n")
    assert documents(path, separator="\n") == ["one", "two", "three"]


def test_bad_bytes_can_be_replaced(tmp_path: Path):
    for name, content, expected in [
        ("a.txt", b"a\xffb\xc3", "a\ufffdb\ufffd"),
        ("a.jsonl", b'{"text": "a\xffb"}', "a\ufffdb"),
        ("b.jsonl", b'{"text": "a\\ud800b"}', "a\ufffdb"),
        ("a.csv", b"text\na\xffb\n", "a\ufffdb"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        assert documents(path, errors="replace") == [expected]


def test_without_pyarrow_its_formats_name_the_extra(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name in ("a.parquet", "a.txt.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(MachineError, match=rf"{name}: pyarrow is not .*'gptmini\[data\]'"):
            documents(tmp_path / name)


def test_a_file_that_changes_while_it_is_read_is_refused_though_its_size_stays(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first")
    (file,) = find_text([str(path)], DataConfig()).files
    with pytest.raises(DataError, match="changed"), formats.open_unchanged(file) as raw:
        raw.read()
        path.write_text("other")
        os.utime(path, (1, 1))
