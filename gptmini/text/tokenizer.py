"""Text to tokens and back.

Every tokenizer is one object in training and in generation, is saved as one JSON file inside the
run, and has a document token: it stands before each document and is never made from text.
"""

import base64
import codecs
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from gptmini.errors import DataError
from gptmini.text import bpe

FORMAT = 1
BLOCK = 1 << 20  # characters that are encoded at a time
Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]


class Piece(NamedTuple):
    """A span of text; a document may come in several."""

    text: str
    starts_document: bool


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

    @cached_property
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
    """Bytes, and each other character of a corpus as one token; unseen ones go as their bytes."""

    kind = "char"

    def __init__(self, characters: str) -> None:
        """The characters beyond ASCII, in any order; those of ASCII are bytes."""
        self.characters = "".join(sorted(c for c in set(characters) if ord(c) > 127))
        self.document_token = 256 + len(self.characters)
        self.vocab_size = self.document_token + 1
        self._points = np.append(_code_points(self.characters), [0])

    def encode(self, text: str) -> Tokens:
        points = _code_points(text)
        places = np.searchsorted(self._points[:-1], points)
        unseen = (points > 127) & (self._points[places] != points)
        tokens = np.where(points > 127, places + 256, points).astype(np.uint32)
        if not unseen.any():
            return tokens
        lengths = 1 + unseen * (1 + (points > 0x7FF) + (points > 0xFFFF).astype(np.int64))
        tokens = np.repeat(tokens, lengths)
        spelt = points[unseen].tobytes().decode("utf-32-le").encode()
        tokens[np.repeat(unseen, lengths)] = np.frombuffer(spelt, np.uint8)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return self.characters[token - 256].encode() if token < self.document_token else b""

    def settings(self) -> dict[str, Any]:
        return {"characters": self.characters}


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding in tiktoken, with ranks kept in the run."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.kind = encoding.name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.document_token = encoding.eot_token

    def encode(self, text: str) -> Tokens:
        parts: list[Tokens] = []
        start = 0
        while start < len(text):  # tiktoken grows slow on very long texts without a word's end
            part = text[start : start + BLOCK]
            cut = boundary(part, BLOCK) if start + BLOCK < len(text) else len(part)
            try:
                parts.append(self.encoding.encode_to_numpy(part[:cut], disallowed_special=()))
            except UnicodeEncodeError:
                raise
            except ValueError as error:  # only a pattern that somebody else wrote
                raise DataError(f"tokenizer {self.kind}: {error}; take another one") from None
            start += cut
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

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


def boundary(text: str, limit: int) -> int:
    """Where to cut a text, at `limit` at most, so that its halves encode to what the whole does.

    No word of a known pattern reaches from a letter or digit into the space behind it. A text
    without such a place near the limit is cut at a line end, or else anywhere.
    """
    lowest = max(1, limit - 4096)
    space = text.rfind(" ", lowest, limit)
    while space > 0 and not text[space - 1].isalnum():
        space = text.rfind(" ", lowest, space)
    return space if space > 0 else text.rfind("\n", 0, limit) + 1 or limit


def create(kind: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a kind; `texts` is read only where the kind learns from the corpus.

    Raises DataError for an unknown kind, and for files that are neither here nor to be fetched.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return CharTokenizer("".join(characters))
    if kind == "bpe":
        ranks = bpe.learn(texts, (vocab_size or 0) - 1)
        return _bpe_tokenizer("bpe", bpe.PATTERN, ranks, {"<|endoftext|>": len(ranks)})
    if kind.endswith(".json"):
        return read(Path(kind))
    if kind not in tiktoken.list_encoding_names():
        known = ", ".join(["auto", "byte", "char", "bpe", *tiktoken.list_encoding_names()])
        raise DataError(f"tokenizer {kind}: no such tokenizer; known: {known}, or a .json file")
    try:
        return BpeTokenizer(tiktoken.get_encoding(kind))
    except Exception as error:  # requests, OSError, ValueError: whatever the download meets
        raise DataError(
            f"tokenizer {kind}: its files could not be fetched ({type(error).__name__}); use byte, "
            f"char or bpe, or name a folder that holds them in TIKTOKEN_CACHE_DIR"
        ) from error


def choose(kind: str, text_bytes: int, d_model: int) -> tuple[str, int | None]:
    """Kind and vocabulary size where `auto` is asked for, or `bpe` without a size.

    The power of two next to 20 d_model, so that the head costs half of what four layers do, but
    next to a 128th of the text if that is less: tokens that are seldom seen are not learnt. Best
    bits per byte on held-out text, default model, 500 steps or the best before:

        corpus                    byte  bpe 512   1024   2048   4096   8192
        Shakespeare,    0.1 MB    2.33     2.21   2.18
        python-docs,    0.5 MB    1.67     1.69   1.66   1.65   1.60   1.58
        Shakespeare,    1.1 MB    2.33     2.15   2.10   2.03   1.98   1.97
        python-code,   10   MB    1.92     1.79   1.76   1.69   1.64   1.58
        seconds a step            0.13     0.14   0.15   0.16   0.19   0.25
    """
    size = min(20 * d_model, text_bytes // 128, 32_768)
    vocab_size = 1 << round(math.log2(max(size, 1)))
    if kind == "auto" and vocab_size < 512:
        return "byte", None
    return "bpe", max(vocab_size, 512)


def read(path: Path) -> Tokenizer:
    """The tokenizer saved in a file; DataError if it is none, or not a whole one."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return _from_json(data)
    except OSError as error:
        raise DataError(
            f"{path}: {(error.strerror or str(error)).lower()}; name a run or a tokenizer file"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: no tokenizer of gptmini ({error}); make it again") from None


def _from_json(data: dict[str, Any]) -> Tokenizer:
    if data["kind"] == "byte":
        return ByteTokenizer()
    if data["kind"] == "char":
        return CharTokenizer(data["characters"])
    if not isinstance(data["kind"], str):
        raise ValueError("its kind is no word")
    ranks = {base64.b64decode(text, validate=True): rank for text, rank in data["ranks"].items()}
    return _bpe_tokenizer(data["kind"], data["pattern"], ranks, data["special_tokens"])


def _bpe_tokenizer(
    name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]
) -> BpeTokenizer:
    """An encoding in tiktoken, which would panic at ranks that do not hold every byte."""
    numbers = [*ranks.values(), *special_tokens.values()]
    if not all(type(number) is int and 0 <= number < 1_000_000 for number in numbers):
        raise ValueError("a rank is no number below 1,000,000")
    if len(set(numbers)) != len(numbers):
        raise ValueError("a rank stands for two tokens")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"byte {missing[0]} has no rank")
    return BpeTokenizer(
        tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
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
