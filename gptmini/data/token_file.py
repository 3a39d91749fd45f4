"""Write token files, verify them and read them by position; and the corpus made of them.

A token file has these parts:

    header      version, bytes per token, number of tokens, bytes of text, number of documents, and
                the SHA-256 of the tokenizer, of the content and of the table
    tokens      little-endian, 16 or 32 bits each; an end-of-text token before each document; in
                conversations the highest of 32 bits says that the loss ignores it (chats.py)
    table       the SHA-256 of every HASH_BLOCK_BYTES of tokens
    tokenizer   as JSON, in a file from `gptmini data prepare --out`; one in the cache has none

A file gets its name only when complete. No token is used before its block has been checked.
"""

import hashlib
import json
import math
import os
import struct
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from gptmini import files
from gptmini.console import format_bytes
from gptmini.data.chats import IGNORED, ChatEncoder
from gptmini.errors import DataError, describe_os_error
from gptmini.tokenizer import chunks
from gptmini.tokenizer.chunks import TextChunk, count_utf8_bytes
from gptmini.tokenizer.load import from_dict
from gptmini.tokenizer.tokenizers import Tokenizer, Tokens

HEADER = struct.Struct("<8sIIQQQ32s32s32s")
MAGIC = b"gptmini\n"
VERSION = 3
CHAT_VERSION = 4  # has tokens that the loss ignores
SHA256_BYTES = 32
HASH_BLOCK_BYTES = 1 << 20  # of tokens, hashed together
CHECK_ON_OPEN_MAX_BYTES = 1 << 30  # larger files are checked block by block as they are read
MIXTURE_CYCLE_WINDOWS = 1000  # after as many windows the pattern of weighted texts repeats
Label = TypeVar("Label", bound=Hashable)  # of the token file that a chunk is for


@dataclass(frozen=True)
class TokenOutput:
    """A token file to write: its path, and the SHA-256 (hex) of the text that it holds."""

    path: Path
    digest: str


def write_token_file(
    output: TokenOutput,
    text_chunks: Iterator[TextChunk],
    tokenizer: Tokenizer,
    advance: Callable[[int], object],
    prepared: bool = False,
) -> None:
    """Encode a text into a token file; `advance` gets the bytes of text as they are encoded.

    A `prepared` file has its tokenizer in it, and can be taken to another machine.
    """
    labeled_chunks = (("", chunk) for chunk in text_chunks)
    write_token_files({"": output}, labeled_chunks, tokenizer, advance, prepared)


def write_token_files(
    outputs: Mapping[Label, TokenOutput],
    labeled_chunks: Iterator[tuple[Label, TextChunk]],
    tokenizer: Tokenizer,
    advance: Callable[[int], object],
    prepared: bool = False,
) -> None:
    """Encode a text into several token files in one pass; each chunk names the one that it is for.

    They get their names together, when all are complete.
    """
    with ExitStack() as stack:
        writers = {
            label: TokenWriter(
                stack.enter_context(files.atomic_write(output.path)), output.digest, tokenizer
            )
            for label, output in outputs.items()
        }
        for encoded in _encode_in_threads(tokenizer, labeled_chunks):
            for label, (text_bytes, tokens) in encoded.items():
                writers[label].append(text_bytes, tokens)
                advance(text_bytes)
        for writer in writers.values():
            writer.finish(prepared)


class TokenWriter:
    """Writes the parts of a token file; the header comes last, when the counts are known."""

    def __init__(self, file: BinaryIO, digest: str, tokenizer: Tokenizer) -> None:
        self._file = file
        self._digest = digest
        self._tokenizer = tokenizer
        self._dtype = get_token_dtype(tokenizer)
        self._has_ignored = False
        self._text_bytes = 0
        self._token_bytes = 0
        self._documents = 0
        self._table = b""
        self._unwritten = bytearray()  # of a block that is not full
        file.write(bytes(HEADER.size))

    def append(self, text_bytes: int, tokens: Tokens) -> None:
        """Write tokens that encode `text_bytes` bytes of text."""
        self._text_bytes += text_bytes
        self._has_ignored = self._has_ignored or bool((tokens & IGNORED).any())
        self._documents += int((tokens & ~IGNORED == self._tokenizer.eos_token_id).sum())
        self._unwritten += tokens.astype(self._dtype).tobytes()
        while len(self._unwritten) >= HASH_BLOCK_BYTES:
            self._write_block()

    def finish(self, prepared: bool) -> None:
        """Write the last block, the table, of a prepared file the tokenizer, and the header."""
        if self._unwritten:
            self._write_block()
        self._file.write(self._table)
        if prepared:
            self._file.write(self._tokenizer.to_json().encode())
        self._file.seek(0)
        header = HEADER.pack(
            MAGIC,
            CHAT_VERSION if self._has_ignored else VERSION,
            self._dtype.itemsize,
            self._token_bytes // self._dtype.itemsize,
            self._text_bytes,
            self._documents,
            bytes.fromhex(self._tokenizer.fingerprint),
            bytes.fromhex(self._digest),
            hashlib.sha256(self._table).digest(),
        )
        self._file.write(header)

    def _write_block(self) -> None:
        """Write up to HASH_BLOCK_BYTES, and note their hash."""
        block = bytes(self._unwritten[:HASH_BLOCK_BYTES])
        del self._unwritten[:HASH_BLOCK_BYTES]
        self._file.write(block)
        self._token_bytes += len(block)
        self._table += hashlib.sha256(block).digest()


