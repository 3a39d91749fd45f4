"""Cut a long text into chunks that encode to the same tokens as the whole text."""

import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

TEXT_BLOCK_SIZE = 1 << 18  # characters encoded at a time; tiktoken fails on a million spaces


class Place(NamedTuple):
    """Where a text begins: in a line of a plain text, or in a line or row that is a record."""

    file: str
    line: int  # from 1 on
    is_record: bool = False  # whose line ends are not those of the file

    def after(self, text: str) -> "Place":
        """Return where a text ends that begins here."""
        return self if self.is_record else self._replace(line=self.line + text.count("\n"))

    def __str__(self) -> str:
        """Write it as messages name it: `notes/a.md:12`."""
        return f"{self.file}:{self.line}"


class TextChunk(NamedTuple):
    """A stretch of text; a long document comes in several, a conversation in one.

    A conversation has `messages`, and its text is what they say.
    """

    text: str
    starts_document: bool
    messages: list[dict[str, Any]] | None = None  # {"role": ..., "content": ...}
    place: Place = Place("", 1)


def split_text(text: str, block_size: int | None = None) -> Iterator[str]:
    """Split a text into stretches of at most `block_size` characters, or TEXT_BLOCK_SIZE."""
    block_size = block_size or TEXT_BLOCK_SIZE
    start = 0
    while len(text) - start > block_size:
        end = start + find_boundary(text[start : start + block_size], block_size)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def find_boundary(text: str, limit: int, reach: int = 4096) -> int:
    """Find where to cut a text, at `limit` at most, so that both halves encode as the whole does.

    Cut between a letter or digit and the space after it, or else, as in Chinese, between a letter
    and what is neither letter, digit, mark nor apostrophe: no word of a known pattern spans that.
    If there is no such place within `reach` characters, cut at a line end, or else at the limit.
    """
    lowest = max(1, limit - reach)
    space = text.rfind(" ", lowest, limit)
    while space > 0 and not text[space - 1].isalnum():
        space = text.rfind(" ", lowest, space)
    if space > 0:
        return space
    for place in range(limit - 1, lowest - 1, -1):
        continues_word = unicodedata.category(text[place])[0] in "LNM" or text[place] in "'\u2019"
        if text[place - 1].isalpha() and not continues_word:
            return place
    after_line_end = text.rfind("\n", lowest - 1, limit) + 1
    return after_line_end or limit


def count_utf8_bytes(text: str) -> int:
    """Count the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
