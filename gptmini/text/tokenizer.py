"""Text to tokens and back.

Training and generation use the same tokenizer, saved as one JSON file in the run. Each has special
tokens, which are never the encoding of text. One of them is the document token, which stands before
every document; it and perhaps others, such as <|im_end|>, end a text that is generated.
"""

import base64
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from gptmini import files
from gptmini.errors import DataError, os_reason
from gptmini.text import bpe

FORMAT = 1
DOCUMENT = "<|endoftext|>"  # the name of the document token, but for some imported tokenizers
IMPORTED = "imported"  # the kind of a tokenizer that came with somebody else's model
TOKENS_PER_ENTRY = 1000  # that training should read, for each entry of a vocabulary
BLOCK = 1 << 18  # characters encoded at a time; tiktoken fails on a million spaces
Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]


class Piece(NamedTuple):
    """A stretch of text; a long document comes in several."""

    text: str
    starts_document: bool


class Tokenizer(ABC):
    """The interface of all tokenizers."""

    kind: str
    vocab_size: int
    document_token: int
    missing_bytes = b""  # have no token; `encode` leaves them out
    chat_template: str | None = None  # Jinja, as Hugging Face has it; gptmini only keeps it

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that no text encodes to, by name."""
        return {DOCUMENT: self.document_token}

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a text, first the one that other programs are told of."""
        return [self.document_token]

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """Tokens (N,) of a text; text that looks like a special token stays text."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for the document token."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that decides the tokens of a text besides the kind (JSON data)."""

    def chat_settings(self) -> dict[str, Any]:
        """The rest of what is saved (JSON data); it does not change the tokens of a text."""
        return {}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Bytes of text per token of the vocabulary, (V,)."""
        lengths = (len(self.token_bytes(token)) for token in range(self.vocab_size))
        return np.fromiter(lengths, np.int64, self.vocab_size)

    def to_json(self) -> str:
        return self._dump(self.settings() | self.chat_settings())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the tokens of a text."""
        return hashlib.sha256(self._dump(self.settings()).encode()).hexdigest()

    def _dump(self, settings: dict[str, Any]) -> str:
        return json.dumps({"format": FORMAT, "kind": self.kind, **settings}, indent=0)


class ByteTokenizer(Tokenizer):
    """The 256 bytes: encodes any text, learns nothing."""

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
    """Bytes, plus one token per non-ASCII character of a corpus; others are split into bytes."""

    kind = "char"

    def __init__(self, characters: str) -> None:
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
        spelled = points[unseen].tobytes().decode("utf-32-le").encode()
        tokens[np.repeat(unseen, lengths)] = np.frombuffer(spelled, np.uint8)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return self.characters[token - 256].encode() if token < self.document_token else b""

    def settings(self) -> dict[str, Any]:
        return {"characters": self.characters}


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding by tiktoken, with the ranks saved in the run."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        document: str = DOCUMENT,
        ends: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        """`document` and `ends` name special tokens; the document token always ends a text."""
        self.kind = encoding.name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.document_token = self.special_tokens[document]
        self.missing_bytes = _missing_bytes(encoding._mergeable_ranks)
        self.chat_template = chat_template
        self._document = document
        self._ends = list(dict.fromkeys([*ends, document]))  # without repetition
        self._end_tokens = [self.special_tokens[name] for name in self._ends]

    @property
    def special_tokens(self) -> dict[str, int]:
        return self.encoding._special_tokens

    @property
    def end_tokens(self) -> list[int]:
        return self._end_tokens

    def encode(self, text: str) -> Tokens:
        tokens = [np.empty(0, np.uint32)]
        try:
            for part in split(text):  # tiktoken is slow on long texts without a word boundary
                if self._lacks(part):
                    tokens.append(self._encode_without_missing(part))
                else:
                    tokens.append(self.encoding.encode_to_numpy(part, disallowed_special=()))
        except UnicodeEncodeError:
            raise
        except ValueError as error:  # only with somebody else's pattern
            raise DataError(f"tokenizer {self.kind}: {error}; choose another") from None
        return np.concatenate(tokens)

    def _lacks(self, text: str) -> bool:
        """Whether some bytes of a text have no token."""
        if not self.missing_bytes:
            return False
        data = text.encode()
        return len(data.translate(None, self.missing_bytes)) < len(data)

    def _encode_without_missing(self, text: str) -> Tokens:
        """Tokens of a text with bytes that have none.

        As in transformers, these bytes still count where the text is split into words, but the
        bytes around them are merged as if they were neighbors.
        """
        tokens: list[int] = []
        for word in bpe.words(self.encoding._pat_str, text):
            known = word.encode().translate(None, self.missing_bytes)
            if known:
                tokens += self.encoding._encode_single_piece(known)
        return np.array(tokens, np.uint32)

    def token_bytes(self, token: int) -> bytes:
        if token == self.document_token:
            return b""
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # a gap in the ranks, which a model can still sample
            return b""

    def settings(self) -> dict[str, Any]:
        ranks = self.encoding._mergeable_ranks
        settings: dict[str, Any] = {
            "pattern": self.encoding._pat_str,
            "special_tokens": self.special_tokens,
            "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks.items()},
        }
        if self._document != DOCUMENT:
            settings["document"] = self._document
        return settings

    def chat_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if len(self._ends) > 1:
            settings["ends"] = self._ends
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        return settings


