"""An index of a training text: its bytes, the order of its suffixes, and which file each is from.

A file of it has these parts:

    header      JSON with sizes and the names of the files; filled up to a multiple of 64 bytes
    text        UTF-8, a SEPARATOR behind each document, and PADDING more of them at the end
    order       where the suffixes begin, in their order; 32 bits each
    pieces      for each piece of the text: begin, file, line, whether it is a record, document
    hash        the SHA-256 of all that
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptmini import files
from gptmini.errors import DataError, describe_os_error
from gptmini.extras.sources.suffixes import Bytes, Positions, sort_suffixes
from gptmini.tokenizer.chunks import Place

MAGIC = "gptmini copies 1"
SEPARATOR = b"\xff"  # stands in no UTF-8, so that no match goes on behind a document
PADDING = 64  # bytes that a search may read beyond the end
SHA256_BYTES = 32
# A stretch of a document, whether a document begins with it, and where it is from.
Piece = tuple[bytes, bool, Place]


@dataclass(frozen=True)
class TextIndex:
    """A text and the order of its suffixes (N,); see `build_index`.

    `text` (N + PADDING,) ends in SEPARATORs. `pieces` (P, 5) are in the order of the text.
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


def build_index(pieces: Iterable[Piece]) -> TextIndex:
    """Index a text that comes in pieces."""
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
    order = sort_suffixes(np.frombuffer(text, np.uint8))
    padded = np.frombuffer(text + SEPARATOR * PADDING, np.uint8)
    return TextIndex(padded, order, list(numbers), np.array(rows, np.int64).reshape(-1, 5))


def write_index(index: TextIndex, path: Path) -> None:
    """Write an index; the file appears when it is complete."""
    sizes = {"text": index.text.nbytes, "order": len(index.order), "pieces": len(index.pieces)}
    header = json.dumps({"magic": MAGIC, "names": index.names, **sizes}).encode()
    n_spaces = -(len(header) + 1) % 64
    header += b" " * n_spaces
    header += b"\n"
    arrays = [index.text, index.order.astype("<i4"), index.pieces.astype("<i8")]
    parts: list[bytes | memoryview] = [header, *(array.data for array in arrays)]
    digest = hashlib.sha256()
    with files.atomic_write(path) as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def read_index(path: Path) -> TextIndex:
    """Map an index into memory, once all its bytes are checked; DataError if it is damaged."""
    try:
        with files.open_regular(path) as file:
            begin = len(file.readline())
        stored = np.memmap(path, np.uint8, "r")
        end = len(stored) - SHA256_BYTES
        if hashlib.sha256(stored[:end].data).digest() != stored[end:].tobytes():
            raise ValueError("damaged")
        header: dict[str, Any] = json.loads(stored[:begin].tobytes())
        if header["magic"] != MAGIC:
            raise ValueError("another version")
        text = stored[begin : begin + header["text"]]
        begin += header["text"]
        order = stored[begin : begin + 4 * header["order"]].view("<i4")
        begin += 4 * header["order"]
        pieces = stored[begin:end].view("<i8").reshape(header["pieces"], 5)
    except (OSError, ValueError, LookupError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}; delete it and run again") from None
    return TextIndex(text, order, header["names"], pieces)
