"""Byte-pair encodings, applied by tiktoken: learned here, or published."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import tiktoken

from gptmini.console import show_elapsed
from gptmini.errors import DataError
from gptmini.tokenizer.chunks import split_text
from gptmini.tokenizer.tokenizers import CHAT_TEMPLATE, CHAT_TOKENS, END_OF_TEXT, Tokenizer, Tokens

MAX_TOKEN_NUMBER = 1_000_000


class BpeTokenizer(Tokenizer):
    """A byte-pair encoding, with the ranks saved in the run."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        ends: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        """`ends` name the special tokens that end a text, as the end-of-text token does."""
        self.kind = encoding.name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.special_tokens = encoding._special_tokens
        self.eos_token_id = self.special_tokens[END_OF_TEXT]
        self.chat_template = chat_template
        names = dict.fromkeys([*ends, END_OF_TEXT])  # without repetition
        self.end_tokens = [self.special_tokens[name] for name in names]

    def encode(self, text: str, continues: bool = False) -> Tokens:
        tokens = [np.empty(0, np.uint32)]
        try:
            for part in split_text(text):  # tiktoken is slow on long texts without a word boundary
                tokens.append(self.encoding.encode_to_numpy(part, disallowed_special=()))
        except UnicodeEncodeError:
            raise
        except ValueError as error:  # only with somebody else's pattern
            raise DataError(f"tokenizer {self.kind}: {error}; choose another") from None
        return np.concatenate(tokens)

    def decode_token(self, token: int) -> bytes:
        if token == self.eos_token_id:
            return b""
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # a gap in the ranks, which a model can still sample
            return b""

    def to_dict(self) -> dict[str, Any]:
        ranks = self.encoding._mergeable_ranks
        return {
            "pattern": self.encoding._pat_str,
            "special_tokens": self.special_tokens,
            "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks.items()},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BpeTokenizer":
        """Build the tokenizer that `to_json` wrote; ValueError or KeyError for damaged data."""
        ranks = {
            base64.b64decode(token, validate=True): rank for token, rank in data["ranks"].items()
        }
        return create_bpe_tokenizer(
            data["kind"],
            data["pattern"],
            ranks,
            data["special_tokens"],
            data.get("ends", []),
            data.get("chat_template"),
        )


def create_bpe_tokenizer(
    name: str,
    pattern: str,
    mergeable_ranks: dict[bytes, int],
    special_tokens: dict[str, int],
    ends: Sequence[str] = (),
    chat_template: str | None = None,
) -> BpeTokenizer:
    """Check the ranks and special tokens (ValueError), then build the tokenizer."""
    numbers = [*mergeable_ranks.values(), *special_tokens.values()]
    if not all(type(number) is int and 0 <= number < MAX_TOKEN_NUMBER for number in numbers):
        raise ValueError(f"a rank is not a number below {MAX_TOKEN_NUMBER:,}")
    if len(set(numbers)) != len(numbers):
        raise ValueError("two tokens have the same rank")
    for byte in range(256):
        if bytes([byte]) not in mergeable_ranks:
            raise ValueError(f"byte {byte} has no rank")
    for special in (END_OF_TEXT, *ends):
        if special not in special_tokens:
            raise ValueError(f"{special!r} is not a special token")
    encoding = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens
    )
    return BpeTokenizer(encoding, ends, chat_template)


def load_published_encoding(name: str) -> BpeTokenizer:
    """Load an encoding of tiktoken from its cache or the network; DataError if that fails."""
    published = tiktoken.list_encoding_names()
    if name not in published:
        known = ", ".join(["auto", "byte", "char", "bpe", *published])
        raise DataError(f"{name}: no such tokenizer; choose one of {known}, or a .json file")
    try:
        with show_elapsed(f"loading the encoding {name}"):
            return BpeTokenizer(tiktoken.get_encoding(name))
    except Exception as error:  # whatever the download raises
        raise DataError(
            f"tokenizer {name}: download failed ({type(error).__name__}); use byte, char or bpe, "
            f"or set TIKTOKEN_CACHE_DIR to a folder that has its files"
        ) from error


def add_chat(tokenizer: BpeTokenizer) -> BpeTokenizer:
    """Add the tokens and the template of ChatML to an encoding, behind its own tokens."""
    encoding = tokenizer.encoding
    added = {name: number for number, name in enumerate(CHAT_TOKENS, encoding.n_vocab)}
    return create_bpe_tokenizer(
        encoding.name,
        encoding._pat_str,
        encoding._mergeable_ranks,
        encoding._special_tokens | added,
        ends=[CHAT_TOKENS[1]],
        chat_template=CHAT_TEMPLATE,
    )
