"""Read the documents of one file: plain text, JSON lines, CSV or Parquet, compressed or not.

Files are read block by block, so they may be larger than memory. Anything that is not valid text
raises a DataError with the file and the position.
"""

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NoReturn

from gptmini import files
from gptmini.console import quote, say, warn
from gptmini.data.chats import MESSAGE_LISTS, PROMPT_FIELDS, find_messages
from gptmini.data.stories import COUNT, iter_stories
from gptmini.errors import (
    DataError,
    describe_invalid_utf8,
    describe_os_error,
    make_missing_package_error,
)
from gptmini.tokenizer.chat_template import Message
from gptmini.tokenizer.chunks import TEXT_BLOCK_SIZE, Place, TextChunk, find_boundary, split_text

CONVERT_REMEDY = (
    "convert it, from Latin-1 with: iconv -f latin1 -t utf-8 OLD > NEW; or mark what is lost as "
    "\N{REPLACEMENT CHARACTER}: --set data.errors=replace"
)
DOCUMENT_REMEDY = "save it as .txt, or extract its text with pandoc -t plain"
PYTHON_DOCS = "builtin:python-docs"
STORIES = "builtin:stories"
SNIFFED_BYTES = 8192  # enough to see a signature, or a NUL byte as in git

# The first bytes of files that people take for text; their names, and what to do with them.
SIGNATURES = {
    codecs.BOM_UTF16_LE: ("UTF-16 or UTF-32", "convert it: iconv -f utf-16 -t utf-8 OLD > NEW"),
    codecs.BOM_UTF16_BE: ("UTF-16", "convert it: iconv -f utf-16 -t utf-8 OLD > NEW"),
    b"%PDF-": ("a PDF document", "extract its text, for example with pdftotext"),
    b"{\\rtf": ("an RTF document", DOCUMENT_REMEDY),
    b"PK\3\4": ("a ZIP archive or an Office document", f"unpack it, or {DOCUMENT_REMEDY}"),
    b"\x1f\x8b": ("gzip data", "end its name in .gz"),
    b"(\xb5/\xfd": ("zstd data", "end its name in .zst"),
    b"BZh": ("bzip2 data", "pipe it in: bzcat FILE | gptmini train --data -"),
}
CSV_DELIMITERS = ",;\t|"
PARQUET_BATCH_BYTES = 1 << 24  # of a row group, read together
PARQUET_BATCH_ROWS = 1000

Document = str | list[Message]  # the messages of a conversation
Record = tuple[Place, dict[str, Any]]  # its line or row, and its fields


@cache  # a text is read several times
def warn_once(*lines: str) -> bool:
    """Warn about a text, unless an earlier command did; return whether this one did."""
    hashed = hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
    told = files.get_cache_folder() / f"{hashed[:20]}.told"
    with suppress(OSError):  # a cache that cannot be written
        if told.exists():
            return False
        told.parent.mkdir(parents=True, exist_ok=True)
        told.touch()
    warn(lines[0])
    for line in lines[1:]:
        say(f"  {line}")
    return True


@dataclass(frozen=True)
class File:
    """A file as it was found; `kind` says how to read it."""

    path: Path
    kind: str  # "text" or a key of READER_BY_KIND
    compression: str  # ".gz", ".zst" or ""
    bytes: int
    modified_ns: int
    errors: str  # how to decode, as in bytes.decode: "strict" or "replace"


def read_documents(file: File, text_key: str, separator: str) -> Iterator[TextChunk]:
    """Read the documents of a file; `separator` splits only plain text."""
    with open_unchanged(file) as raw, _report_damage(file):
        stream = _decompress(file, raw)
        if file.kind in ("text", "jsonl", "csv"):
            _check_signature(file, stream)
        if file.kind == "text":
            blocks = _decode_blocks(file, stream)
            yield from _split_documents(blocks, separator, Place(str(file.path), 1))
        else:
            records = READER_BY_KIND[file.kind](file, stream, text_key)
            for place, document in _find_documents(file, records, text_key):
                if isinstance(document, list):
                    contents = [message["content"] for message in document]
                    yield TextChunk("\n".join(contents), True, document, place)
                else:
                    yield from _split_chunks(document, True, place)


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
        if (now.st_size, now.st_mtime_ns) != (file.bytes, file.modified_ns):
            raise DataError(
                f"{file.path}: changed while being read; run again when nothing writes to it"
            )


def _check_signature(file: File, stream: BinaryIO) -> None:
    """DataError for a file that begins as something else than plain text in UTF-8."""
    head = stream.peek(SNIFFED_BYTES)[:SNIFFED_BYTES]  # type: ignore[attr-defined]
    found = [what for signature, what in SIGNATURES.items() if head.startswith(signature)]
    if found and file.path.suffix.lower() in (".docx", ".odt"):
        found = [("a Word document", "save it as plain text (UTF-8)")]
    if b"\0" in head:
        found.append(("binary data", "unpack it, or choose a text file"))
    if found:
        kind, remedy = found[0]
        remedy = _name_files(remedy, file.path)
        raise DataError(f"{file.path}: {kind}, not plain text; {remedy}")


