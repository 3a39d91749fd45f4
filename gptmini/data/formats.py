"""The documents in one file: plain text, JSON lines, CSV or Parquet, compressed or not.

Files are read block by block, so they may be larger than memory. Anything that is not valid text
raises a DataError with the file and the position.
"""

import codecs
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gptmini import files
from gptmini.errors import DataError, describe_invalid_utf8, describe_os_error
from gptmini.tokenizer.chunks import TEXT_BLOCK_SIZE, TextChunk, find_boundary, split_text

CONVERT_REMEDY = "convert it, or pass --errors replace"
SAVE_REMEDY, CHOOSE_REMEDY = "save it as plain text", "choose a text file"
UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SNIFFED_BYTES = (
    8192  # bytes in which a file that is not text shows it: a signature, or a NUL byte as for git
)

# The first bytes of files that people take for text, what they are, and what to do with them.
SIGNATURES = {
    b"%PDF-": ("a PDF document", "extract its text, for example with pdftotext"),
    b"{\\rtf": ("an RTF document", SAVE_REMEDY),
    b"\xd0\xcf\x11\xe0": ("a Word, Excel or PowerPoint document", SAVE_REMEDY),
    b"PK\3\4": ("a ZIP archive", "unpack it"),
    b"\x1f\x8b": ("gzip data", "end its name in .gz"),
    b"(\xb5/\xfd": ("zstd data", "end its name in .zst"),
    b"\xfd7zXZ": ("xz data", "unpack it"),
    b"\x89PNG": ("a PNG picture", CHOOSE_REMEDY),
    b"\xff\xd8\xff": ("a JPEG picture", CHOOSE_REMEDY),
    b"GIF8": ("a GIF picture", CHOOSE_REMEDY),
}
ZIPPED_DOCUMENTS = {
    ".docx": "a Word document",
    ".xlsx": "an Excel document",
    ".pptx": "a PowerPoint document",
    ".odt": "an OpenDocument text",
    ".epub": "an EPUB book",
}


@dataclass(frozen=True)
class File:
    """A file as it was found; `kind` says how to read it, `packing` how it is compressed."""

    path: Path
    kind: str
    compression: str
    bytes: int
    modified_ns: int  # nanoseconds
    errors: str


def read_documents(file: File, text_key: str, separator: str) -> Iterator[TextChunk]:
    """The documents of a file; `separator` splits only plain text."""
    with open_unchanged(file) as raw, _report_damage(file):
        stream = _decompress(file, raw)
        if file.kind == "text":
            yield from _split_documents(_decode_blocks(file, stream), separator)
        else:
            for text in READER_BY_KIND[file.kind](file, stream, text_key):
                yield from _split_chunks(text, True)


@contextmanager
def open_unchanged(file: File) -> Iterator[BinaryIO]:
    """The bytes of a file; DataError if it cannot be opened or has changed since it was found."""
    try:
        raw = files.open_regular(file.path)
    except OSError as error:
        raise_unreadable(error, file.path)
    with raw:
        yield raw
        now = os.stat(file.path)
        if (now.st_size, now.st_mtime_ns) != (file.bytes, file.modified_ns):
            raise DataError(
                f"{file.path}: changed while being read; run again when nothing writes to it"
            )


def detect_binary(path: Path, head: bytes) -> tuple[str, str] | None:
    """What a file is if it is not plain text, by its first bytes, and what to do; or None."""
    for signature, (kind, remedy) in SIGNATURES.items():
        if head.startswith(signature):
            document = (
                ZIPPED_DOCUMENTS.get(path.suffix.lower()) if kind == "a ZIP archive" else None
            )
            return (document, SAVE_REMEDY) if document else (kind, remedy)
    if b"\0" in head and not head.startswith(UTF16_BOMS):
        return "binary data", CHOOSE_REMEDY
    return None


@contextmanager
def _report_damage(file: File) -> Iterator[None]:
    """Turn errors of decompression and parsing into a DataError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, OSError, csv.Error, ValueError) as error:
        raise DataError(f"{file.path}: damaged ({error}); replace it with an intact copy") from None


def _decompress(file: File, raw: BinaryIO) -> BinaryIO:
    if file.compression == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if file.compression == ".zst":
        arrow = _pyarrow(file)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"))
    return raw


def _pyarrow(file: File) -> Any:
    try:
        import pyarrow  # noqa: PLC0415 - optional, and slow to load
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise DataError(
            f"{file.path}: zstd and Parquet need pyarrow; run pip install pyarrow"
        ) from None
    return pyarrow


def _decode_blocks(file: File, stream: BinaryIO) -> Iterator[str]:
    """The text of a stream in blocks, without a byte order mark; CR LF and CR become LF."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")(file.errors)
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    offset = 0
    while True:
        block = stream.read(TEXT_BLOCK_SIZE)
        if offset == 0 and block.startswith(UTF16_BOMS):
            raise DataError(
                f"{file.path}: UTF-16, not UTF-8; convert it with: iconv -f UTF-16 -t UTF-8"
            )
        if offset == 0 and (problem := detect_binary(file.path, block[:SNIFFED_BYTES])):
            kind, remedy = problem
            raise DataError(f"{file.path}: {kind}, not plain text; {remedy}")
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = offset + len(block) - len(error.object) + error.start
            whole = offset == 0 and block[:at].isascii()  # not only a few bad bytes in UTF-8
            remedy = _suggest_conversion(block) if whole else CONVERT_REMEDY
            raise DataError(describe_invalid_utf8(file.path, f"at byte {at}", remedy)) from None
        if "\0" in text:
            raise DataError(
                f"{file.path}: contains NUL bytes, so it is not text; select only text files, "
                f"as in '{file.path.parent}/**/*.txt'"
            )
        yield text
        if not block:
            return
        offset += len(block)


