"""The interface of all tokenizers, and the two that need no vocabulary file: bytes and characters.

Training and generation use the same tokenizer, saved as one JSON file in the run. Each has special
tokens, which are never the encoding of text. One of them, the end-of-text token, separates
documents: it stands before each. It ends a generated text, and so may others, such as <|im_end|>.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

TOKENIZER_FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"  # its usual name; some imported tokenizers have another
IMPORTED_KIND = "imported"  # the kind of a tokenizer that came with somebody else's model
# ChatML: a model that learns to answer from scratch gets these tokens and this template.
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")  # before a message, and behind it
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]


class Tokenizer(ABC):
    """An encoding, its inverse, special tokens and a JSON form."""

    kind: str
    vocab_size: int
    eos_token_id: int
    special_tokens: dict[str, int]  # the tokens that no text encodes to, by name
    end_tokens: list[int]  # the tokens that end a text; exports name the first as eos_token
    adds_bos = False  # whether the end-of-text token stands before prompts, too, as in Llama 3
    chat_template: str | None = None  # of an instruct model: Jinja, as Hugging Face has it
    template_tokens: dict[str, str] = {}  # noqa: RUF012 - names by use, such as bos_token; immutable
    drops_first_space = False  # whether a text loses the space that its first token begins with

    @abstractmethod
    def encode(self, text: str, continues: bool = False) -> Tokens:
        """Encode a text into tokens (N,); text that looks like a special token stays text.

        One that `continues` another is the rest of it, which matters to some imported tokenizers.
        """

    @abstractmethod
    def decode_token(self, token: int) -> bytes:
        """Return the bytes a token stands for; none for the end-of-text token."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return all that decides the tokens of a text besides the kind (JSON data)."""

    def encode_special(self, text: str, continues: bool = False) -> Tokens:
        """Encode a text (N,) in which the name of a special token is that token."""
        tokens = [np.empty(0, np.uint32)]
        for part in self._special_names.split(text):
            if part in self.special_tokens:
                tokens.append(np.array([self.special_tokens[part]], np.uint32))
            else:
                tokens.append(self.encode(part))
        return np.concatenate(tokens)

    def add_bos(self, tokens: list[int]) -> list[int]:
        """Put the end-of-text token before those of a prompt, if that is done and it is not there.

        Transformers calls it the beginning-of-text token (BOS) then.
        """
        if not self.adds_bos or tokens[:1] == [self.eos_token_id]:
            return tokens
        return [self.eos_token_id, *tokens]

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        """The names of the special tokens, the longest first: one may begin like another."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def chat_settings(self) -> dict[str, Any]:
        """Return the rest of what is saved (JSON data); it does not change the tokens of a text."""
        names = {number: name for name, number in self.special_tokens.items()}
        settings: dict[str, Any] = {}
        if len(self.end_tokens) > 1:
            settings["ends"] = [names[number] for number in self.end_tokens]
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
            settings["template_tokens"] = self.template_tokens
        return settings

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens into text; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.decode_token, tokens)).decode("utf-8", "replace")

    def compute_byte_lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Compute the bytes of text per token of the vocabulary, (V,); special tokens have none."""
        lengths = (len(self.decode_token(token)) for token in range(self.vocab_size))
        by_token = np.fromiter(lengths, np.int64, self.vocab_size)
        by_token[list(self.special_tokens.values())] = 0
        return by_token

    def to_json(self) -> str:
        """Serialize the tokenizer; `load_tokenizer` reads it back."""
        return self._dump(self.to_dict() | self.chat_settings())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the tokens of a text."""
        return hashlib.sha256(self._dump(self.to_dict()).encode()).hexdigest()

    @cached_property
    def chat_fingerprint(self) -> str:
        """SHA-256 (hex) of all of it, which decides the tokens of a conversation."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def _dump(self, settings: dict[str, Any]) -> str:
        header = {"format": TOKENIZER_FORMAT_VERSION, "kind": self.kind}
        return json.dumps(header | settings, indent=0)


class _PlainTokenizer(Tokenizer):
    """A tokenizer without merges, whose special tokens come last: those of ChatML only to chat."""

    def __init__(self, n_plain: int, chat_template: str | None) -> None:
        """`n_plain` tokens stand for text."""
        self.eos_token_id = n_plain
        self.chat_template = chat_template
        names = [END_OF_TEXT] if chat_template is None else [END_OF_TEXT, *CHAT_TOKENS]
        self.special_tokens = {name: number for number, name in enumerate(names, n_plain)}
        ends = [END_OF_TEXT] if chat_template is None else [CHAT_TOKENS[1], END_OF_TEXT]
        self.end_tokens = [self.special_tokens[name] for name in ends]
        self.vocab_size = n_plain + len(names)

    def to_dict(self) -> dict[str, Any]:
        return {} if self.chat_template is None else {"special_tokens": self.special_tokens}


class ByteTokenizer(_PlainTokenizer):
    """The 256 bytes: encodes any text, learns nothing."""

    kind = "byte"

    def __init__(self, chat_template: str | None = None) -> None:
        super().__init__(256, chat_template)

    def encode(self, text: str, continues: bool = False) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode_token(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class CharTokenizer(_PlainTokenizer):
    """Bytes, plus one token per non-ASCII character of a corpus; others are split into bytes."""

    kind = "char"

    def __init__(self, characters: str, chat_template: str | None = None) -> None:
        self.characters = "".join(sorted(c for c in set(characters) if ord(c) > 127))
        super().__init__(256 + len(self.characters), chat_template)
        # A 0 at the end lets the place of a character beyond the last be looked up.
        self._code_points = np.append(_to_code_points(self.characters), [0])

    def encode(self, text: str, continues: bool = False) -> Tokens:
        points = _to_code_points(text)  # (N,)
        places = np.searchsorted(self._code_points[:-1], points)  # (N,)
        unseen = (points > 127) & (self._code_points[places] != points)  # (N,)
        tokens = np.where(points > 127, places + 256, points).astype(np.uint32)  # (N,)
        if not unseen.any():
            return tokens
        # Make room for the two to four bytes of each unseen character, then fill them in.
        utf8_lengths = 2 + (points > 0x7FF) + (points > 0xFFFF).astype(np.int64)  # (N,)
        lengths = np.where(unseen, utf8_lengths, 1)  # (N,)
        tokens = np.repeat(tokens, lengths)
        utf8 = points[unseen].tobytes().decode("utf-32-le").encode()
        tokens[np.repeat(unseen, lengths)] = np.frombuffer(utf8, np.uint8)
        return tokens

    def decode_token(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        if token < self.eos_token_id:
            return self.characters[token - 256].encode()
        return b""

    def to_dict(self) -> dict[str, Any]:
        return {"characters": self.characters} | super().to_dict()


def _to_code_points(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
