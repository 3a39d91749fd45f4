"""Read the documents of one file: plain text, JSON lines, CSV or Parquet, compressed or not.

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
from gptmini.data.chats import PROMPT_FIELDS, find_conversation
from gptmini.errors import (
    DataError,
    describe_invalid_utf8,
    describe_os_error,
    make_missing_package_error,
)
from gptmini.hub import HubFile, download
from gptmini.tokenizer.chunks import (
    TEXT_BLOCK_SIZE,
    Conversation,
    TextChunk,
    find_boundary,
    split_text,
)

CONVERT_REMEDY = "convert it, or pass --errors replace"
SAVE_REMEDY = "save it as plain text"
CHOOSE_REMEDY = "choose a text file"
UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SNIFFED_BYTES = 8192  # enough to see that a file is not text: a signature, or a NUL byte as in git

# The first bytes of files that people take for text; their names, and what to do with them.
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


Document = str | Conversation


@dataclass(frozen=True)
class File:
    """A file as it was found; `kind` says how to read it."""

    path: Path
    kind: str  # "text" or a key of READER_BY_KIND
    compression: str  # ".gz", ".zst" or ""
    bytes: int
    modified_ns: int | None  # None of a file on the Hub, which never changes
    errors: str  # how to decode, as in bytes.decode: "strict" or "replace"
    hub_file: HubFile | None = None
    column: str = ""  # that holds the text; "" is `data.text_key`


def download_missing(files_to_read: Iterable[File]) -> None:
    """Bring the files that are on the Hub into the cache; MachineError if they cannot be read."""
    on_hub = [file.hub_file for file in files_to_read if file.hub_file is not None]
    if on_hub:
        _import_pyarrow(f"hf:{on_hub[0].repository}")  # before a long download
    download(on_hub)


def read_documents(file: File, text_key: str, separator: str) -> Iterator[TextChunk]:
    """Read the documents of a file; `separator` splits only plain text."""
    with open_unchanged(file) as raw, _report_damage(file):
        stream = _decompress(file, raw)
        if file.kind == "text":
            yield from _split_documents(_decode_blocks(file, stream), separator)
        else:
            for document in READER_BY_KIND[file.kind](file, stream, file.column or text_key):
                if isinstance(document, Conversation):
                    contents = [message["content"] for message in document.messages]
                    yield TextChunk("\n".join(contents), True, document)
                else:
                    yield from _split_chunks(document, True)


@contextmanager
def open_unchanged(file: File) -> Iterator[BinaryIO]:
    """Open a file; DataError if that fails, or if the file has changed since it was found."""
    try:
        raw = files.open_regular(file.path)
    except OSError as error:
        raise_unreadable(error, file.path)
    with raw:
        yield raw
        now = os.stat(file.path)
        modified_ns = None if file.hub_file else now.st_mtime_ns
        if (now.st_size, modified_ns) != (file.bytes, file.modified_ns):
            raise DataError(
                f"{file.path}: changed while being read; run again when nothing writes to it"
            )


def detect_binary(path: Path, head: bytes) -> tuple[str, str] | None:
    """Detect by its first bytes what a file is if not plain text; returns that and a remedy."""
    for signature, (kind, remedy) in SIGNATURES.items():
        if not head.startswith(signature):
            continue
        suffix = path.suffix.lower()
        if kind == "a ZIP archive" and suffix in ZIPPED_DOCUMENTS:
            return ZIPPED_DOCUMENTS[suffix], SAVE_REMEDY
        return kind, remedy
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
        arrow = _import_pyarrow(file.path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"))
    return raw


def _import_pyarrow(place: object) -> Any:
    """Import pyarrow, which only some formats need; MachineError if it is not installed."""
    try:
        import pyarrow  # noqa: PLC0415 - optional, and slow to load
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise make_missing_package_error(str(place), "pyarrow", "data") from None
    return pyarrow


def _decode_blocks(file: File, stream: BinaryIO) -> Iterator[str]:
    """Decode a stream block by block, without a byte order mark; CR LF and CR become LF."""
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
            # The decoder had kept back an incomplete character from the block before.
            at = offset + len(block) - len(error.object) + error.start
            # If only ASCII comes before, the whole text is likely in another encoding.
            other_encoding = offset == 0 and block[:at].isascii()
            remedy = _suggest_conversion(block) if other_encoding else CONVERT_REMEDY
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
    """Suggest how to convert a text in another encoding, which `block` is the beginning of."""
    encoding = "WINDOWS-1252"
    non_ascii = block.translate(None, bytes(range(128)))
    if len(non_ascii) > 0.3 * len(block):
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("gb18030")().decode(block)
            encoding = "GB18030"
    return f"convert it, for example with: iconv -f {encoding} -t UTF-8, or pass --errors replace"


def _split_documents(blocks: Iterable[str], separator: str) -> Iterator[TextChunk]:
    """Split a text into documents at separators, and these into chunks."""
    rest = ""
    starts_document = True
    for block in blocks:
        rest += block
        if separator:
            *complete, rest = rest.split(separator)
            for text in complete:
                yield from _split_chunks(text, starts_document)
                starts_document = True
        # Keep the length of a separator back: half of one may stand at the end of the block.
        while len(rest) >= TEXT_BLOCK_SIZE + len(separator):
            cut = find_boundary(rest, TEXT_BLOCK_SIZE)
            yield TextChunk(rest[:cut], starts_document)
            starts_document = False
            rest = rest[cut:]
    yield from _split_chunks(rest, starts_document)


def _split_chunks(text: str, starts_document: bool) -> Iterator[TextChunk]:
    """Split a text into chunks of at most TEXT_BLOCK_SIZE characters; none if it is empty."""
    for part in split_text(text):
        yield TextChunk(part, starts_document)
        starts_document = False


def _read_json_lines(file: File, stream: BinaryIO, key: str) -> Iterator[Document]:
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
        yield _get_document(place, record, key, file.errors)


def _read_csv(file: File, stream: BinaryIO, key: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(stream, "utf-8-sig", file.errors, newline="")
    rows = csv.reader(text)
    try:
        columns = next(rows, [])
        first_line = rows.line_num + 1  # of the next row, which may have several
        for row in rows:
            place = f"{file.path}:{first_line}"
            first_line = rows.line_num + 1
            if row:  # not an empty line
                record = dict.fromkeys(columns) | dict(zip(columns, row, strict=False))
                yield _get_text(place, record, key, file.errors)
    except UnicodeDecodeError:
        raise DataError(
            describe_invalid_utf8(file.path, f"after line {rows.line_num}", CONVERT_REMEDY)
        ) from None
    finally:
        text.detach()  # `open_unchanged` closes the stream


def _read_parquet(file: File, stream: BinaryIO, key: str) -> Iterator[Document]:
    table = _import_pyarrow(file.path).parquet.ParquetFile(stream)
    columns = table.schema_arrow.names
    wanted = [key]
    if key not in columns and "messages" in columns:
        wanted = [name for name in columns if name in ("messages", *PROMPT_FIELDS)]
    elif key not in columns and file.hub_file is not None:
        repository = file.hub_file.repository
        raise DataError(
            f"hf:{repository}: {file.hub_file.name} has no column {key!r} (it has: "
            f"{', '.join(columns)}); name one of these last, as in hf:{repository}:{columns[0]}"
        )
    elif key not in columns:
        _get_text(str(file.path), dict.fromkeys(columns), key, file.errors)  # raises
    number = 0
    for batch in table.iter_batches(1000, columns=wanted):
        for record in batch.to_pylist():
            number += 1
            yield _get_document(f"{file.path}: row {number}", record, key, file.errors)


def _get_document(place: str, record: dict[str, Any], key: str, errors: str) -> Document:
    """Get the text under a key of a record, or its messages; DataError if there is neither."""
    conversation = find_conversation(place, record, key)
    if conversation is None:
        return _get_text(place, record, key, errors)
    for message in conversation.messages:
        message["content"] = _get_text(place, message, "content", errors)
    return conversation


def _get_text(place: str, record: dict[str, Any], key: str, errors: str) -> str:
    """Get the text under a key of a record; DataError if there is none."""
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
    """Read the language reference that help() shows, one document per topic."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, seldom needed

    return (topics[name] for name in sorted(topics))


Reader = Callable[[File, BinaryIO, str], Iterator[Document]]
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
