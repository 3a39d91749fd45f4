"""Files of tokens: written once, checked, read by position. A token file is

    header      version, bytes per token, tokens, bytes of text, and the SHA-256 of the tokenizer,
                of the content and of the table
    tokens      little-endian, 16 or 32 bits each; a document token before each document
    table       the SHA-256 of every BLOCK bytes of tokens

and appears under its name only when it is whole. No token is used before its block is checked.
"""

import hashlib
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gptmini import files
from gptmini.errors import DataError
from gptmini.text import tokenizer as tokenizers
from gptmini.text.tokenizer import Piece, Tokenizer, Tokens

if TYPE_CHECKING:
    from gptmini.text.sources import Source

HEADER = struct.Struct("<8sIIQQ32s32s32s")
MAGIC, VERSION = b"gptmini\n", 2
BLOCK = 1 << 20  # bytes of tokens that are hashed together
CHECKED_AT_ONCE = 1 << 30  # larger files are checked block by block as they are read


def write(
    path: Path,
    source: "Source",
    digest: str,
    tokenizer: Tokenizer,
    advance: Callable[[int], object],
) -> None:
    """Encode a source into a token file."""
    dtype = token_dtype(tokenizer.vocab_size)
    table = Table()
    text_bytes, blank = 0, True
    with files.atomic_write(path) as file:
        file.write(bytes(HEADER.size))
        for pieces, tokens in _encoded(tokenizer, source.pieces()):
            read = sum(len(piece.text.encode()) for piece in pieces)
            blank = blank and not any(piece.text.strip() for piece in pieces)
            text_bytes += read
            data = tokens.astype(dtype).tobytes()
            table.update(data)
            file.write(data)
            advance(read)
        if blank and source.part != "all":
            raise DataError(
                f"{source.name}: no document falls to {source.part}; name a text with more "
                f"documents, or hold out its tail with data.split=tail"
            )
        if blank:
            raise DataError(f"{source.name}: holds no text; name a file with some")
        file.write(table.digests())
        count = table.length // dtype.itemsize
        file.seek(0)
        file.write(
            HEADER.pack(
                MAGIC,
                VERSION,
                dtype.itemsize,
                count,
                text_bytes,
                bytes.fromhex(tokenizer.fingerprint),
                bytes.fromhex(digest),
                hashlib.sha256(table.digests()).digest(),
            )
        )


