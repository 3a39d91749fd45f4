"""Find the stretches of a text that stand verbatim in a training text, and where they stand there.

A copy is a stretch of at least SHORTEST_COPY characters that cannot be made longer. Copies may
overlap, as two that stand in different files, but none lies within another.
"""

from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gptmini.errors import DataError
from gptmini.extras.sources.index import PADDING, TextIndex
from gptmini.extras.sources.suffixes import Bytes

# Characters; few as long are chance (scripts/LOG.md: How does one find copies of a training text?)
SHORTEST_COPY = 20
# Bytes to which matches are measured at first: as many as so short a copy can have.
MEASURED_BYTES = 4 * SHORTEST_COPY
COMPARED_BYTES = 16  # at a time
AFTER_QUERY = b"\xfe"  # stands in no UTF-8, and differs from SEPARATOR
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Copy:
    """A stretch of a text, from the character `start` up to `end`, that the training text has.

    Where that has it first, its words begin in `line` of `file`, which is the line or row of the
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
    """What a text copies: its length in characters, and its copies, in order.

    `share` is that of the characters which belong to a copy.
    """

    n_characters: int
    copies: list[Copy]

    @property
    def share(self) -> float:
        return sum(end - start for start, end in self.stretches) / max(1, self.n_characters)

    @property
    def longest(self) -> Copy | None:
        return max(self.copies, key=lambda copy: copy.length, default=None)

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The stretches that belong to copies, joined where these overlap or touch."""
        joined: list[tuple[int, int]] = []
        for copy in self.copies:
            if joined and copy.start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], copy.end)
            else:
                joined.append((copy.start, copy.end))
        return joined

    def describe(self) -> str:
        """Say in a line how much is copied, and where the longest copy stands."""
        if self.longest is None:
            return f"no {SHORTEST_COPY} characters in a row of this text stand in the training text"
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


def search(index: TextIndex, text: str, prompt: str = "") -> Copies:
    """Find the copies of a text that continues a prompt.

    The prompt is searched only to see a copy that begins in it and goes on in the text. A copy is
    on whole characters, and has a letter or a digit: rules of dashes are nobody's words. DataError
    for a text that is not valid Unicode.
    """
    spans = find_matches(index, prompt + text, SHORTEST_COPY)
    copies: list[Copy] = []
    for start, end in spans:
        if end <= len(prompt) or not any(map(str.isalnum, (prompt + text)[start:end])):
            continue
        position = find_first(index, (prompt + text)[start:end].encode())
        begin = max(0, start - len(prompt))
        words = text[begin : end - len(prompt)]
        # A copy that begins with line breaks is looked up where its words begin.
        before = prompt[start:] + words[: len(words) - len(words.lstrip())]
        file, line, document = index.locate(position + len(before.encode()))
        if copies and copies[-1].start == begin:  # both began in the prompt
            copies.pop()
        copies.append(Copy(begin, end - len(prompt), file, line, document))
    return Copies(len(text), copies)


def find_matches(index: TextIndex, text: str, shortest: int) -> list[tuple[int, int]]:
    """Find the longest stretches of a text that the index has, with none within another.

    Returns for each its first character and the one behind its last.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text: character {error.start} is not valid Unicode; remove it") from None
    query = np.frombuffer(encoded + AFTER_QUERY * PADDING, np.uint8)
    begins_character = (query & 0xC0) != 0x80  # (M + PADDING,)
    # By byte: the number of the character that begins there, or that it is within.
    characters = np.cumsum(begins_character) - 1
    (bounds,) = begins_character[: len(encoded)].nonzero()
    ends = characters[bounds + match(index, query, bounds)]
    likely = (ends - np.arange(len(bounds)) >= shortest).nonzero()[0].tolist()

    def follow(n: int) -> int:
        """Return the character behind the longest match from the n-th likely one."""
        start = bounds[likely[n]]
        return int(characters[start + _follow(index, query[start:])])

    found: list[tuple[int, int]] = []
    n = 0
    while n < len(likely):
        end = follow(n)
        found.append((likely[n], end))
        # Matches from later characters never end earlier, and those from behind this one later.
        within = range(n + 1, bisect_left(likely, end))
        n += 1 + bisect_right(within, end, key=follow)
    return found


def find_first(index: TextIndex, copied: bytes) -> int:
    """Return where the index has first what it has somewhere."""

    def read(n: int) -> bytes:
        begin = int(index.order[n])
        return index.text[begin : begin + len(copied)].tobytes()

    numbers = range(len(index.order))
    low = bisect_left(numbers, copied, key=read)
    high = bisect_right(numbers, copied, lo=low, key=read)
    return int(index.order[low:high].min())


def match(index: TextIndex, query: Bytes, starts: Numbers) -> Numbers:
    """Return how many bytes from each start (S,) of a query the index has, (S,).

    The query ends in PADDING bytes that no text has. A binary search for all starts at once; what
    a suffix shares with both ends of a range, it shares with all between (Manber and Myers 1993).
    """
    windows = np.lib.stride_tricks.sliding_window_view
    text_blocks = windows(index.text, COMPARED_BYTES)
    query_blocks = windows(query, COMPARED_BYTES)
    low = np.zeros(len(starts), np.int64)
    high = np.full(len(starts), len(index.order), np.int64)
    # What is shared with the suffix below the range and above it.
    shared = np.zeros((2, len(starts)), np.int64)
    (open_starts,) = (low < high).nonzero()
    while len(open_starts):
        middle = (low[open_starts] + high[open_starts]) // 2
        suffixes = index.order[middle].astype(np.int64)
        begins = starts[open_starts]
        equal = shared[:, open_starts].min(axis=0)
        is_above = np.zeros(len(open_starts), bool)
        left = np.arange(len(open_starts))
        while len(left):
            of_text = text_blocks[suffixes[left] + equal[left]]  # (L, COMPARED_BYTES)
            of_query = query_blocks[begins[left] + equal[left]]
            differs = of_text != of_query
            first = differs.argmax(axis=1)
            rows = np.arange(len(left))
            is_above[left] = of_text[rows, first] > of_query[rows, first]
            is_same = ~differs[rows, first]
            equal[left] += np.where(is_same, COMPARED_BYTES, first)
            left = left[is_same & (equal[left] < MEASURED_BYTES)]
        side = is_above.astype(np.int64)
        shared[side, open_starts] = equal
        low[open_starts] = np.where(is_above, low[open_starts], middle + 1)
        high[open_starts] = np.where(is_above, middle, high[open_starts])
        open_starts = open_starts[low[open_starts] < high[open_starts]]
    return shared.max(axis=0)


def _follow(index: TextIndex, query: Bytes) -> int:
    """Return how many bytes from the beginning of a query the index has, however many.

    The query ends as in `match`.
    """
    low, high = 0, len(index.order)
    shared = [0, 0]
    while low < high:
        middle = (low + high) // 2
        suffix = int(index.order[middle])
        equal = min(shared)
        equal += _count_equal(query[equal:], index.text[suffix + equal :])
        is_above = bool(index.text[suffix + equal] > query[equal])
        shared[is_above] = equal
        if is_above:
            high = middle
        else:
            low = middle + 1
    return max(shared)


def _count_equal(one: Bytes, other: Bytes) -> int:
    """Count the bytes that two texts begin with alike; they differ somewhere."""
    shared = min(len(one), len(other))
    one, other = one[:shared], other[:shared]
    length = COMPARED_BYTES
    while (one[:length] == other[:length]).all():
        length *= 8
    return int((one[:length] != other[:length]).argmax())