def _name_files(remedy: str, path: Path) -> str:
    """Put the name of a file and one for its conversion into a command."""
    return remedy.replace("OLD", quote(path)).replace(
        "NEW", quote(path.with_stem(f"{path.stem}-utf8"))
    )


@contextmanager
def _report_damage(file: File) -> Iterator[None]:
    """Turn errors of decompression and parsing into a DataError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, OSError, ValueError) as error:
        raise DataError(f"{file.path}: damaged ({error}); replace it with an intact copy") from None


def _decompress(file: File, raw: BinaryIO) -> BinaryIO:
    if file.compression == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if file.compression == ".zst":
        arrow = import_pyarrow(file.path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"))
    return raw


def import_pyarrow(place: object) -> Any:
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
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # The decoder had kept back an incomplete character from the block before.
            at = offset + len(block) - len(error.object) + error.start
            position = f"at byte {at}"
            remedy = _name_files(CONVERT_REMEDY, file.path)
            raise DataError(describe_invalid_utf8(file.path, position, remedy)) from None
        if "\0" in text:
            raise DataError(
                f"{file.path}: contains NUL bytes, so it is not text; select only text files, "
                f"as in '{file.path.parent}/**/*.txt'"
            )
        yield text
        if not block:
            return
        offset += len(block)


def _split_documents(blocks: Iterable[str], separator: str, place: Place) -> Iterator[TextChunk]:
    """Split a text that begins at a place into documents at separators, and these into chunks."""
    rest = ""
    starts_document = True
    for block in blocks:
        rest += block
        if separator:
            *complete, rest = rest.split(separator)
            for text in complete:
                yield from _split_chunks(text, starts_document, place)
                starts_document = True
                place = place.after(text + separator)
        # Keep the length of a separator back: half of one may stand at the end of the block.
        while len(rest) >= TEXT_BLOCK_SIZE + len(separator):
            cut = find_boundary(rest, TEXT_BLOCK_SIZE)
            yield TextChunk(rest[:cut], starts_document, place=place)
            starts_document = False
            place = place.after(rest[:cut])
            rest = rest[cut:]
    yield from _split_chunks(rest, starts_document, place)


def _split_chunks(text: str, starts_document: bool, place: Place) -> Iterator[TextChunk]:
    """Split a text into chunks of at most TEXT_BLOCK_SIZE characters; none if it is empty."""
    for part in split_text(text):
        yield TextChunk(part, starts_document, place=place)
        starts_document = False
        place = place.after(part)


def _decode_lines(file: File, stream: BinaryIO) -> Iterator[str]:
    """Decode a stream line by line, without byte order marks; line ends stay.

    A file that was appended to another has its mark in the middle.
    """
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode("utf-8-sig", file.errors)
        except UnicodeDecodeError as error:
            place = f"{file.path}:{number}"
            position = f"at byte {error.start}"
            remedy = _name_files(CONVERT_REMEDY, file.path)
            raise DataError(describe_invalid_utf8(place, position, remedy)) from None


def _read_json_lines(file: File, stream: BinaryIO, key: str) -> Iterator[Record]:
    for number, line in enumerate(_decode_lines(file, stream), 1):
        place = Place(str(file.path), number, is_record=True)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            remedy = "fix or remove the line"
            if number == 1:
                remedy += ", or end its name in .txt if it is plain text"
            raise DataError(f"{place}: not valid JSON ({reason}); {remedy}") from None
        if not isinstance(record, dict):
            raise DataError(f'{place}: not a JSON object; write it as {{"{key}": "..."}}')
        yield place, record


def _read_csv(file: File, stream: BinaryIO, key: str) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)
    # As the module csv wants them: with their ends, which may be CR alone.
    whole_lines = _decode_lines(file, stream)
    lines = chain.from_iterable(io.StringIO(line, newline="") for line in whole_lines)
    place = Place(str(file.path), 1, is_record=True)
    header = next(lines, "")
    if not header:
        return
    delimiter, columns = _split_header(place, header, key)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    place = place._replace(line=2)
    try:
        for row in rows:
            # Excel leaves out empty fields at the end of a row.
            if row and not columns.index(key) < len(row) <= len(columns):
                raise DataError(
                    f"{place}: {len(row)} fields, but the header has {len(columns)}; put texts "
                    f'in quotes, and write a quote in them as ""'
                )
            if row:  # not an empty line
                yield place, dict(zip(columns, row, strict=False))
            place = place._replace(line=2 + rows.line_num)  # a row may have many lines
    except csv.Error as error:
        raise DataError(
            f'{place}: not valid CSV ({error}); close its quotes, and write a quote in a text as ""'
        ) from None


def _split_header(place: Place, header: str, key: str) -> tuple[str, list[str]]:
    """Find the delimiter by which the header of a CSV file has a column; return its columns."""
    possible: dict[str, list[str]] = {}
    for delimiter in CSV_DELIMITERS:
        with suppress(csv.Error):
            split = csv.reader([header], delimiter=delimiter, strict=True, skipinitialspace=True)
            possible[delimiter] = [name.strip() for name in next(split)]
    for delimiter, columns in possible.items():
        if columns.count(key) > 1:
            raise DataError(f"{place}: several columns {key!r}; rename or remove the others")
        if key in columns:
            return delimiter, columns
    columns = max(possible.values(), key=len, default=[])
    raise _make_missing_error(place, dict.fromkeys(columns), key)


def _read_parquet(file: File, stream: BinaryIO, key: str) -> Iterator[Record]:
    table = import_pyarrow(file.path).parquet.ParquetFile(stream)
    columns = table.schema_arrow.names
    if not {key, *MESSAGE_LISTS} & set(columns):
        raise _make_missing_error(file.path, dict.fromkeys(columns), key)
    # All that a line of JSON is searched for.
    wanted = [name for name in columns if name in (key, *MESSAGE_LISTS, *PROMPT_FIELDS)]
    number = 0
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group)
        fitting = PARQUET_BATCH_BYTES * size.num_rows // max(1, size.total_byte_size)
        n_rows = min(max(1, fitting), PARQUET_BATCH_ROWS)
        for batch in table.iter_batches(n_rows, row_groups=[group], columns=wanted):
            for record in batch.to_pylist():
                number += 1
                yield Place(str(file.path), number, is_record=True), record


def _find_documents(
    file: File, records: Iterable[Record], key: str
) -> Iterator[tuple[Place, Document]]:
    """Find the document of each record; a warning counts the records that have none.

    The first record must have the field, or a wrong `data.text_key` would leave out everything.
    """
    n_records = 0
    n_empty = 0
    first_empty: Place | None = None
    for place, record in records:
        n_records += 1
        document = _get_document(place, record, key, file.errors)
        if document is not None:
            yield place, document
            continue
        if n_records == 1 and key not in record:
            raise _make_missing_error(place, record, key, ", or remove this record")
        first_empty = first_empty or place
        n_empty += 1
    if n_empty:
        warn_once(
            f"{first_empty}: no text in field {key!r}; {n_empty:,} of {n_records:,} records are "
            f"left out"
        )


def _get_document(place: Place, record: dict[str, Any], key: str, errors: str) -> Document | None:
    """Get the text under a key of a record, or its messages; None if it has neither.

    Raises DataError for anything else.
    """
    messages = find_messages(place, record, key)
    if messages is not None:
        for message in messages:
            message["content"] = _check_text(place, "content", message["content"], errors)
        return messages
    if record.get(key) is None:
        return None
    return _check_text(place, key, record[key], errors)


def _make_missing_error(
    place: object, record: dict[str, Any], key: str, also: str = ""
) -> DataError:
    """Make the error for a record that lacks the field of the text."""
    names = ", ".join(map(str, record)) or "none"
    remedy = f"choose one with --set data.text_key=KEY{also}"
    if {"instruction", "output"} <= record.keys():
        remedy = "write them as messages, as docs/training.md shows under Conversations"
    return DataError(f"{place}: no field {key!r} (it has: {names}); {remedy}")


def _check_text(place: Place, key: str, text: Any, errors: str) -> str:
    """Return a text that can be encoded; DataError for anything else."""
    if not isinstance(text, str):
        raise DataError(f"{place}: field {key!r} is {text!r:.40}, not text; fix or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        if errors == "strict":
            raise DataError(
                f"{place}: field {key!r} has half a character (a lone surrogate) at position "
                f"{error.start}; fix it, or pass --set data.errors=replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_topics(file: File, stream: BinaryIO, key: str) -> Iterator[Record]:
    """Read the language reference that help() shows, one record per topic."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, seldom needed

    return ((Place(f"{PYTHON_DOCS}, {name}", 1), {key: topics[name]}) for name in sorted(topics))


