"""How much a text repeats itself: its held-out part what is trained on, and that part itself.

Where much is repeated, a low loss on the held-out part says that the model remembers, not that it
has learned.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gptmini.copies.find import SHORTEST_COPY, Numbers, find_matches
from gptmini.copies.index import Piece, TextIndex
from gptmini.copies.suffixes import Bytes

REPEATED_CHARACTERS = 50  # in a row, which nobody writes twice by chance
NEARLY_WHOLE = 0.8  # of a document
BETWEEN_DOCUMENTS = "\0"  # stands in no plain text
CHARACTERS_AT_ONCE = 1_000_000
COMPARED_BYTES = 16  # at a time
SUFFIXES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Overlap:
    """What of a held-out part stands in the training part, and what of that stands there twice.

    All are shares of characters but `repeated_in_training`, which is one of bytes, and the counts.
    `held_out_in_copies` is in stretches of SHORTEST_COPY characters or more, as a generated text
    copies; the others in stretches of REPEATED_CHARACTERS or more. A document counts as repeated if
    nearly all of it is.
    """

    held_out_in_copies: float
    held_out_repeated: float
    documents: int
    documents_repeated: int
    repeated_in_training: float

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        return asdict(self)

    def describe(self) -> str:
        """Describe it in three lines."""
        return "\n".join(
            [
                f"held out   {100 * self.held_out_repeated:.1f} % stands in the training text word "
                f"for word, in stretches of {REPEATED_CHARACTERS} characters or more; "
                f"{100 * self.held_out_in_copies:.1f} % in stretches of {SHORTEST_COPY} or more",
                f"documents  {self.documents_repeated:,} of {self.documents:,} that are held out "
                f"stand in the training text nearly whole",
                f"training   {100 * self.repeated_in_training:.1f} % stands in it more than once, "
                f"in stretches of {REPEATED_CHARACTERS} characters or more",
            ]
        )


def measure_overlap(index: TextIndex, held_out: Iterable[Piece]) -> Overlap:
    """Measure how much of a held-out part the training text has, and how much that repeats."""
    n_characters = n_copied = n_repeated = documents = documents_repeated = 0
    for texts in _group_texts(held_out):
        joined = BETWEEN_DOCUMENTS.join(texts)
        spans = find_matches(index, joined, SHORTEST_COPY)
        long = [span for span in spans if span[1] - span[0] >= REPEATED_CHARACTERS]
        n_copied += int(_cover(spans, len(joined)).sum())
        covered = _cover(long, len(joined))
        n_repeated += int(covered.sum())
        lengths = np.array([len(text) for text in texts])
        starts = np.append(0, np.cumsum(lengths + 1)[:-1])
        shares = np.add.reduceat(np.append(covered, False), starts) / lengths
        n_characters += int(lengths.sum())
        documents += len(texts)
        documents_repeated += int((shares >= NEARLY_WHOLE).sum())
    return Overlap(
        round(n_copied / max(1, n_characters), 4),
        round(n_repeated / max(1, n_characters), 4),
        documents,
        documents_repeated,
        round(_measure_repeated(index), 4),
    )


def _group_texts(pieces: Iterable[Piece]) -> Iterator[list[str]]:
    """Yield documents, a few together; parts of those that are very long."""
    texts: list[str] = []
    size = 0
    for piece, starts_document, _ in pieces:
        text = piece.decode(errors="replace")
        if starts_document or not texts:
            if size >= CHARACTERS_AT_ONCE:
                yield texts
                texts, size = [], 0
            texts.append(text)
        else:
            texts[-1] += text
        size += len(text)
    if texts:
        yield texts


def _cover(spans: list[tuple[int, int]], length: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Mark what lies in spans, (length,)."""
    changes = np.zeros(length + 1, np.int64)
    np.add.at(changes, [start for start, _ in spans], 1)
    np.add.at(changes, [end for _, end in spans], -1)
    return np.cumsum(changes[:-1]) > 0


def _measure_repeated(index: TextIndex) -> float:
    """Measure the share of a text that stands in it more than once, in long stretches.

    Two suffixes that begin alike are neighbours in their order, or all between them begin so, too.
    """
    text = index.text
    n = len(index.order)
    begins_character = (text & 0xC0) != 0x80
    (bounds,) = begins_character.nonzero()
    changes = np.zeros(len(text) + 1, np.int64)
    for start in range(0, n - 1, SUFFIXES_AT_ONCE):
        order = index.order[start : start + SUFFIXES_AT_ONCE + 1].astype(np.int64)
        one, other = order[:-1], order[1:]
        of_characters = begins_character[one] & begins_character[other]
        one, other = one[of_characters], other[of_characters]
        first = np.searchsorted(bounds, one)
        last = np.minimum(first + REPEATED_CHARACTERS, len(bounds) - 1)
        lengths = bounds[last] - one
        is_same = _begin_alike(text, one, other, lengths)
        for begins in (one[is_same], other[is_same]):
            np.add.at(changes, begins, 1)
            np.add.at(changes, begins + lengths[is_same], -1)
    return float((np.cumsum(changes[:n]) > 0).mean())


def _begin_alike(text: Bytes, one: Numbers, other: Numbers, lengths: Numbers) -> np.ndarray:
    """Tell which pairs of places (S,) begin with the same bytes of some length, without an end."""
    blocks = np.lib.stride_tricks.sliding_window_view(text, COMPARED_BYTES)
    alike = np.ones(len(one), bool)
    left = np.arange(len(one))
    done = 0
    while len(left):
        wanted = np.arange(done, done + COMPARED_BYTES) < lengths[left, None]  # (L, COMPARED_BYTES)
        of_one = blocks[np.minimum(one[left] + done, len(blocks) - 1)]
        of_other = blocks[np.minimum(other[left] + done, len(blocks) - 1)]
        bad = (of_one != of_other) | (of_one == 0xFF)
        alike[left[(bad & wanted).any(axis=1)]] = False
        done += COMPARED_BYTES
        left = left[alike[left] & (lengths[left] > done)]
    return alike
