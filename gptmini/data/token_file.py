"""Token files, written once, verified and read by position; and the corpus made of them.

A token file has three parts:

    header      version, bytes per token, number of tokens, bytes of text, number of documents, and
                the SHA-256 of the tokenizer, of the content and of the table
    tokens      little-endian, 16 or 32 bits each; a document token before each document
    table       the SHA-256 of every BLOCK bytes of tokens

It gets its name only when complete. No token is used before its block has been checked.
"""

import hashlib
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.errors import DataError, describe_os_error
from gptmini.tokenizer import chunks
from gptmini.tokenizer.chunks import TextChunk
from gptmini.tokenizer.tokenizers import Tokenizer, Tokens

HEADER = struct.Struct("<8sIIQQQ32s32s32s")
MAGIC, VERSION = b"gptmini\n", 3
HASH_BLOCK_BYTES = 1 << 20  # bytes of tokens hashed together
CHECK_ON_OPEN_MAX_BYTES = 1 << 30  # larger files are checked block by block as they are read
MIXTURE_CYCLE_WINDOWS = (
    1000  # the pattern in which weighted texts take turns repeats after as many windows
)


def write_token_file(
    path: Path,
    pieces: Iterator[TextChunk],
    digest: str,
    tokenizer: Tokenizer,
    advance: Callable[[int], object],
) -> None:
    """Encode a text into a token file. `digest` is its SHA-256; `advance` gets bytes of text."""
    dtype = get_token_dtype(tokenizer.vocab_size)
    text_bytes, token_bytes, documents, table = 0, 0, 0, b""

    def encoded() -> Iterator[bytes]:
        nonlocal text_bytes, documents
        for size, tokens in _encode_in_threads(tokenizer, pieces):
            text_bytes += size
            documents += int((tokens == tokenizer.document_token).sum())
            advance(size)
            yield tokens.astype(dtype).tobytes()

    with files.atomic_write(path) as file:
        file.write(bytes(HEADER.size))
        for block in iter_blocks(encoded()):
            file.write(block)
            token_bytes += len(block)
            table += hashlib.sha256(block).digest()
        file.write(table)
        file.seek(0)
        sizes = (dtype.itemsize, token_bytes // dtype.itemsize, text_bytes, documents)
        digests = (tokenizer.fingerprint, digest, hashlib.sha256(table).hexdigest())
        file.write(HEADER.pack(MAGIC, VERSION, *sizes, *map(bytes.fromhex, digests)))


def iter_blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of BLOCK; the last may be shorter."""
    rest = bytearray()
    for part in parts:
        rest += part
        while len(rest) >= HASH_BLOCK_BYTES:
            yield bytes(rest[:HASH_BLOCK_BYTES])
            del rest[:HASH_BLOCK_BYTES]
    if rest:
        yield bytes(rest)


def _encode_in_threads(
    tokenizer: Tokenizer, pieces: Iterator[TextChunk]
) -> Iterator[tuple[int, Tokens]]:
    """Encode pieces on all cores, in order (tiktoken releases the interpreter lock)."""
    workers = os.cpu_count() or 1
    waiting: deque[Future[tuple[int, Tokens]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in _group_chunks(pieces):
            waiting.append(pool.submit(_encode_chunks, tokenizer, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _group_chunks(pieces: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    """Group pieces until they are worth a thread: some have only a hundred characters."""
    batch: list[TextChunk] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= chunks.TEXT_BLOCK_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_chunks(tokenizer: Tokenizer, pieces: list[TextChunk]) -> tuple[int, Tokens]:
    """The bytes of text and the tokens of some pieces."""
    document = np.array([tokenizer.document_token], np.uint32)
    parts = []
    for text, starts_document in pieces:
        parts += [document] * starts_document + [tokenizer.encode(text)]
    return sum(len(piece.text.encode()) for piece in pieces), np.concatenate(parts)


def get_token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smallest type that holds every token; numpy silently wraps larger numbers."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


# -- reading ---------------------------------------------------------------------------------------


class TokenFile:
    """An open token file, read by position without loading the rest."""

    def __init__(self, path: Path, tokenizer: Tokenizer, prepared: bool = False) -> None:
        """Open and check; DataError if the file is damaged or belongs to another tokenizer.

        `prepared` files are not of the cache: they are checked where they are read, since other
        processes read the rest, and nothing makes them again by itself.
        """
        self.path, self.vocab_size, self.prepared = path, tokenizer.vocab_size, prepared
        try:
            self.file = files.open_regular(path, buffering=0)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unusable(describe_os_error(error)) from None
        weakref.finalize(self, self.file.close)
        have = os.fstat(self.file.fileno()).st_size
        header = self.file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise self._unusable("not a gptmini token file")
        _, version, size, *counts, made_by, content, root = HEADER.unpack(header)
        self.count, self.text_bytes, self.documents = counts
        self.content, self.root = content.hex(), root.hex()
        self.dtype = get_token_dtype(tokenizer.vocab_size)
        if version != VERSION or size != self.dtype.itemsize:
            raise self._unusable(f"version {version}, {size} bytes per token")
        if made_by.hex() != tokenizer.fingerprint:
            raise self._unusable("made with another tokenizer")
        self._length = self.count * size
        blocks = -(-self._length // HASH_BLOCK_BYTES)
        need = HEADER.size + self._length + 32 * blocks
        if have != need:
            raise self._unusable(f"has {have} of {need} bytes")
        self._table = self._bytes(self._length, 32 * blocks)
        if hashlib.sha256(self._table).digest() != root:
            raise self._unusable("its table is damaged")
        self._unchecked = set(range(blocks))
        if self._length <= CHECK_ON_OPEN_MAX_BYTES and not prepared:
            self._check(range(blocks))

    def read(self, start: int, count: int) -> Tokens:
        """Tokens (count,) from position start; DataError if the file was damaged meanwhile."""
        size = self.dtype.itemsize
        self._check(
            range(
                start * size // HASH_BLOCK_BYTES,
                ((start + count) * size - 1) // HASH_BLOCK_BYTES + 1,
            )
        )
        tokens = np.frombuffer(self._bytes(start * size, count * size), self.dtype)
        if count and (largest := int(tokens.max())) >= self.vocab_size:
            at = start + int(tokens.argmax())
            raise self._unusable(f"token {at} is {largest}, not below {self.vocab_size}")
        return tokens.astype(np.uint32)

    def _check(self, blocks: range) -> None:
        for block in blocks:
            if block not in self._unchecked:
                continue
            start = block * HASH_BLOCK_BYTES
            data = self._bytes(start, min(HASH_BLOCK_BYTES, self._length - start))
            if hashlib.sha256(data).digest() != self._table[32 * block : 32 * block + 32]:
                raise self._unusable(f"damaged after byte {start} of its tokens")
            self._unchecked.remove(block)

    def _bytes(self, start: int, count: int) -> bytes:
        """Bytes after the header. Read, not mapped: if a mapped file is cut, the process dies."""
        self.file.seek(HEADER.size + start)
        data = self.file.read(count)
        if len(data) != count:
            place = f"{len(data)} of {count} bytes at byte {HEADER.size + start}"
            raise self._unusable(f"truncated while in use ({place})")
        return data

    def _unusable(self, reason: str) -> DataError:
        remedy = "prepare it again" if self.prepared else "delete it and run again"
        return DataError(f"{self.path}: {reason}; {remedy}")

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Corpus:
    """A prepared text: its tokenizer, and the tokens to train on, to validate on and to test on.

    Each part has one file, or one for each weight; `test` has none unless asked for. `content` is
    the SHA-256 of the texts and their split.
    """

    name: str
    tokenizer: Tokenizer
    training: list[TokenFile]
    validation: list[TokenFile]
    test: list[TokenFile]
    content: str

    def count_epochs(
        self, seq_len: int, batch_size: int, steps: int, weights: list[float] | None
    ) -> float:
        """How often training visits its text, or the most visited one of weighted texts."""
        turns = zip(apportion(weights or [1.0], MIXTURE_CYCLE_WINDOWS), self.training, strict=True)
        visited = steps * batch_size
        return max(
            visited * share / MIXTURE_CYCLE_WINDOWS / count_windows(file, seq_len)
            for share, file in turns
        )

    @property
    def held_out(self) -> int:
        """Tokens to validate on."""
        return sum(map(len, self.validation))

    @property
    def inner_document_count(self) -> int:
        """Documents with text before them, whose document tokens each epoch reads.

        The one at the start of a file is almost always outside the windows.
        """
        return sum(max(0, tokens.documents - 1) for tokens in self.training)

    def read_excerpt(self) -> str:
        """The beginning of the training text."""
        tokens = self.training[0]
        return self.tokenizer.decode(tokens.read(0, min(len(tokens), 10_000)).tolist())

    def format_summary(self, kind: str) -> str:
        """One line on the text and its tokens; `kind` is the tokenizer asked for."""
        parts = self.training + self.validation
        size, count = sum(part.text_bytes for part in parts), sum(map(len, parts))
        chosen = kind == "auto" and not any(part.prepared for part in parts)
        why = ", chosen for this text" if chosen else ""
        return (
            f"  data      {self.name}: {_format_bytes(size)} -> {count:,} tokens "
            f"({self.tokenizer.kind}, vocabulary {self.tokenizer.vocab_size:,}{why}); "
            f"{self.held_out:,} held out for validation"
        )


def count_windows(file: TokenFile, seq_len: int) -> int:
    """Windows per epoch: as many as fit, with the token after each, wherever the first begins."""
    return max(1, (len(file) - seq_len) // seq_len)


def apportion(weights: list[float], total: int) -> list[int]:
    """Positive whole numbers that add up to `total`, as near to the weights as possible."""
    exact = [weight * (total - len(weights)) / sum(weights) for weight in weights]
    rounded = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded


def _format_bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
