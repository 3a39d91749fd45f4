"""Find the stretches of a text that stand verbatim in a training text, and where they stand there.

A copy is a stretch of at least SHORTEST_COPY characters that cannot be made longer. Copies may
overlap, as two that stand in different files, but none lies within another.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from gptmini.tokenizer.chunks import Place

# Characters; few as long are chance (scripts/LOG.md: How does one find copies of a training text?)
SHORTEST_COPY = 20
SEPARATOR = "\ud800"  # in no valid text, so no copy runs from one document into the next
# A stretch of a document, whether a document begins with it, and where it is from.
Piece = tuple[str, bool, Place]


@dataclass(frozen=True)
class SourceText:
    """A training text, and where the pieces that it came in are from; see `join_pieces`.

    `text` has a SEPARATOR between documents. The n-th piece begins there at `begins[n]`, in its
    file at `places[n]`, and belongs to the document `documents[n]`, counted from 1.
    """

    text: str
    begins: list[int]
    places: list[Place]
    documents: list[int]

    def locate(self, position: int) -> tuple[Place, int]:
        """Return the place and the document of a position; a record has one place."""
        number = bisect_right(self.begins, position) - 1
        before = self.text[self.begins[number] : position]
        return self.places[number].after(before), self.documents[number]


def join_pieces(pieces: Iterable[Piece]) -> SourceText:
    """Join a text that comes in pieces."""
    parts: list[str] = []
    length = 0
    begins: list[int] = []
    places: list[Place] = []
    documents: list[int] = []
    document = 0
    for piece, starts_document, place in pieces:
        if starts_document and document:
            parts.append(SEPARATOR)
            length += len(SEPARATOR)
        document += starts_document
        begins.append(length)
        places.append(place)
        documents.append(document)
        parts.append(piece)
        length += len(piece)
    return SourceText("".join(parts), begins, places, documents)


@dataclass(frozen=True)
class Copy:
    """A stretch of a text, from the character `start` up to `end`, that the training text has.

    Its first occurrence begins in `line` of `file`, which is the line or row of the
    record in a file of records; and in the n-th `document`. All of these count from 1.
    """

    start: int
    end: int
    file: str
    line: int
    document: int

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
    text. A copy has a letter or a digit: rules of dashes are nobody's words.
    """

    source: SourceText
    text: str
    prompt: str = ""

    @cached_property
    def stretches(self) -> list[tuple[int, int]]:
        """The stretches that belong to copies, joined where these overlap or touch."""
        whole = self.prompt + self.text
        joined: list[tuple[int, int]] = []
        for start in find_windows(self.source.text, whole, self._shared):
            end = start + SHORTEST_COPY
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        skipped = len(self.prompt)
        return [
            (max(0, start - skipped), end - skipped)
            for start, end in joined
            if end > skipped and _has_words(whole[start:end])
        ]

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies, in order."""
        whole = self.prompt + self.text
        skipped = len(self.prompt)
        copies: list[Copy] = []
        for start, end, position in find_matches(self.source.text, whole, self._shared):
            if end <= skipped or not _has_words(whole[start:end]):
                continue
            begin = max(start, skipped)
            words = whole[begin:end]
            # A copy that begins with line breaks is looked up where its words begin.
            n_blank = len(words) - len(words.lstrip())
            place, document = self.source.locate(position + begin - start + n_blank)
            if copies and copies[-1].start == begin - skipped:  # both began in the prompt
                copies.pop()
            copies.append(Copy(begin - skipped, end - skipped, place.file, place.line, document))
        return copies

    @cached_property
    def _shared(self) -> list[tuple[int, int]]:
        return find_shared(self.source.text, self.prompt + self.text)

    @property
    def share(self) -> float:
        """The fraction of the characters that belong to a copy."""
        return sum(end - start for start, end in self.stretches) / max(1, len(self.text))

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


def find_shared(text: str, query: str) -> list[tuple[int, int]]:
    """Find the stretches of a text of which every SHORTEST_COPY characters stand in a query.

    Returns where each begins and ends. Whatever is that long and stands in both is in one of them.
    """
    half = SHORTEST_COPY // 2
    halves = {query[at : at + half] for at in range(len(query) - half + 1)}
    starts = range(len(query) - SHORTEST_COPY + 1)
    windows = {query[start : start + SHORTEST_COPY] for start in starts}
    shared: list[tuple[int, int]] = []
    # Each SHORTEST_COPY characters of the text have one of these halves in them.
    for at in range(half - 1, len(text), half):
        if text[at : at + half] not in halves:
            continue
        for start in range(at - half + 1, at + 1):
            end = start + SHORTEST_COPY
            if text[start:end] not in windows:
                continue
            if shared and shared[-1][1] == end - 1:
                shared[-1] = (shared[-1][0], end)
            else:
                shared.append((start, end))
    return shared


def find_windows(text: str, query: str, shared: list[tuple[int, int]]) -> list[int]:
    """Find where in a query SHORTEST_COPY characters begin that stand in a text."""
    known = {
        text[start : start + SHORTEST_COPY]
        for begin, end in shared
        for start in range(begin, end - SHORTEST_COPY + 1)
    }
    starts = range(len(query) - SHORTEST_COPY + 1)
    return [start for start in starts if query[start : start + SHORTEST_COPY] in known]


def find_matches(
    text: str, query: str, shared: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Find the longest stretches of a query that a text has, with none within another.

    Returns for each match its first character and the one behind its last in the query, and where
    it first stands in the text.
    """
    joined = SEPARATOR.join(text[begin:end] for begin, end in shared)
    begins = list(accumulate((end - begin + len(SEPARATOR) for begin, end in shared), initial=0))
    matches: list[tuple[int, int, int]] = []
    for window in find_windows(text, query, shared):
        start, end = window, window + SHORTEST_COPY
        if matches:
            last_start, last_end, _ = matches[-1]
            if end <= last_end:
                continue
            # The next match may begin within the last one.
            starts = range(last_start + 1, window)
            n_unknown = bisect_left(starts, True, key=lambda at: query[at:end] in joined)
            start = last_start + 1 + n_unknown
        match_end, found = _follow(joined, query, start)
        number = bisect_right(begins, found) - 1
        matches.append((start, match_end, shared[number][0] + found - begins[number]))
    return matches


def _follow(text: str, query: str, start: int) -> tuple[int, int]:
    """Find the end of the longest stretch from a start of a query, and its first place in a text.

    At least SHORTEST_COPY characters from there stand in the text.
    """
    end = start + SHORTEST_COPY - 1
    position = 0
    while end < len(query):
        found = text.find(query[start : end + 1], position)  # one that is longer
        if found == -1:
            break
        position = found
        both = [query[start:], text[found : found + len(query) - start]]
        end = start + len(os.path.commonprefix(both))  # noqa: RUF071 - of characters
    return end, position
