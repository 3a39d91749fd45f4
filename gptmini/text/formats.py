"""What is in one file of text: documents, whether plain, packed, in lines or in a table.

Everything is read block by block, so a file may be larger than memory. What is no text is refused
with the file and the place.
"""

import codecs
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gptmini.errors import DataError
from gptmini.text.tokenizer import BLOCK, Piece, boundary


@dataclass(frozen=True)
class File:
    """A file as it was found; `kind` is how it is read and `packing` how it is compressed."""

    path: Path
    kind: str
    packing: str
    bytes: int
    modified: int  # nanoseconds
    errors: str


def read(file: File, text_key: str, separator: str) -> Iterator[Piece]:
    """The documents of a file; `separator` stands between those of a plain text."""
    with opened(file) as raw, _damage(file):
        if file.kind == "text":
            blocks = _blocks(file, _unpacked(file, raw))
            yield from _documents(blocks, separator)
        else:
            for text in READERS[file.kind](file, _unpacked(file, raw), text_key):
                yield from _pieces(text, True)


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """The bytes of a file, DataError if they cannot be had or are not those that were found."""
    try:
        raw = file.path.open("rb")
    except OSError as error:
        refuse(error, file.path)
    with raw:
        yield raw
        now = os.stat(file.path)
        if (now.st_size, now.st_mtime_ns) != (file.bytes, file.modified):
            raise DataError(f"{file.path}: changed while it was read; run again when it is at rest")


@contextmanager
def _damage(file: File) -> Iterator[None]:
    """Turn what unpacking and parsing raise into a DataError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, OSError, csv.Error, ValueError) as error:
        raise DataError(f"{file.path}: damaged ({error}); make it again") from None


def _unpacked(file: File, raw: BinaryIO) -> BinaryIO:
    if file.packing == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if file.packing == ".zst":
        arrow = _pyarrow(file)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"))
    return raw


def _pyarrow(file: File) -> Any:
    try:
        import pyarrow  # noqa: PLC0415 - an extra, and slow to load
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise DataError(
            f"{file.path}: zstd and Parquet need pyarrow; install it with: "
            f"pip install 'gptmini[data]'"
        ) from None
    return pyarrow


def _blocks(file: File, stream: BinaryIO) -> Iterator[str]:
    """The text of a stream in blocks, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(file.errors)
    offset = 0
    while True:
        block = stream.read(BLOCK)
        if offset == 0 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{file.path}: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = offset + len(block) - len(error.object) + error.start
            raise DataError(
                f"{file.path}: byte {at} is not UTF-8; convert the file, or go on with "
                f"--errors replace"
            ) from None
        if "\0" in text:
            raise DataError(
                f"{file.path}: holds NUL bytes, so it is no text; name the texts beside it, as in "
                f"'{file.path.parent}/**/*.txt'"
            )
        yield text
        if not block:
            return
        offset += len(block)


def _documents(blocks: Iterable[str], separator: str) -> Iterator[Piece]:
    """The documents between separators, piece by piece."""
    kept, first = "", True
    for block in blocks:
        *ended, kept = (kept + block).split(separator) if separator else [kept + block]
        for text in ended:
            yield from _pieces(text, first)
            first = True
        while len(kept) >= BLOCK + len(separator):  # the separator may not have come whole
            cut = boundary(kept, BLOCK)
            yield Piece(kept[:cut], first)
            kept, first = kept[cut:], False
    yield from _pieces(kept, first)


def _pieces(text: str, first: bool) -> Iterator[Piece]:
    """A text in pieces of at most BLOCK characters; none if it is empty."""
    start = 0
    while start < len(text):
        part = text[start : start + BLOCK]
        cut = boundary(part, BLOCK) if start + BLOCK < len(text) else len(part)
        yield Piece(part[:cut], first and start == 0)
        start += cut


def _json_lines(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        place = f"{file.path}:{number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig", file.errors))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place}: byte {error.start} of the line is not UTF-8; convert the file, or go on "
                f"with --errors replace"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: no JSON ({error}); mend or remove the line") from None
        if not isinstance(record, dict):
            raise DataError(f'{place}: no JSON object; write it as {{"{key}": "..."}}')
        yield _field(place, record, key, file.errors)


def _csv_rows(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(stream, "utf-8-sig", file.errors, newline="")
    rows = csv.DictReader(text)
    try:
        for row in rows:
            yield _field(f"{file.path}:{rows.line_num}", row, key, file.errors)
    except UnicodeDecodeError:
        raise DataError(
            f"{file.path}: not UTF-8 after line {rows.line_num}; convert the file, or go on with "
            f"--errors replace"
        ) from None
    finally:
        text.detach()  # the stream is closed where it was opened


def _parquet_rows(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    table = _pyarrow(file).parquet.ParquetFile(stream)
    if key not in table.schema_arrow.names:
        _field(str(file.path), dict.fromkeys(table.schema_arrow.names), key, file.errors)
    number = 0
    for batch in table.iter_batches(1000, columns=[key]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield _field(f"{file.path}: row {number}", {key: value}, key, file.errors)


def _field(place: str, record: dict[str, Any], key: str, errors: str) -> str:
    """The text of a record; DataError if there is none under the key."""
    if key not in record:
        known = ", ".join(map(str, record)) or "nothing"
        raise DataError(f"{place}: no {key}, but {known}; name one with --set data.text_key=KEY")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {key} is {text!r:.40}, no text; mend or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a character, which JSON can spell
        if errors == "strict":
            raise DataError(
                f"{place}: {key} holds a lone surrogate at {error.start}; mend it, or go on with "
                f"--errors replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _topics(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    """The language reference that help() shows, a document for each topic."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that few commands need

    return (topics[name] for name in sorted(topics))


Reader = Callable[[File, BinaryIO, str], Iterator[str]]
READERS: dict[str, Reader] = {
    "jsonl": _json_lines,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
    "topics": _topics,
}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


def refuse(error: Exception, path: Path | None = None) -> NoReturn:
    """Raise a DataError for a file that cannot be had."""
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    place = path or getattr(error, "filename", None)
    raise DataError(f"{place}: {reason}; name a text that can be read") from None