def _encode_in_threads(
    tokenizer: Tokenizer, labeled_chunks: Iterator[tuple[Label, TextChunk]]
) -> Iterator[dict[Label, tuple[int, Tokens]]]:
    """Encode chunks on all cores, in order (tiktoken releases the interpreter lock).

    Yields for each label the bytes of text and the tokens, of a few chunks at a time.
    """
    workers = os.cpu_count() or 1
    chat_encoder = ChatEncoder(tokenizer)
    waiting: deque[Future[dict[Label, tuple[int, Tokens]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in _group_chunks(labeled_chunks):
            waiting.append(pool.submit(_encode_chunks, tokenizer, chat_encoder, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _group_chunks(
    labeled_chunks: Iterator[tuple[Label, TextChunk]],
) -> Iterator[list[tuple[Label, TextChunk]]]:
    """Group chunks until they are worth a thread: some have only a hundred characters."""
    batch: list[tuple[Label, TextChunk]] = []
    characters = 0
    for label, chunk in labeled_chunks:
        batch.append((label, chunk))
        characters += len(chunk.text)
        if characters >= chunks.TEXT_BLOCK_SIZE:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _encode_chunks(
    tokenizer: Tokenizer, chat_encoder: ChatEncoder, batch: list[tuple[Label, TextChunk]]
) -> dict[Label, tuple[int, Tokens]]:
    """Encode some chunks; returns the bytes of text and the tokens for each label."""
    document = np.array([tokenizer.eos_token_id], np.uint32)
    text_bytes: defaultdict[Label, int] = defaultdict(int)
    parts: defaultdict[Label, list[Tokens]] = defaultdict(list)
    for label, (text, starts_document, conversation, _) in batch:
        text_bytes[label] += count_utf8_bytes(text)
        if conversation is not None:
            parts[label].append(chat_encoder.encode(conversation))
            continue
        if starts_document:
            parts[label].append(document)
        parts[label].append(tokenizer.encode(text, continues=not starts_document))
    return {label: (text_bytes[label], np.concatenate(parts[label])) for label in parts}


def get_token_dtype(tokenizer: Tokenizer) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Get the smallest type that holds every token; numpy silently wraps larger numbers.

    With a chat template, a bit has to be left for `IGNORED`.
    """
    is_small = tokenizer.vocab_size <= 1 << 16 and tokenizer.chat_template is None
    return np.dtype("<u2") if is_small else np.dtype("<u4")


# -- reading ---------------------------------------------------------------------------------------


class TokenFile:
    """An open token file, read by position without loading the rest."""

    def __init__(self, path: Path, tokenizer: Tokenizer, prepared: bool = False) -> None:
        """Open and check; DataError if the file is damaged or belongs to another tokenizer.

        `prepared` files come from `gptmini data prepare`, not from the cache. They are checked only
        where they are read, since other processes read the rest, and nobody recreates them.
        """
        self.path = path
        self.vocab_size = tokenizer.vocab_size
        self.prepared = prepared
        try:
            self.file = files.open_regular(path, buffering=0)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unusable(describe_os_error(error)) from None
        weakref.finalize(self, self.file.close)
        self.dtype = get_token_dtype(tokenizer)
        self._read_header(tokenizer)
        self._read_table()
        blocks = range(len(self._table) // SHA256_BYTES)
        self._unchecked = set(blocks)
        if self._token_bytes <= CHECK_ON_OPEN_MAX_BYTES and not prepared:
            self._check(blocks)

    def _read_header(self, tokenizer: Tokenizer) -> None:
        header = self.file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise self._unusable("not a gptmini token file")
        (
            _,
            version,
            itemsize,
            self.count,
            self.text_bytes,
            self.documents,
            fingerprint,
            content,
            root,
        ) = HEADER.unpack(header)
        self.content = content.hex()
        self.root = root.hex()  # the SHA-256 of the table, and thereby of all tokens
        self.has_ignored = version == CHAT_VERSION
        if version not in (VERSION, CHAT_VERSION):
            raise self._unusable(f"version {version}")
        if fingerprint.hex() != tokenizer.fingerprint:
            if self.prepared:
                raise DataError(
                    f"{self.path}: made with another tokenizer than the run or the first token "
                    f"file; prepare all with one from gptmini tokenizer train, as --set "
                    f"tokenizer.kind=FILE.json"
                )
            raise self._unusable("made with another tokenizer")
        if itemsize != self.dtype.itemsize:
            raise self._unusable(f"{itemsize} bytes per token")

    def _read_table(self) -> None:
        self._token_bytes = self.count * self.dtype.itemsize
        table_bytes = SHA256_BYTES * math.ceil(self._token_bytes / HASH_BLOCK_BYTES)
        expected = HEADER.size + self._token_bytes + table_bytes
        actual = os.fstat(self.file.fileno()).st_size
        if actual < expected or (actual > expected and not self.prepared):
            raise self._unusable(f"has {actual} of {expected} bytes")
        self._table = self._bytes(self._token_bytes, table_bytes)
        if hashlib.sha256(self._table).hexdigest() != self.root:
            raise self._unusable("its table is damaged")

    def read(self, start: int, count: int) -> Tokens:
        """Read tokens (count,) from a position; DataError if the file was damaged meanwhile."""
        return self.read_marked(start, count) & ~IGNORED

    def read_marked(self, start: int, count: int) -> Tokens:
        """Read tokens (count,) as `read` does, with `IGNORED` in those that the loss ignores."""
        itemsize = self.dtype.itemsize
        first_block = start * itemsize // HASH_BLOCK_BYTES
        last_block = ((start + count) * itemsize - 1) // HASH_BLOCK_BYTES
        self._check(range(first_block, last_block + 1))
        stored = np.frombuffer(self._bytes(start * itemsize, count * itemsize), self.dtype)
        tokens = stored.astype(np.uint32)
        numbers = tokens & ~IGNORED if self.has_ignored else tokens
        if count and (largest := int(numbers.max())) >= self.vocab_size:
            at = start + int(numbers.argmax())
            raise self._unusable(f"token {at} is {largest}, not below {self.vocab_size}")
        return tokens

    def _check(self, blocks: range) -> None:
        for block in blocks:
            if block not in self._unchecked:
                continue
            start = block * HASH_BLOCK_BYTES
            data = self._bytes(start, min(HASH_BLOCK_BYTES, self._token_bytes - start))
            expected = self._table[SHA256_BYTES * block : SHA256_BYTES * (block + 1)]
            if hashlib.sha256(data).digest() != expected:
                raise self._unusable(f"damaged after byte {start} of its tokens")
            self._unchecked.remove(block)

    def _bytes(self, start: int, count: int) -> bytes:
        """Read bytes after the header; not mapped, since truncating a mapped file kills us."""
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


# -- prepared files --------------------------------------------------------------------------------


def is_prepared(path: Path) -> bool:
    """Check whether a file holds tokens of ours; the texts of WikiText are named so too."""
    try:
        with files.open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer that lies in a prepared file; DataError if none does."""
    try:
        with files.open_regular(path) as file:
            _, _, itemsize, count, *_ = HEADER.unpack(file.read(HEADER.size))
            token_bytes = itemsize * count
            table_bytes = SHA256_BYTES * math.ceil(token_bytes / HASH_BLOCK_BYTES)
            file.seek(HEADER.size + token_bytes + table_bytes)
            return from_dict(json.loads(file.read()))
    except OSError as error:
        raise DataError(f"{path}: {describe_os_error(error)}; prepare it again") from None
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f"{path}: has no tokenizer in it; prepare it again, with gptmini data prepare --out"
        ) from None


class ConcatTokenFile(TokenFile):
    """Consecutive tokens of several token files, read by position as if they were one file.

    Its bytes of text and documents are its share of the total, in proportion to the tokens. `path`
    does not exist: its name identifies the content, as that of a cached file does.
    """

    def __init__(self, parts: list[TokenFile], start: int = 0, stop: int | None = None) -> None:
        self.prepared = True
        self._parts = parts
        self._start = start
        self._ends = list(accumulate(map(len, parts)))  # where each part ends in the whole
        total = self._ends[-1]
        self.count = (total if stop is None else stop) - start
        share = self.count / max(1, total)
        self.text_bytes = round(share * sum(part.text_bytes for part in parts))
        self.documents = round(share * sum(part.documents for part in parts))
        self.content = hashlib.sha256("".join(part.root for part in parts).encode()).hexdigest()
        self.vocab_size = parts[0].vocab_size
        self.has_ignored = any(part.has_ignored for part in parts)
        self.path = parts[0].path.with_name(f"{self.content[:20]}-{start}-{stop}.tokens")

    def read_marked(self, start: int, count: int) -> Tokens:
        """Read tokens (count,) from a position, from as many parts as that takes."""
        tokens = [np.empty(0, np.uint32)]
        at = self._start + start
        remaining = count
        index = bisect_right(self._ends, at)  # of the part that has this position
        while remaining > 0:
            part = self._parts[index]
            start_in_part = at - (self._ends[index] - len(part))
            n_tokens = min(remaining, len(part) - start_in_part)
            tokens.append(part.read_marked(start_in_part, n_tokens))
            at += n_tokens
            remaining -= n_tokens
            index += 1
        return np.concatenate(tokens)

    def split(
        self, validation: float, test: float
    ) -> "tuple[ConcatTokenFile, ConcatTokenFile, ConcatTokenFile]":
        """Split into training, validation and test: validation is the tail, test lies before it."""
        n_validation = max(1, round(self.count * validation)) if validation else 0
        n_test = max(1, round(self.count * test)) if test else 0
        validation_start = self.count - n_validation
        test_start = validation_start - n_test
        return (
            ConcatTokenFile(self._parts, 0, test_start),
            ConcatTokenFile(self._parts, validation_start, self.count),
            ConcatTokenFile(self._parts, test_start, validation_start),
        )


@dataclass(frozen=True)
class Corpus:
    """A prepared text: its tokenizer, and the tokens to train on, to validate on and to test on.

    Each side has one file, or one for each weight; `test` has none unless requested. `content` is
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
        """Count how often training visits its text, or the most visited one of weighted texts."""
        windows = steps * batch_size
        shares = apportion(weights or [1.0], MIXTURE_CYCLE_WINDOWS)
        return max(
            windows * share / MIXTURE_CYCLE_WINDOWS / count_windows(file, seq_len)
            for share, file in zip(shares, self.training, strict=True)
        )

    @property
    def held_out(self) -> int:
        """Tokens to validate on."""
        return sum(map(len, self.validation))

    @property
    def has_ignored(self) -> bool:
        """Whether the loss ignores some tokens to train on, as in conversations."""
        return any(file.has_ignored for file in self.training)

    @property
    def inner_document_count(self) -> int:
        """Documents with text before them, whose end-of-text tokens each epoch reads.

        The one at the start of a file is almost always outside the windows.
        """
        return sum(max(0, tokens.documents - 1) for tokens in self.training)

    def read_excerpt(self) -> str:
        """Decode the beginning of the training text."""
        file = self.training[0]
        tokens = file.read(0, min(len(file), 10_000))
        return self.tokenizer.decode(tokens.tolist())

    def read_question(self) -> list[int]:
        """Read the tokens before the first answer to validate on; none if it is not near."""
        file = self.validation[0]
        marked = file.read_marked(0, min(len(file), 10_000))  # (N,)
        ignored_eos = IGNORED | np.uint32(self.tokenizer.eos_token_id)  # before a conversation
        (starts,) = (marked == ignored_eos).nonzero()
        if not len(starts):
            return []
        marked = marked[starts[0] :]
        (learned,) = (marked < IGNORED).nonzero()
        return (marked[: learned[0]] & ~IGNORED).tolist() if len(learned) else []

    def format_summary(self, kind: str) -> str:
        """Describe the text and its tokens in a line; `kind` is the tokenizer requested."""
        token_files = self.training + self.validation
        text_bytes = sum(file.text_bytes for file in token_files)
        token_count = sum(map(len, token_files))
        chosen = kind == "auto" and not any(file.prepared for file in token_files)
        reason = ", chosen for this text" if chosen else ""
        return (
            f"  data      {self.name}: {format_bytes(text_bytes)} -> {token_count:,} tokens "
            f"({self.tokenizer.kind}, vocabulary {self.tokenizer.vocab_size:,}{reason}); "
            f"{self.held_out:,} held out for validation"
            f"{'; of conversations, the answers count' if self.has_ignored else ''}"
        )


def count_windows(file: TokenFile, seq_len: int) -> int:
    """Count the windows of an epoch: those that fit, with the token after each, at any offset."""
    return max(1, (len(file) - seq_len) // seq_len)


def apportion(weights: list[float], total: int) -> list[int]:
    """Return positive whole numbers that add up to `total`, as near to the weights as possible.

    These are the largest remainders; one that is 0 then takes 1 from the largest.
    """
    exact = [weight * total / sum(weights) for weight in weights]
    rounded = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    while 0 in rounded:
        rounded[rounded.index(max(rounded))] -= 1
        rounded[rounded.index(0)] = 1
    return rounded