def boundary(text: str, limit: int, reach: int = 4096) -> int:
    """Where to cut a text, at `limit` at most, so that both halves encode as the whole does.

    Cut between a letter or digit and the space after it: no word of a known pattern spans that. If
    there is no such place within `reach` characters, cut at a line end, or else at the limit.
    """
    lowest = max(1, limit - reach)
    space = text.rfind(" ", lowest, limit)
    while space > 0 and not text[space - 1].isalnum():
        space = text.rfind(" ", lowest, space)
    return space if space > 0 else text.rfind("\n", lowest - 1, limit) + 1 or limit


def split(text: str) -> Iterator[str]:
    """A text in parts of at most BLOCK characters, which encode as the whole does."""
    start = 0
    while len(text) - start > BLOCK:
        end = start + boundary(text[start : start + BLOCK], BLOCK)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def create(kind: str, vocab_size: int | None = None, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer of a kind; only `char` and `bpe` read `texts`.

    Raises DataError for an unknown kind, and for files that are missing and cannot be downloaded.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        characters = set[str]()
        for text in texts:
            characters.update(text)
        return CharTokenizer("".join(characters))
    if kind == "bpe":
        ranks = bpe.learn(texts, (vocab_size or 0) - 1)
        return bpe_tokenizer("bpe", bpe.PATTERN, ranks, {"<|endoftext|>": len(ranks)})
    if kind.endswith(".json"):
        return read(Path(kind))
    if kind == IMPORTED:
        raise DataError(
            "tokenizer.kind: imported belongs to a pretrained model; fine-tune that with gptmini "
            "train --from RUN --data PATH"
        )
    if kind not in tiktoken.list_encoding_names():
        known = ", ".join(["auto", "byte", "char", "bpe", *tiktoken.list_encoding_names()])
        raise DataError(f"{kind}: no such tokenizer; choose one of {known}, or a .json file")
    try:
        return BpeTokenizer(tiktoken.get_encoding(kind))
    except Exception as error:  # whatever the download raises
        raise DataError(
            f"tokenizer {kind}: download failed ({type(error).__name__}); use byte, char or bpe, "
            f"or set TIKTOKEN_CACHE_DIR to a folder that has its files"
        ) from error


def find(name: str) -> Tokenizer:
    """The tokenizer of a run, in a file, or of a kind that learns nothing."""
    if Path(name).is_dir():
        return read(Path(name) / "tokenizer.json")
    if name in ("auto", "char", "bpe"):
        raise DataError(
            f"{name}: learned from a text; give a run, or a file made by gptmini tokenizer train"
        )
    return create(name)


def choose(
    kind: str, text_bytes: int, d_model: int, tokens: int | None = None
) -> tuple[str, int | None]:
    """Kind and vocabulary size for `auto`, or for `bpe` without a size.

    The power of two nearest to 20 d_model, so that the output head costs half as much as four
    layers, or nearest to text_bytes / 128 if that is smaller, since rare tokens are not learned.
    Best bits per byte on held-out text within 500 steps of the default model:

        corpus                    byte  bpe 512   1024   2048   4096   8192
        Shakespeare,    0.1 MB    2.33     2.21   2.18
        python-docs,    0.5 MB    1.67     1.69   1.66   1.65   1.60   1.58
        Shakespeare,    1.1 MB    2.33     2.15   2.10   2.03   1.98   1.97
        python-code,   10   MB    1.92     1.79   1.76   1.69   1.64   1.58
        seconds a step            0.13     0.14   0.15   0.16   0.19   0.25

    If the `tokens` that training will read are few, one for each 1,000 of them, 512 at least. Best
    bits per byte in equal seconds, with models of the size that `--minutes` chooses for them:

        corpus, tokens read              char  bpe 512   1024   2048   4096
        python-docs,  0.5 M (4 layers)   1.92     1.79
        python-docs,  0.6 M                      1.694  1.700
        python-docs,  1.2 M                      1.636  1.637         1.712
        python-code,  1.1 M                             1.898  1.913
        python-code,  2.3 M                             1.432  1.428
    """
    size = min(20 * d_model, text_bytes // 128, 32_768)
    if tokens is not None:
        size = min(size, max(tokens // TOKENS_PER_ENTRY, 512))
    vocab_size = 1 << round(math.log2(max(size, 1)))
    if kind == "auto" and vocab_size < 512:
        return "byte", None
    return "bpe", max(vocab_size, 512)


def read(path: Path) -> Tokenizer:
    """Load a saved tokenizer; DataError if the file is missing, damaged or something else."""
    try:
        data = files.read_json(path)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return _from_json(data)
    except OSError as error:
        raise DataError(f"{path}: {os_reason(error)}; give a run or a tokenizer file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a complete gptmini tokenizer ({error}); restore it, or make one with "
            f"gptmini tokenizer train"
        ) from None


def _from_json(data: dict[str, Any]) -> Tokenizer:
    if data["kind"] == "byte":
        return ByteTokenizer()
    if data["kind"] == "char":
        return CharTokenizer(data["characters"])
    if not isinstance(data["kind"], str):
        raise ValueError("kind is not a string")
    ranks = {base64.b64decode(text, validate=True): rank for text, rank in data["ranks"].items()}
    return bpe_tokenizer(
        data["kind"],
        data["pattern"],
        ranks,
        data["special_tokens"],
        data.get("document", DOCUMENT),
        data.get("ends", []),
        data.get("chat_template"),
    )


def bpe_tokenizer(
    name: str,
    pattern: str,
    ranks: dict[bytes, int],
    special_tokens: dict[str, int],
    document: str = DOCUMENT,
    ends: Sequence[str] = (),
    chat_template: str | None = None,
) -> BpeTokenizer:
    """Check the ranks and special tokens (ValueError), then build the tokenizer.

    Only an imported vocabulary may lack bytes, and only those that are in none of its tokens.
    """
    numbers = [*ranks.values(), *special_tokens.values()]
    if not all(type(number) is int and 0 <= number < 1_000_000 for number in numbers):
        raise ValueError("a rank is not a number below 1,000,000")
    if len(set(numbers)) != len(numbers):
        raise ValueError("two tokens have the same rank")
    spelled = b"".join(ranks)
    for byte in _missing_bytes(ranks):
        if name != IMPORTED or byte in spelled:
            raise ValueError(f"byte {byte} has no rank")
    for special in (document, *ends):
        if special not in special_tokens:
            raise ValueError(f"{special!r} is not a special token")
    if not isinstance(chat_template, str | None):
        raise ValueError("chat_template is not a text")
    encoding = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
    )
    return BpeTokenizer(encoding, document, ends, chat_template)


def _missing_bytes(ranks: dict[bytes, int]) -> bytes:
    return bytes(byte for byte in range(256) if bytes([byte]) not in ranks)


def _code_points(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
