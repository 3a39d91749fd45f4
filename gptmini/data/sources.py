"""From paths to documents: files, folders, globs, standard input and built-in corpora.

A source is a list of files and how to read them; a part is what its split leaves for training,
validation or a test. Both are read block by block, so they may be larger than memory. Reading them
again gives the same text, or an error that names the file that changed.
"""

import glob
import hashlib
import json
import os
import pydoc_data
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from gptmini.config.settings import DataConfig
from gptmini.console import say, show_byte_progress, warn
from gptmini.data.formats import (
    KIND_BY_SUFFIX,
    SNIFFED_BYTES,
    File,
    detect_binary,
    open_unchanged,
    raise_unreadable,
    read_documents,
)
from gptmini.errors import DataError
from gptmini.tokenizer.chunks import TEXT_BLOCK_SIZE, TextChunk, find_boundary

STDLIB_DIR = Path(os.__file__).parent  # the standard library's sources
say_once, warn_once = cache(say), cache(warn)  # variants are compared on the same files
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
BUILTIN_CORPORA = ("builtin:python-docs", "builtin:python-code")


@dataclass(frozen=True)
class Source:
    """Files in reading order, and how to read them."""

    name: str
    files: tuple[File, ...]
    settings: DataConfig

    @property
    def bytes(self) -> int:
        """Size on disk, compressed where the files are."""
        return sum(file.bytes for file in self.files)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that determines the text: bytes, formats and options."""
        options = [self.settings.text_key, _normalize_newlines(self.settings.separator)]
        hashed = hashlib.sha256(json.dumps(options).encode())
        converted = []
        for file in self.files:
            returns = False
            hashed.update(
                json.dumps([file.kind, file.compression, file.errors, file.bytes]).encode()
            )
            with open_unchanged(file) as raw:
                while block := raw.read(TEXT_BLOCK_SIZE):
                    hashed.update(block)
                    returns = returns or b"\r" in block
            if file.kind == "text" and (returns or file.compression):
                hashed.update(b"line feeds")  # the same bytes gave other tokens when CR was kept
                converted += [file.path] * (not file.compression)
        if converted:
            say_once(f"{_abbreviate(converted)}: Windows line ends (CR LF) are read as LF")
        return hashed.hexdigest()

    @cached_property
    def text_bytes(self) -> int:
        """Size of the text in UTF-8; DataError if it is all white space."""
        size = 0
        with show_byte_progress("reading the text", self.bytes) as advance:
            for text, _ in self.iter_checked_chunks():
                length = _utf8_length(text)
                size += length
                advance(length)
        return size

    def iter_chunks(self) -> Iterator[TextChunk]:
        """The text, document by document, without empty ones.

        Anything that is not valid text raises a DataError with the file and the position.
        """
        key, separator = self.settings.text_key, _normalize_newlines(self.settings.separator) or ""
        return (piece for file in self.files for piece in read_documents(file, key, separator))

    def iter_checked_chunks(self) -> Iterator[TextChunk]:
        """The same; DataError at its end if it was all white space."""
        return _check_not_blank(
            self.iter_chunks(), f"{self.name}: contains no text; choose a file that has some"
        )


@dataclass(frozen=True)
class SourceSplit:
    """One side of a source that is split in three, before any tokenizer sees it.

    `validation` and `test` are fractions of the text, or of the documents.
    """

    source: Source
    side: Literal["training", "validation", "test"]
    validation: float
    test: float

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def bytes(self) -> int:
        """Size of the whole source on disk."""
        return self.source.bytes

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that determines this side of the text."""
        rule = [self.source.settings.split, self.side, self.validation, self.test]
        return hashlib.sha256(json.dumps([self.source.digest, *rule]).encode()).hexdigest()

    def iter_chunks(self) -> Iterator[TextChunk]:
        """This side of the text, as Source.pieces."""
        return self._stretch() if self.source.settings.split == "tail" else self._documents()

    def iter_checked_chunks(self) -> Iterator[TextChunk]:
        """The same; DataError at its end if the split leaves no text for this side."""
        if self.source.settings.split == "tail":
            return self._stretch()  # it has checked the whole
        return _check_not_blank(
            self._documents(),
            f"{self.name}: its split leaves no document for {self.side}; use a text with more "
            f"documents, or hold out the tail with --set data.split=tail",
        )

    def _stretch(self) -> Iterator[TextChunk]:
        """Training text first, then test, then validation; cut between words where it can."""
        size = self.source.text_bytes
        test = max(1, round(size * self.test)) if self.test else 0
        validation = max(1, round(size * self.validation)) if self.validation else 0
        cuts = [0, size - validation - test, size - validation, size]
        place = ("training", "test", "validation").index(self.side)
        first, last = cuts[place], cuts[place + 1]
        reach = min(4096, size // 100)  # a short text is not cut far from where it was asked to be
        at = 0  # bytes before this piece
        for text, starts_document in self.source.iter_chunks():
            if at >= last:
                return
            length = _utf8_length(text)
            start, end = (_find_cut(text, length, place - at, reach) for place in (first, last))
            if start < end:
                yield TextChunk(text[start:end], starts_document and start == 0)
            at += length

    def _documents(self) -> Iterator[TextChunk]:
        """The documents of this side; the hash of a document's first piece decides alone."""
        ours = False
        for piece in self.source.iter_chunks():
            if piece.starts_document:
                number = int.from_bytes(hashlib.sha256(piece.text.encode()).digest()[:8])
                if number < self.validation * 2**64:
                    ours = self.side == "validation"
                elif number < (self.validation + self.test) * 2**64:
                    ours = self.side == "test"
                else:
                    ours = self.side == "training"
            if ours:
                yield piece


def _check_not_blank(pieces: Iterator[TextChunk], problem: str) -> Iterator[TextChunk]:
    """The same pieces; a DataError at their end if they were all white space."""
    blank = True
    for piece in pieces:
        blank = blank and not piece.text.strip()
        yield piece
    if blank:
        raise DataError(problem)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _find_cut(text: str, length: int, offset: int, reach: int) -> int:
    """The character at which to cut a text of `length` bytes about `offset` bytes in."""
    if offset <= 0:
        return 0
    if offset >= length:
        return len(text)
    return find_boundary(text, len(text.encode()[:offset].decode("utf-8", "ignore")), reach)


@contextmanager
def stdin_as_file(paths: list[str], folder: Path) -> Iterator[list[str]]:
    """The paths, with `-` replaced by a file that holds standard input until the block ends."""
    if "-" not in paths:
        yield paths
        return
    # Named before it exists and deleted twice, so that nothing stays wherever a signal comes, even
    # in the first `finally`. One inside tempfile.mkdtemp would leave a folder nobody knows of.
    file = folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            with open(file, "xb", opener=_open_private) as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy, TEXT_BLOCK_SIZE)
            yield [str(file) if path == "-" else path for path in paths]
        finally:
            file.unlink(missing_ok=True)
    except DataError as error:
        lines = (line.replace(str(file), "standard input") for line in error.lines)
        raise DataError(*lines) from None
    finally:
        file.unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner may read."""
    return os.open(path, flags, 0o600)


def _normalize_newlines(separator: str | None) -> str | None:
    """A separator as it is in a text, where CR LF and CR have become LF."""
    return separator and separator.replace("\r\n", "\n").replace("\r", "\n")


# -- finding files ---------------------------------------------------------------------------------


def find_source(paths: list[str], settings: DataConfig) -> Source:
    """Resolve paths; DataError if one is missing or is not a regular file."""
    files = [file for path in paths for file in _find_files(path, settings.errors)]
    names = [(file.path, file.path.name.lower().removesuffix(file.compression)) for file in files]
    if html := [path for path, name in names if name.endswith(HTML_SUFFIXES)]:
        warn_once(
            f"{_abbreviate(html)}: HTML, trained on with its tags; extract the text to avoid that"
        )
    return Source(", ".join(paths), tuple(files), settings)


def _find_files(path: str, errors: str) -> list[File]:
    if path == "builtin:python-docs":
        return [
            replace(
                _describe_file(Path(pydoc_data.__path__[0]) / "topics.py", errors), kind="topics"
            )
        ]
    if path == "builtin:python-code":
        skipped = {"site-packages", "test", "tests"}
        modules = sorted(STDLIB_DIR.rglob("*.py"))
        modules = [
            file for file in modules if skipped.isdisjoint(file.relative_to(STDLIB_DIR).parts)
        ]
        return [_describe_file(file, "replace") for file in modules]
    if path.startswith("builtin:"):
        raise DataError(f"{path}: no such corpus; choose {' or '.join(BUILTIN_CORPORA)}")
    place = Path(os.path.expanduser(path))  # Path.expanduser can raise
    links: set[Path] = set()
    if place.is_dir():
        found = [Path(root) / name for root, names in _walk(place, links) for name in names]
    elif not place.exists() and any(character in path for character in "*?["):
        found = sorted(_match_pattern(place, links), key=str)
        found = [match for match in found if not match.is_dir()]
    else:
        return [_describe_file(place, errors)]
    if links:
        warn_once(f"{path}: symbolic links to folders are skipped: {_abbreviate(sorted(links))}")
    if not found:
        raise DataError(
            f"{path}: no files found; give a folder that has some, or a pattern such as "
            f"'texts/**/*.md'"
        )
    files = [_describe_file(file, errors) for file in found]
    others = {file: kind for file in files if (kind := _detect_binary_file(file))}
    if others:
        named = _abbreviate(f"{file.path} ({kind})" for file, kind in others.items())
        if len(others) == len(files):
            raise DataError(
                f"{path}: no text files found, only {named}; give a folder that has some"
            )
        warn_once(f"{path}: files that are not text are skipped: {named}")
    return [file for file in files if file not in others]


def _detect_binary_file(file: File) -> str | None:
    """What a file is that would be read as plain text but is not."""
    if file.kind != "text" or file.compression:
        return None
    with open_unchanged(file) as raw:
        problem = detect_binary(file.path, raw.read(SNIFFED_BYTES))
    return problem and problem[0]


def _walk(folder: Path, links: set[Path]) -> Iterator[tuple[str, list[str]]]:
    """Every folder below one, itself first, with its files, sorted, without hidden ones.

    Symbolic links to folders are added to `links` instead of followed, as they may form loops.
    """
    for root, folders, names in os.walk(folder, onerror=raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links.update(
            Path(root, name) for name in folders if os.path.islink(os.path.join(root, name))
        )
        yield root, sorted(name for name in names if not name.startswith("."))


def _match_pattern(pattern: Path, links: set[Path]) -> set[Path]:
    """The paths that a pattern matches; `**` walks folders as above (glob.glob follows links)."""
    if "**" not in pattern.parts:
        return set(map(Path, glob.glob(str(pattern))))
    at = pattern.parts.index("**")
    rest = Path(*pattern.parts[at + 1 :] or "*")
    return {
        match
        for start in glob.glob(str(Path(*pattern.parts[:at])))
        for root, _ in _walk(Path(start), links)
        for match in _match_pattern(Path(glob.escape(root)) / rest, links)
    }


def _abbreviate(things: Iterable[object]) -> str:
    """The first of some things, and how many more there are."""
    first, *others = things
    return f"{first} and {len(others)} more" if others else f"{first}"


def _describe_file(path: Path, errors: str) -> File:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        from gptmini.data.fetch import KNOWN_CORPORA  # noqa: PLC0415 - loads urllib

        if path in [Path("data", f"{name}.txt") for name in KNOWN_CORPORA]:
            raise_unreadable(error, path, f"get it with: gptmini data fetch {path.stem}")
        raise_unreadable(error, path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; pipe it in with --data -")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    kind = KIND_BY_SUFFIX.get(suffixes[-1] if suffixes else "", "text")
    return File(path, kind, packing, status.st_size, status.st_mtime_ns, errors)
