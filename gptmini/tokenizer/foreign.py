"""Tokenizers of somebody else's models, run by `tokenizers`, the library that made their files.

The file, tokenizer.json in Hugging Face's format, stays in the run as it came. What it says means
what it means there: how words are split, how texts are normalized, the flags of added tokens. Three
things differ. The name of a special token in a text stays text, as with all our tokenizers; dropout
is off; and of what a post-processor puts around a text, only the first token is put there.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gptmini.errors import DataError, make_missing_package_error, shorten
from gptmini.tokenizer.byte_level import from_byte_level
from gptmini.tokenizer.chunks import split_text
from gptmini.tokenizer.tokenizers import IMPORTED_KIND, Tokenizer, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

BLOCK_SIZE = 1 << 14  # characters; without words, the time of a merge grows with the text
BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\u2581"  # stands for a space in SentencePiece


class ForeignTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face, applied by `tokenizers`; threads may share it."""

    kind = IMPORTED_KIND

    def __init__(
        self,
        file: str,
        library: "Library",
        vocab_size: int,
        eos_token: str,
        ends: Sequence[str] = (),
        adds_bos: bool = False,
        chat_template: str | None = None,
        template_tokens: dict[str, str] | None = None,
    ) -> None:
        """`file` is the content of tokenizer.json, and `library` what `load_library` made of it.

        `vocab_size` is the model's: the file may have fewer tokens, or more. `eos_token` and `ends`
        name the special tokens that end a text. Raises KeyError if one of them does not exist.
        """
        if not isinstance(chat_template, str | None):
            raise ValueError("chat_template is not a text")
        self.file = file
        self.vocab_size = vocab_size
        self.adds_bos = adds_bos
        self.chat_template = chat_template
        self.template_tokens = template_tokens or {}
        self._library = library
        self.special_tokens = find_special_tokens(library, vocab_size)
        self._eos_token = eos_token
        names = dict.fromkeys([*ends, eos_token])  # without repetition
        self.end_tokens = [self.special_tokens[name] for name in names]
        self.eos_token_id = self.special_tokens[eos_token]
        self._decoder = library.decoder
        self._is_byte_level = self._decode_inside("\u0120") == " "
        self._has_bytes = self._decode_inside("<0x41>") == "A"
        self.drops_first_space = self._decoder.decode([f"{SPACE}a"]) == "a"

    def encode(self, text: str, continues: bool = False) -> Tokens:
        text.encode()  # raises UnicodeEncodeError for what the library would call no text
        tokens = [np.empty(0, np.uint32)]
        for part in split_text(text, BLOCK_SIZE):
            tokens.append(_encode(self._library, part, continues))
            continues = True
        return self._check(np.concatenate(tokens))

    def encode_special(self, text: str, continues: bool = False) -> Tokens:
        text.encode()
        return self._check(_encode(self._special_library, text, continues))

    def _check(self, tokens: Tokens) -> Tokens:
        """Return the tokens; DataError if the model has not all of them."""
        if tokens.size and tokens.max() >= self.vocab_size:
            name = self._library.id_to_token(int(tokens.max()))
            raise DataError(f"text: {shorten(name)} is not in the vocabulary; leave it out")
        return tokens

    @cached_property
    def _special_library(self) -> "Library":
        """The same for texts in which the name of a special token is that token.

        It shares the vocabulary, which may fill a few hundred megabytes.
        """
        library = type(self._library)(self._library.model)
        library.normalizer = self._library.normalizer
        library.pre_tokenizer = self._library.pre_tokenizer
        library.decoder = self._library.decoder
        added = sorted(self._library.get_added_tokens_decoder().items())
        library.add_tokens([token for _, token in added])
        return library

    def decode_token(self, token: int) -> bytes:
        name = self._library.id_to_token(token)
        if name is None or token == self.eos_token_id:
            return b""
        if self._is_byte_level:
            try:
                return from_byte_level(name)
            except KeyError:  # an added token
                return name.encode()
        byte = BYTE_NAME.fullmatch(name) if self._has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else self._decode_inside(name).encode()

    def _decode_inside(self, name: str) -> str:
        """Decode a token that is not the first of a text."""
        with _turn_panics_into(_make_text_error):
            return self._decoder.decode(["a", name])[1:]

    def decode(self, tokens: Iterable[int]) -> str:
        kept = [token for token in tokens if token != self.eos_token_id]
        with _turn_panics_into(_make_text_error):
            return self._library.decode(kept, skip_special_tokens=False)

    def read_parts(self) -> dict[str, Any]:
        """Return what the file says, in the library's words: with all keys, and merges as pairs."""
        return json.loads(self._library.to_str())

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "vocab_size": self.vocab_size,
            "document": self._eos_token,
            "adds_bos": self.adds_bos,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ForeignTokenizer":
        """Build the tokenizer that `to_json` wrote; ValueError or KeyError for damaged data."""
        return cls(
            data["file"],
            load_library(data["file"]),
            data["vocab_size"],
            data["document"],
            data.get("ends", []),
            data["adds_bos"],
            data.get("chat_template"),
            data.get("template_tokens"),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the file, and not the library's object, which forgets a setting."""
        return ForeignTokenizer.from_dict, (self.to_dict() | self.chat_settings(),)


def import_library() -> type["Library"]:
    """Import the class of the library; MachineError if it is not installed."""
    try:
        from tokenizers import Tokenizer as Library  # noqa: PLC0415 - an extra
    except ImportError:
        raise make_missing_package_error(
            "tokenizers of Hugging Face", "tokenizers", "hub"
        ) from None
    return Library


def load_library(file: str) -> "Library":
    """Let the library read a tokenizer.json; ValueError if it cannot.

    MachineError if it is not installed.
    """
    library_class = import_library()
    try:
        with _turn_panics_into(ValueError):
            library = library_class.from_str(file)
            library.no_truncation()
            library.no_padding()
            library.encode("a")
            if library.decoder is None:
                raise ValueError("it has no decoder")
            library.decoder.decode(["a", "<0x41>"])
    except Exception as error:  # the library raises no narrower one
        raise ValueError(shorten(str(error), 120)) from None
    library.encode_special_tokens = True  # as text
    if getattr(library.model, "dropout", None):
        library.model.dropout = None
    return library


@contextmanager
def _turn_panics_into(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Turn a panic of the library, a BaseException that it does not export, into an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make_error(shorten(str(error), 120)) from None


def _make_text_error(problem: str) -> DataError:
    return DataError(
        f"tokenizer {IMPORTED_KIND}: fails with a text ({problem}); choose another model"
    )


def find_special_tokens(library: "Library", vocab_size: int) -> dict[str, int]:
    """Return the special tokens that a model with a vocabulary of this size has, by name."""
    added = sorted(library.get_added_tokens_decoder().items())
    return {
        token.content: number for number, token in added if token.special and number < vocab_size
    }


def _encode(library: "Library", text: str, continues: bool) -> Tokens:
    """Encode a text; one that `continues` another has no beginning of its own.

    Some tokenizers put a space before whatever they encode. So a text that goes on is encoded
    behind a character that stays a token by itself, as one of the two nearly always does.
    """
    beginnings = ["\n", "a"] if text[:1].isalnum() else ["a", "\n"]
    for beginning in beginnings if continues else []:
        before = _get_tokens(library, beginning)
        tokens = _get_tokens(library, beginning + text)
        if tokens[: len(before)] == before:
            return np.array(tokens[len(before) :], np.uint32)
    return np.array(_get_tokens(library, text), np.uint32)


def _get_tokens(library: "Library", text: str) -> list[int]:
    # This method does not compute where each token stands in the text.
    with _turn_panics_into(_make_text_error):
        (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids
