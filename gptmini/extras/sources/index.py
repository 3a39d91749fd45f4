"""An index of a training text: its bytes, the order of its suffixes, and which file each is from.

The order, which takes long to find, is kept in a file, as numpy writes it with a checksum.
"""

import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.extras.sources.suffixes import Bytes, Positions, sort_suffixes
from gptmini.tokenizer.chunks import Place

SEPARATOR = b"\xff"  # stands in no UTF-8, so that no match goes on behind a document
PADDING = 64  # bytes that a search may read beyond the end
# A stretch of a document, whether a document begins with it, and where it is from.
Piece = tuple[bytes, bool, Place]


@dataclass(frozen=True)
class TextIndex:
    """A text and the order of its suffixes (N,); see `build_index`.

    `text` (N + PADDING,) has a SEPARATOR behind each document, and ends in SEPARATORs. `pieces`
    (P, 5) are in the order of the text: for each its beginning, file, line, whether it is a
    record, and document.
    """

    text: Bytes
    order: Positions
    names: list[str]
    pieces: np.ndarray[tuple[int, int], np.dtype[np.int64]]

    def locate(self, position: int) -> tuple[str, int, int]:
        """Return the file, the line and the document of a position, each from 1 on.

        The line of a record is the line, or row, that the record begins in.
        """
        number = int(np.searchsorted(self.pieces[:, 0], position, "right")) - 1
        begin, name, line, is_record, document = self.pieces[number].tolist()
        if not is_record:
            line += int((self.text[begin:position] == ord("\n")).sum())
        return self.names[name], line, document


def build_index(pieces: Iterable[Piece], kept: Path | None = None) -> TextIndex:
    """Index a text that comes in pieces; its order is that of the file `kept`, or goes there."""
    text = bytearray()
    numbers: dict[str, int] = {}
    rows = []
    document = 0
    for piece, starts_document, place in pieces:
        if starts_document and document:
            text += SEPARATOR
        document += starts_document
        name = numbers.setdefault(place.file, len(numbers))
        rows.append((len(text), name, place.line, place.is_record, document))
        text += piece
    text += SEPARATOR
    order = None if kept is None else _read_order(kept)
    if order is None:
        order = sort_suffixes(np.frombuffer(text, np.uint8))
        if kept is not None:
            with files.atomic_write(kept) as file:
                np.savez(file, order=order)
    padded = np.frombuffer(text + SEPARATOR * PADDING, np.uint8)
    return TextIndex(padded, order, list(numbers), np.array(rows, np.int64).reshape(-1, 5))


def _read_order(path: Path) -> Positions | None:
    """Read the order of a text; None if it is not there yet, or damaged."""
    with (
        suppress(OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile),
        files.open_regular(path) as file,
        np.load(file) as stored,
    ):
        return stored["order"]
    return None
