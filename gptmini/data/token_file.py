"""Write tokens to files, check them and read them by position; and the corpus made of them.

A token file is an array and nothing else: little-endian numbers of 16 or 32 bits, an end-of-text
token before each document. In conversations the highest of 32 bits says that the loss ignores the
token (chats.py). A JSON file beside it, which is written last, says what the array holds: its
tokenizer, how many bytes of text and documents it stands for, and the SHA-256. No token is used
before all of its file has been checked.
"""

import hashlib
import json
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from gptmini import files
from gptmini.console import format_bytes
from gptmini.data.chats import IGNORED, ChatEncoder
from gptmini.errors import DataError
from gptmini.tokenizer import chunks
from gptmini.tokenizer.chunks import TextChunk, count_utf8_bytes
from gptmini.tokenizer.tokenizers import Tokenizer, Tokens

VERSION = 5  # of all that decides which tokens a text becomes, and how they are stored
MIXTURE_CYCLE_WINDOWS = 1000  # after as many windows the pattern of weighted texts repeats
Label = TypeVar("Label", bound=Hashable)  # of the token file that tokens are for
Encoded = tuple[int, Tokens]  # bytes of text, and the tokens that stand for them


def write_token_files(
    paths: Mapping[Label, Path], encoded: Iterator[Mapping[Label, Encoded]], tokenizer: Tokenizer
) -> None:
    """Write several token files in one pass; all get their names, and then what describes them."""
    with ExitStack() as stack:
        writers = {
            label: _TokenWriter(stack.enter_context(files.atomic_write(path)), tokenizer)
            for label, path in paths.items()
        }
        for parts in encoded:
            for label, (text_bytes, tokens) in parts.items():
                writers[label].append(text_bytes, tokens)
    for label, path in paths.items():
        description = json.dumps(writers[label].describe())
        files.atomic_write_bytes(path.with_suffix(".json"), description.encode())


class _TokenWriter:
    """Writes tokens to a file, and counts what they stand for."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._dtype = get_token_dtype(tokenizer)
        self._hashed = hashlib.sha256()
        self._tokens = 0
        self._text_bytes = 0
        self._documents = 0
        self._has_ignored = False

    def append(self, text_bytes: int, tokens: Tokens) -> None:
        """Write tokens that encode `text_bytes` bytes of text."""
        stored = tokens.astype(self._dtype).tobytes()
        self._file.write(stored)
        self._hashed.update(stored)
        self._tokens += len(tokens)
        self._text_bytes += text_bytes
        self._documents += int((tokens & ~IGNORED == self._tokenizer.eos_token_id).sum())
        self._has_ignored = self._has_ignored or bool((tokens & IGNORED).any())

    def describe(self) -> dict[str, object]:
        """Describe what was written; the SHA-256 is of the array and of the rest of this."""
        described = {
            "version": VERSION,
            "tokenizer": self._tokenizer.chat_fingerprint,
            "tokens": self._tokens,
            "text_bytes": self._text_bytes,
            "documents": self._documents,
            "has_ignored": self._has_ignored,
        }
        self._hashed.update(json.dumps(described).encode())
        return described | {"sha256": self._hashed.hexdigest()}


def encode_chunks(
    labeled_chunks: Iterator[tuple[Label, TextChunk]],
    tokenizer: Tokenizer,
    advance: Callable[[int], object],
) -> Iterator[Mapping[Label, Encoded]]:
    """Encode chunks on all cores, in order (tiktoken releases the interpreter lock).

    `advance` gets the bytes of text as they are encoded.
    """
    workers = os.cpu_count() or 1
    chat_encoder = ChatEncoder(tokenizer)
    waiting: deque[Future[Mapping[Label, Encoded]]] = deque()

    def take_first() -> Mapping[Label, Encoded]:
        encoded = waiting.popleft().result()
        advance(sum(text_bytes for text_bytes, _ in encoded.values()))
        return encoded

    with ThreadPoolExecutor(workers) as pool:
        for batch in _group_chunks(labeled_chunks):
            waiting.append(pool.submit(_encode_batch, tokenizer, chat_encoder, batch))
            if len(waiting) > 2 * workers:
                yield take_first()
        while waiting:
            yield take_first()


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


def _encode_batch(
    tokenizer: Tokenizer, chat_encoder: ChatEncoder, batch: list[tuple[Label, TextChunk]]
) -> Mapping[Label, Encoded]:
    """Encode some chunks; returns the bytes of text and the tokens for each label."""
    document = np.array([tokenizer.eos_token_id], np.uint32)
    text_bytes: defaultdict[Label, int] = defaultdict(int)
    parts: defaultdict[Label, list[Tokens]] = defaultdict(list)
    for label, (text, starts_document, messages, place) in batch:
        text_bytes[label] += count_utf8_bytes(text)
        if messages is not None:
            parts[label].append(chat_encoder.encode(messages, place))
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


class TokenFile:
    """An open token file, read by position without loading the rest."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        """Open a file and check all of it; DataError if it is missing, damaged or of another form.

        That takes a second per gigabyte, less than hashing the text that it was made from.
        """
        self.path = path
        self.dtype = get_token_dtype(tokenizer)
        try:
            described = files.read_json(path.with_suffix(".json"))
            expected = described.pop("sha256")
            form = (described["version"], described["tokenizer"])
            self.count = int(described["tokens"])
            self.text_bytes = int(described["text_bytes"])
            self.documents = int(described["documents"])
            self.has_ignored = bool(described["has_ignored"])
            self.file = files.open_regular(path, buffering=0)
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(f"{path}: not whole; delete it and run again") from None
        weakref.finalize(self, self.file.close)
        if form != (VERSION, tokenizer.chat_fingerprint):
            raise DataError(f"{path}: of another version or tokenizer; delete it and run again")
        hashed = hashlib.file_digest(self.file, "sha256")  # type: ignore[arg-type]
        hashed.update(json.dumps(described).encode())
        if hashed.hexdigest() != expected:
            raise DataError(f"{path}: damaged; delete it and run again")

    def read(self, start: int, count: int) -> Tokens:
        """Read tokens (count,) from a position; DataError if the file was cut off meanwhile."""
        return self.read_marked(start, count) & ~IGNORED

    def read_marked(self, start: int, count: int) -> Tokens:
        """Read tokens (count,) as `read` does, with `IGNORED` in those that the loss ignores.

        The file is not mapped, since truncating a mapped file kills us.
        """
        itemsize = self.dtype.itemsize
        self.file.seek(start * itemsize)
        data = self.file.read(count * itemsize)
        if len(data) != count * itemsize:
            raise DataError(f"{self.path}: truncated while in use; run again")
        return np.frombuffer(data, self.dtype).astype(np.uint32)

    def __len__(self) -> int:
        return self.count


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

    def format_summary(self) -> str:
        """Describe the text and its tokens in a line."""
        token_files = self.training + self.validation
        text_bytes = sum(file.text_bytes for file in token_files)
        token_count = sum(map(len, token_files))
        return (
            f"  text      {self.name}: {format_bytes(text_bytes)} cut into {token_count:,} "
            f"tokens ({self.tokenizer.kind}, {self.tokenizer.vocab_size:,} different ones); "
            f"{self.held_out:,} are held out"
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