def _suggest_conversion(block: bytes) -> str:
    """The remedy for the beginning of a text in another encoding."""
    encoding = "WINDOWS-1252"
    if len(block.translate(None, bytes(range(128)))) > 0.3 * len(block):  # bytes above 127
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("gb18030")().decode(block)
            encoding = "GB18030"
    return f"convert it, for example with: iconv -f {encoding} -t UTF-8, or pass --errors replace"


def _split_documents(blocks: Iterable[str], separator: str) -> Iterator[TextChunk]:
    """The documents between separators, piece by piece."""
    rest, first = "", True
    for block in blocks:
        *ended, rest = (rest + block).split(separator) if separator else [rest + block]
        for text in ended:
            yield from _split_chunks(text, first)
            first = True
        # Keep the length of a separator back: half of one may stand at the end of the block.
        while len(rest) >= TEXT_BLOCK_SIZE + len(separator):
            cut = find_boundary(rest, TEXT_BLOCK_SIZE)
            yield TextChunk(rest[:cut], first)
            rest, first = rest[cut:], False
    yield from _split_chunks(rest, first)


def _split_chunks(text: str, first: bool) -> Iterator[TextChunk]:
    """A text in pieces of at most BLOCK characters; none if it is empty."""
    for part in split_text(text):
        yield TextChunk(part, first)
        first = False


def _read_json_lines(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        place = f"{file.path}:{number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig", file.errors))
        except UnicodeDecodeError as error:
            raise DataError(
                describe_invalid_utf8(place, f"at byte {error.start}", CONVERT_REMEDY)
            ) from None
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise DataError(f"{place}: not valid JSON ({reason}); fix or remove the line") from None
        if not isinstance(record, dict):
            raise DataError(f'{place}: not a JSON object; write it as {{"{key}": "..."}}')
        yield _get_text(place, record, key, file.errors)


def _read_csv(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(stream, "utf-8-sig", file.errors, newline="")
    rows = csv.DictReader(text)
    try:
        for row in rows:
            yield _get_text(f"{file.path}:{rows.line_num}", row, key, file.errors)
    except UnicodeDecodeError:
        raise DataError(
            describe_invalid_utf8(file.path, f"after line {rows.line_num}", CONVERT_REMEDY)
        ) from None
    finally:
        text.detach()  # `opened` closes the stream


def _read_parquet(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    table = _pyarrow(file).parquet.ParquetFile(stream)
    if key not in table.schema_arrow.names:
        _get_text(str(file.path), dict.fromkeys(table.schema_arrow.names), key, file.errors)
    batches = table.iter_batches(1000, columns=[key])
    values = (value for batch in batches for value in batch.column(0).to_pylist())
    for number, value in enumerate(values, 1):
        yield _get_text(f"{file.path}: row {number}", {key: value}, key, file.errors)


def _get_text(place: str, record: dict[str, Any], key: str, errors: str) -> str:
    """The text under a key of a record; DataError if there is none."""
    if key not in record:
        names = ", ".join(map(str, record)) or "none"
        raise DataError(
            f"{place}: no field {key!r} (it has: {names}); choose one with --set data.text_key=KEY"
        )
    text = record[key]
    if not isinstance(text, str):
        value = "empty" if text is None else f"{text!r:.40}, not text"
        raise DataError(f"{place}: field {key!r} is {value}; fix or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        if errors == "strict":
            raise DataError(
                f"{place}: field {key!r} has half a character (a lone surrogate) at position "
                f"{error.start}; fix it, or pass --errors replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_topics(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    """The language reference that help() shows, one document per topic."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, seldom needed

    return (topics[name] for name in sorted(topics))


Reader = Callable[[File, BinaryIO, str], Iterator[str]]
READER_BY_KIND: dict[str, Reader] = {
    "jsonl": _read_json_lines,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "topics": _read_topics,
}
KIND_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


def raise_unreadable(
    error: Exception, path: Path | None = None, remedy: str = "check the path and its permissions"
) -> NoReturn:
    """Raise a DataError for a file or folder that cannot be read."""
    place = path or getattr(error, "filename", None)
    raise DataError(f"{place}: {describe_os_error(error)}; {remedy}") from None