def _encoded(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[list[Piece], Tokens]]:
    """The tokens of pieces, in their order, made on all cores (tiktoken needs no interpreter)."""
    workers = os.cpu_count() or 1
    waiting: deque[tuple[list[Piece], Future[Tokens]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in _batches(pieces):
            waiting.append((batch, pool.submit(_encode, tokenizer, batch)))
            if len(waiting) > 2 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups worth a thread's while: some have a hundred characters."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= tokenizers.BLOCK // 4:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, pieces: list[Piece]) -> Tokens:
    document = np.array([tokenizer.document_token], np.uint32)
    parts = []
    for piece in pieces:
        if piece.starts_document:
            parts.append(document)
        parts.append(tokenizer.encode(piece.text))
    return np.concatenate(parts)


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smallest type for all token numbers; numpy would wrap larger ones in silence."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Table:
    """The SHA-256 of every BLOCK bytes of what is given to update."""

    def __init__(self) -> None:
        self.length = 0
        self._whole: list[bytes] = []
        self._last = hashlib.sha256()

    def update(self, data: bytes) -> None:
        """Add the next bytes, in portions of any size."""
        rest = memoryview(data)
        while rest:
            part = rest[: BLOCK - self.length % BLOCK]
            self._last.update(part)
            self.length += len(part)
            rest = rest[len(part) :]
            if self.length % BLOCK == 0:
                self._whole.append(self._last.digest())
                self._last = hashlib.sha256()

    def digests(self) -> bytes:
        """32 bytes for each block, the last of which may be shorter."""
        return b"".join(self._whole) + (self._last.digest() if self.length % BLOCK else b"")


# -- reading ---------------------------------------------------------------------------------------


class TokenFile:
    """A token file; `read` takes a span of it without loading the rest."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        """Open and check; raises DataError naming the file and what differs."""
        self.path, self.vocab_size = path, tokenizer.vocab_size
        self.file = path.open("rb", buffering=0)
        weakref.finalize(self, self.file.close)
        have = os.fstat(self.file.fileno()).st_size
        header = self.file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{path}: no token file of gptmini; remove it")
        _, version, size, self.count, self.text_bytes, made_by, _, root = HEADER.unpack(header)
        self.dtype = token_dtype(tokenizer.vocab_size)
        if version != VERSION or size != self.dtype.itemsize:
            raise DataError(f"{path}: version {version}, {size} bytes a token; remove it")
        if made_by.hex() != tokenizer.fingerprint:
            raise DataError(f"{path}: made by another tokenizer; remove it")
        self._length = self.count * size
        blocks = -(-self._length // BLOCK)
        need = HEADER.size + self._length + 32 * blocks
        if have != need:
            raise DataError(f"{path}: has {have} bytes of {need}; remove it")
        self._table = self._bytes(self._length, 32 * blocks)
        if hashlib.sha256(self._table).digest() != root:
            raise DataError(f"{path}: its table of SHA-256 is damaged; remove it")
        self._unchecked = set(range(blocks))
        if self._length <= CHECKED_AT_ONCE:
            for block in range(blocks):
                self._check(block)

    def read(self, start: int, count: int) -> Tokens:
        """Tokens (count,) from position start; DataError if the file is no longer what it was."""
        size = self.dtype.itemsize
        if self._unchecked:
            for block in range(start * size // BLOCK, ((start + count) * size - 1) // BLOCK + 1):
                self._check(block)
        tokens = np.frombuffer(self._bytes(start * size, count * size), self.dtype)
        if count and (largest := int(tokens.max())) >= self.vocab_size:
            at = start + int(tokens.argmax())
            raise DataError(f"{self.path}: token {at} is {largest}, which there is not; remove it")
        return tokens.astype(np.uint32)

    def _check(self, block: int) -> None:
        """Hash a block when it is first used."""
        if block in self._unchecked:
            start = block * BLOCK
            data = self._bytes(start, min(BLOCK, self._length - start))
            if hashlib.sha256(data).digest() != self._table[32 * block : 32 * block + 32]:
                raise DataError(f"{self.path}: damaged after byte {start}; remove it")
            self._unchecked.remove(block)

    def _bytes(self, start: int, count: int) -> bytes:
        """Bytes behind the header; a file that is mapped would end the process when cut."""
        self.file.seek(HEADER.size + start)
        data = self.file.read(count)
        if len(data) != count:
            raise DataError(
                f"{self.path}: cut while in use ({len(data)} of {count} bytes at byte "
                f"{HEADER.size + start}); remove it and run again"
            )
        return data

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Span:
    """The tokens of a file from first up to last, which is not among them."""

    tokens: TokenFile
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Corpus:
    """A prepared text: its tokenizer, and what is learnt from and what is held out.

    `training` has one span, or one for each weight; `content` is the SHA-256 of everything.
    """

    name: str
    tokenizer: Tokenizer
    training: list[Span]
    validation: list[Span]
    content: str

    def summary(self, asked: str) -> str:
        """What text it is and how it became tokens, in a line; `asked` is the kind asked for."""
        spans = self.training + self.validation
        files = {span.tokens.path: span.tokens for span in spans}.values()
        size, tokens = sum(file.text_bytes for file in files), sum(map(len, files))
        held_out = sum(map(len, self.validation))
        kind = f"{self.tokenizer.kind} of {self.tokenizer.vocab_size:,}"
        chosen = ", chosen by the sizes of text and model" if asked == "auto" else ""
        return (
            f"corpus: {self.name}, {size:,} bytes in {tokens:,} tokens, {size / tokens:.2f} bytes "
            f"each ({kind}{chosen}), {held_out:,} held out"
        )
