"""A corpus as a file of tokens: written once, checked, read by position.

A source is a text file or a corpus that every Python carries. Its documents, each behind a document
token, become one token file in the cache, named by the hashes of the content and of the tokenizer.
The file has a header, is written aside, synced and renamed, and is hashed before it is used.
"""

import codecs
import hashlib
import os
import stat
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from gptmini import tokenizer as tokenizers
from gptmini.errors import DataError, MachineError
from gptmini.files import aside
from gptmini.tokenizer import Tokenizer, Tokens

# magic, version, bytes per token, tokens, SHA-256 of: tokenizer, content, all token bytes
HEADER = struct.Struct("<8sIIQ32s32s32s")
MAGIC, VERSION = b"gptmini\n", 1
BLOCK = 1 << 20  # bytes of text that are encoded at a time


class Piece(NamedTuple):
    """A stretch of text; documents may come in several."""

    text: str
    starts_document: bool


# -- sources ---------------------------------------------------------------------------------------


def pieces(source: str) -> Iterator[Piece]:
    """The text of a source, piece by piece, the same at every call.

    Raises DataError for what is no UTF-8 text, naming the file and the byte.
    """
    if source in BUILTIN:
        for document in BUILTIN[source]():
            yield Piece(document, True)
    elif source.startswith("builtin:"):
        raise DataError(f"{source}: no such corpus; known: {', '.join(BUILTIN)}")
    else:
        yield from _file_pieces(Path(source))


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that few commands need

    for name in sorted(topics):
        yield topics[name]


def _python_code() -> Iterator[str]:
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if "site-packages" not in parts and "test" not in parts and "tests" not in parts:
            yield path.read_text("utf-8", "replace")


BUILTIN = {"builtin:python-docs": _python_docs, "builtin:python-code": _python_code}


def _file_pieces(path: Path) -> Iterator[Piece]:
    """A file in pieces that end at line ends, so that words stay whole on lines under 1 MiB."""
    with _open_text(path) as file:
        before = os.fstat(file.fileno())
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        kept, offset, first = "", 0, True
        while True:
            block = file.read(BLOCK)
            try:
                kept += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = offset + len(block) - len(error.object) + error.start
                raise DataError(f"{path}: byte {at} is not UTF-8; convert the file") from None
            if "\0" in kept:
                raise DataError(f"{path}: holds NUL bytes, so it is no text; name a text file")
            offset += len(block)
            cut = kept.rfind("\n") + 1 or len(kept)
            text, kept = (kept[:cut], kept[cut:]) if block else (kept, "")
            if text:
                yield Piece(text, first)
                first = False
            if not block:
                break
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise DataError(f"{path}: changed while it was read; run again when it is at rest")


def _open_text(path: Path) -> BinaryIO:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise DataError(f"{path}: is {what}; name a UTF-8 text file")
        return path.open("rb")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        known = " or ".join(BUILTIN)
        raise DataError(f"{path}: {reason}; name a UTF-8 text file, or {known}") from None


# -- preparing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A prepared source: its tokenizer and its tokens."""

    source: str
    tokenizer: Tokenizer
    tokens: "TokenFile"


def prepare(source: str, kind: str, cache: Path) -> Corpus:
    """The token file of a source under a kind of tokenizer, from the cache where it is there."""
    content = hashlib.sha256()
    blank = True
    for piece in pieces(source):
        _hash(content, piece)
        blank = blank and not piece.text.strip()
    if blank:
        raise DataError(f"{source}: holds no text; name a file with some")
    tokenizer = tokenizers.create(kind, (piece.text for piece in pieces(source)))
    digest = content.hexdigest()
    path = cache / f"{digest[:20]}-{tokenizer.kind}-{tokenizer.fingerprint()[:20]}.tokens"
    if path.exists():
        try:
            return Corpus(source, tokenizer, TokenFile(path, tokenizer))
        except DataError:
            pass  # a damaged cache file is made again
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _write(path, source, tokenizer, digest)
    except OSError as error:
        raise MachineError(
            f"{cache}: {(error.strerror or str(error)).lower()}; "
            f"name a writable folder with --cache"
        ) from None
    return Corpus(source, tokenizer, TokenFile(path, tokenizer))


def _write(path: Path, source: str, tokenizer: Tokenizer, content: str) -> None:
    """Encode a source into a token file that appears under its name only when it is whole."""
    dtype = token_dtype(tokenizer.vocab_size)
    count, payload, read = 0, hashlib.sha256(), hashlib.sha256()
    with aside(path) as file:
        file.write(bytes(HEADER.size))
        for piece in pieces(source):
            _hash(read, piece)
            tokens = tokenizer.encode(piece.text)
            if piece.starts_document:
                tokens = np.insert(tokens, 0, tokenizer.document_token)
            data = tokens.astype(dtype).tobytes()
            count += len(tokens)
            payload.update(data)
            file.write(data)
        if read.hexdigest() != content:
            raise DataError(f"{source}: changed while it was read; run again when it is at rest")
        hashes = (bytes.fromhex(tokenizer.fingerprint()), read.digest(), payload.digest())
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, count, *hashes))


def _hash(content: "hashlib._Hash", piece: Piece) -> None:
    """Add a piece to the hash of a source; NUL, which no text holds, tells documents apart."""
    content.update(b"\0" * piece.starts_document + piece.text.encode())


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smallest type for all token numbers; numpy would wrap larger ones in silence."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


# -- reading ---------------------------------------------------------------------------------------


class TokenFile:
    """A checked token file; `read` takes a stretch of it without loading the rest."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        """Open and check everything; raises DataError naming the file and what differs."""
        self.path = path
        self.file = path.open("rb", buffering=0)
        weakref.finalize(self, self.file.close)
        header = self.file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{path}: no token file of gptmini; remove it")
        _, version, size, self.count, fingerprint, content, payload = HEADER.unpack(header)
        self.content: str = content.hex()
        self.dtype = token_dtype(tokenizer.vocab_size)
        if version != VERSION or size != self.dtype.itemsize:
            raise DataError(f"{path}: version {version}, {size} bytes a token; remove it")
        if fingerprint.hex() != tokenizer.fingerprint():
            raise DataError(f"{path}: made by another tokenizer; remove it")
        need, have = HEADER.size + self.count * size, os.fstat(self.file.fileno()).st_size
        if have != need:
            raise DataError(f"{path}: has {have} bytes of {need}; remove it")
        hashed = hashlib.sha256()
        while block := self.file.read(BLOCK):
            hashed.update(block)
        if hashed.digest() != payload:
            raise DataError(f"{path}: its SHA-256 does not agree; remove it")

    def read(self, start: int, count: int) -> Tokens:
        """Tokens (count,) from position start; DataError if the file has been cut since."""
        size = self.dtype.itemsize
        self.file.seek(HEADER.size + start * size)
        data = self.file.read(count * size)
        if len(data) != count * size:
            raise DataError(
                f"{self.path}: cut while in use ({len(data)} of {count * size} bytes at token "
                f"{start}); remove it and run again"
            )
        return np.frombuffer(data, self.dtype).astype(np.uint32)

    def __len__(self) -> int:
        return self.count
