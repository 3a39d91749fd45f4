"""Text to tokens and back.

Every tokenizer is one object in training and in generation, is saved as one JSON file inside the
run, and has a document token: it stands before each document and is never made from text.
"""

import base64
import binascii
import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gptmini.errors import DataError

FORMAT = 1
Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]


class Tokenizer(ABC):
    """What every tokenizer does; `document_token` is its last or its own special token."""

    kind: str
    vocab_size: int
    document_token: int

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """Tokens (N,) of a text; text that looks like a special token is text."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes a token stands for; none for the document token."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What, beside the kind, makes this tokenizer again (JSON data)."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Bytes of text behind each token of the vocabulary, (V,)."""
        lengths = (len(self.token_bytes(token)) for token in range(self.vocab_size))
        return np.fromiter(lengths, np.int64, self.vocab_size)

    def to_json(self) -> str:
        """The whole tokenizer as JSON text."""
        return json.dumps({"format": FORMAT, "kind": self.kind, **self.settings()}, indent=0)

    def fingerprint(self) -> str:
        """SHA-256 (hex) that tells tokenizers apart."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8: any text, nothing to learn."""

    kind = "byte"
    vocab_size = 257
    document_token = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def settings(self) -> dict[str, Any]:
        return {}


class CharTokenizer(Tokenizer):
    """The characters of a corpus, in code point order; others are refused."""

    kind = "char"

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.document_token = len(self.characters)
        self.vocab_size = len(self.characters) + 1
        self._code_points = _code_points(self.characters)

    def encode(self, text: str) -> Tokens:
        points = _code_points(text)
        tokens = np.searchsorted(self._code_points, points).astype(np.uint32)
        known = np.append(self._code_points, 0)[tokens] == points
        known &= tokens < self.document_token
        if not known.all():
            unseen = chr(points[int(np.argmin(known))])
            raise DataError(
                f"character {unseen!r} (U+{ord(unseen):04X}) is not in the vocabulary of "
                f"{len(self.characters)} characters; leave it out, or train with tokenizer byte"
            )
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode() if token < self.document_token else b""

    def settings(self) -> dict[str, Any]:
        return {"characters": self.characters}


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding in tiktoken, with ranks kept in the run."""

    # tiktoken cannot take a run of white space or letters of about a million characters.
    LONG_RUN = re.compile(r"((?<!\s)\s{100000}|(?<!\S)\S{100000})")

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.kind = encoding.name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.document_token = encoding.eot_token

    def encode(self, text: str) -> Tokens:
        parts = self._bounded(text) if len(text) > 100_000 else [text]
        encoded = [self.encoding.encode(part, disallowed_special=()) for part in parts if part]
        return np.array([token for tokens in encoded for token in tokens], np.uint32)

    def _bounded(self, text: str) -> Iterator[str]:
        while match := self.LONG_RUN.search(text):
            yield text[: match.end()]
            text = text[match.end() :]
        yield text

    def token_bytes(self, token: int) -> bytes:
        if token == self.document_token:
            return b""
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # a hole in the ranks, which a model can still draw
            return b""

    def settings(self) -> dict[str, Any]:
        ranks = self.encoding._mergeable_ranks
        return {
            "pattern": self.encoding._pat_str,
            "special_tokens": self.encoding._special_tokens,
            "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks.items()},
        }


def create(kind: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a kind; `texts` is read only where the kind learns from the corpus."""
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return CharTokenizer("".join(characters))
    if kind not in tiktoken.list_encoding_names():
        known = ", ".join(["byte", "char", *tiktoken.list_encoding_names()])
        raise DataError(f"tokenizer {kind}: no such tokenizer; known: {known}")
    try:
        return BpeTokenizer(tiktoken.get_encoding(kind))
    except Exception as error:  # requests, OSError, ValueError: whatever the download meets
        raise DataError(
            f"tokenizer {kind}: its files could not be fetched ({type(error).__name__}); use byte "
            f"or char, or name a folder that holds them in TIKTOKEN_CACHE_DIR"
        ) from error


def read(path: Path) -> Tokenizer:
    """The tokenizer saved in a file."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return _from_json(data)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; is this a run directory?") from None
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise DataError(f"{path}: no tokenizer of gptmini ({error}); train again") from None


def _from_json(data: dict[str, Any]) -> Tokenizer:
    if data["kind"] == "byte":
        return ByteTokenizer()
    if data["kind"] == "char":
        return CharTokenizer(data["characters"])
    ranks = {base64.b64decode(text, validate=True): rank for text, rank in data["ranks"].items()}
    return BpeTokenizer(
        tiktoken.Encoding(
            data["kind"],
            pat_str=data["pattern"],
            mergeable_ranks=ranks,
            special_tokens=data["special_tokens"],
        )
    )


class StreamDecoder:
    """Tokens to text one at a time, holding back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """U+FFFD for what never became a character."""
        return self._decoder.decode(b"", final=True)


def _code_points(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
