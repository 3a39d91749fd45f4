"""Find the stretches of a text that stand verbatim in a training text, and where they stand there.

A copy is a stretch of at least SHORTEST_COPY characters, the longest from where it begins. Copies
are taken from left to right, and the next one begins behind the last. Its first SHORTEST_COPY
characters have a letter or a digit among them: rules of dashes are nobody's words.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gptmini.tokenizer.chunks import Place

# Characters; few as long are chance (scripts/LOG.md: How does one find copies of a training text?)
SHORTEST_COPY = 20
SEPARATOR = "\ud800"  # in no valid text, so no copy runs from one document into the next
# A stretch of a document, whether a document begins with it, and where it is from.
Piece = tuple[str, bool, Place]


class SourceText:
    """A training text, joined of pieces with a SEPARATOR between documents.

    The n-th piece begins in `text` at `begins[n]`, and in its file at `places[n]`.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        parts: list[str] = []
        length = 0
        self.begins: list[int] = []
        self.places: list[Place] = []
        for piece, starts_document, place in pieces:
            if starts_document and parts:
                parts.append(SEPARATOR)
                length += len(SEPARATOR)
            self.begins.append(length)
            self.places.append(place)
            parts.append(piece)
            length += len(piece)
        self.text = "".join(parts)

    def locate(self, position: int) -> Place:
        """Return the place of a position; a record has one place."""
        number = bisect_right(self.begins, position) - 1
        before = self.text[self.begins[number] : position]
        return self.places[number].after(before)


@dataclass(frozen=True)
class Copy:
    """A stretch of a text, from the character `start` up to `end`, that the training text has.

    Its first occurrence begins in `line` of `file`, counted from 1: in a file of records, the line
    or row of the record.
    """

    start: int
    end: int
    file: str
    line: int

    @property
    def length(self) -> int:
        """Its characters."""
        return self.end - self.start

    @property
    def place(self) -> str:
        """Where it stands: `notes/a.md:12`."""
        return f"{self.file}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        return {**asdict(self), "length": self.length}


@dataclass(frozen=True)
class Copies:
    """The copies of a training text that a text contains.

    The text continues `prompt`, which is searched, too: a copy may begin there and go on in the
    text.
    """

    source: SourceText
    text: str
    prompt: str = ""

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies, in order."""
        whole = self.prompt + self.text
        skipped = len(self.prompt)
        copies: list[Copy] = []
        for start, end, position in find_matches(self.source.text, whole):
            if end <= skipped:
                continue
            begin = max(start, skipped)
            words = whole[begin:end]
            # A copy that begins with line breaks is looked up where its words begin.
            n_blank = len(words) - len(words.lstrip())
            place = self.source.locate(position + begin - start + n_blank)
            copies.append(Copy(begin - skipped, end - skipped, place.file, place.line))
        return copies

    @property
    def share(self) -> float:
        """The fraction of the characters that belong to a copy."""
        return sum(copy.length for copy in self.copies) / max(1, len(self.text))

    @property
    def longest(self) -> Copy | None:
        return max(self.copies, key=lambda copy: copy.length, default=None)

    def describe(self) -> str:
        """Say in a line how much is copied, and where the longest copy stands."""
        if self.longest is None:
            return f"no copy of {SHORTEST_COPY} characters or more from the training text"
        share = f"{100 * self.share:.0f} %" if self.share >= 0.01 else "under 1 %"
        return (
            f"{share} of this text stands in the training text; the longest copy is "
            f"{self.longest.length:,} characters ({self.longest.place})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        longest = self.longest.length if self.longest else 0
        copies = [copy.to_dict() for copy in self.copies]
        return {"share": round(self.share, 4), "longest": longest, "copies": copies}


def _has_words(text: str) -> bool:
    return any(map(str.isalnum, text))


def find_places(text: str, query: str) -> dict[str, list[int]]:
    """Find where in a text each SHORTEST_COPY characters of a query stand that have words."""
    half = SHORTEST_COPY // 2
    halves = {query[at : at + half] for at in range(len(query) - half + 1)}
    starts = range(len(query) - SHORTEST_COPY + 1)
    windows = {query[start : start + SHORTEST_COPY] for start in starts}
    places: dict[str, list[int]] = {window: [] for window in filter(_has_words, windows)}
    # Each SHORTEST_COPY characters of the text have one of these halves in them.
    for at in range(half - 1, len(text), half):
        if text[at : at + half] not in halves:
            continue
        for start in range(at - half + 1, at + 1):
            window = text[start : start + SHORTEST_COPY]
            if window in places:
                places[window].append(start)
    return places


def find_matches(text: str, query: str) -> list[tuple[int, int, int]]:
    """Find the stretches of a query that a text has, each the longest from where it begins.

    Returns for each match its first character and the one behind its last in the query, and where
    it first stands in the text.
    """
    places = find_places(text, query)
    matches: list[tuple[int, int, int]] = []
    start = 0
    while start <= len(query) - SHORTEST_COPY:
        end = start
        position = 0
        for place in places.get(query[start : start + SHORTEST_COPY], []):
            if end < len(query) and text.startswith(query[start : end + 1], place):  # it is longer
                both = [query[start:], text[place : place + len(query) - start]]
                end = start + len(os.path.commonprefix(both))  # noqa: RUF071 - of characters
                position = place
        if end > start:
            matches.append((start, end, position))
        start = max(end, start + 1)
    return matches