def _read_stories(file: File, stream: BinaryIO, key: str) -> Iterator[Record]:
    """Read the stories that a grammar makes up, one record per story."""
    numbered = enumerate(islice(iter_stories(), COUNT), start=1)
    return (
        (Place(f"{STORIES}, story {number}", 1), {key: story.text}) for number, story in numbered
    )


Reader = Callable[[File, BinaryIO, str], Iterator[Record]]
READER_BY_KIND: dict[str, Reader] = {
    "jsonl": _read_json_lines,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "topics": _read_topics,
    "stories": _read_stories,
}
CHAT_KINDS = ("jsonl", "parquet")  # whose records may be conversations
KIND_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
COMPRESSION_SUFFIXES = (".gz", ".zst")


def find_format(name: str) -> tuple[str, str, str]:
    """Find by its name a file's kind, its compression, and the suffix that says the kind."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    compression = ""
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        compression = suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    return KIND_BY_SUFFIX.get(suffix, "text"), compression, suffix


def raise_unreadable(error: Exception, path: Path) -> NoReturn:
    """Raise a DataError for a file that cannot be read."""
    thing = "its permissions" if isinstance(error, PermissionError) else "the path"
    remedy = files.suggest_file(path) or f"check {thing}"
    raise DataError(f"{path}: {describe_os_error(error)}; {remedy}") from None
