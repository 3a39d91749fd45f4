"""An index of a training text: its bytes, the order of its suffixes, and which file each is from.

It is made when it is first asked for and kept in the cache, named after the digest of the text and
the names of its files:

    header      JSON with sizes and the names of the files; filled up to a multiple of 64 bytes
    text        UTF-8, a SEPARATOR behind each document, and PADDING more of them at the end
    order       where the suffixes begin, in their order; 32 bits each
    pieces      for each piece of the text: begin, file, line, whether it is a record, document
    hash        the SHA-256 of all that
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptmini import files
from gptmini.config.settings import Config
from gptmini.console import format_bytes, say, show_elapsed
from gptmini.copies.suffixes import Bytes, Positions, sort_suffixes
from gptmini.data.corpus import (
    find_number_files,
    find_token_files,
    find_training_text,
    open_cache,
    prepare_corpus,
)
from gptmini.data.token_file import TokenFile
from gptmini.errors import DataError, describe_os_error
from gptmini.tokenizer.chunks import Place, TextChunk
from gptmini.tokenizer.tokenizers import Tokenizer

MAGIC = "gptmini copies 1"
SEPARATOR = b"\xff"  # stands in no UTF-8, so that no match goes on behind a document
PADDING = 64  # bytes that a search may read beyond the end
SHA256_BYTES = 32
# Sorting takes 25 bytes of memory for each of the text, and half a second a million of them.
MAX_TEXT_BYTES = 300_000_000
SLOW_TEXT_BYTES = 20_000_000
TOKENS_AT_ONCE = 1 << 18
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

    def locate(self, position: int) -> tuple[str, int | None, int]:
        """Return the file, the line and the document of a position, each from 1 on.

        The line of a record is the line, or row, that the record begins in. Token files have none.
        """
        number = int(np.searchsorted(self.pieces[:, 0], position, "right")) - 1
        begin, name, line, is_record, document = self.pieces[number].tolist()
        if line and not is_record:
            line += int((self.text[begin:position] == ord("\n")).sum())
        return self.names[name], line or None, document


def open_index(
    run: Path, config: Config, tokenizer: Tokenizer, content: str, cache: Path
) -> TextIndex:
    """Open the index of a run's training text; make it if it is not in the cache.

    `content` is the SHA-256 of the text that the run was trained on. DataError for a text that is
    not there any more or has changed, for a run without one, and for a text that is too large.
    """
    if not content:
        raise DataError(
            f"{run}: has no record of a text, as it was not trained here; sources are found for "
            f"runs of gptmini train"
        )
    if "-" in config.data.path:
        raise DataError(
            f"{run}: was trained on standard input, which is gone; train on a file to find sources"
        )
    with open_cache(config.data, cache) as paths:
        if find_token_files(paths) is None and find_number_files(paths) is None:
            text = find_training_text(config.data, paths)
            found = text.content
            size = sum(side.text_bytes for side in text.training)
            pieces = _read_pieces(text.iter_chunks())
            named = [str(file.path) for split in text.splits for file in split.source.files]
        else:
            corpus = prepare_corpus(config, cache, tokenizer=tokenizer)
            found = corpus.content
            size = sum(file.text_bytes for file in corpus.training)
            labels = config.data.path if config.data.weights else [", ".join(paths)]
            pieces = _decode_pieces(corpus.training, labels, tokenizer)
            named = [*labels, tokenizer.fingerprint]
        # The same text may lie in files of other names.
        digest = hashlib.sha256(json.dumps([content, named]).encode()).hexdigest()
        path = cache / f"{digest[:20]}.copies"
        names = ", ".join(config.data.path)
        if found != content:
            raise DataError(f"{names}: not the text that {run} was trained on; restore it")
        try:
            return read_index(path)
        except FileNotFoundError:
            pass
        except DataError:  # damaged; it is made again
            pass
        if size > MAX_TEXT_BYTES:
            raise DataError(
                f"{names}: {format_bytes(size)} of text, too much for an index; sources are found "
                f"in up to {format_bytes(MAX_TEXT_BYTES)}"
            )
        if size > SLOW_TEXT_BYTES:
            say(f"sorting {format_bytes(size)} of text to find sources in it; this is done once")
        with show_elapsed("indexing the text"):
            write_index(build_index(pieces), path)
    return read_index(path)


def _read_pieces(chunks: Iterable[TextChunk]) -> Iterator[Piece]:
    """Yield the pieces of a text; the messages of a conversation count as documents."""
    for text, starts_document, conversation, place in chunks:
        if conversation is None:
            yield text.encode(), starts_document, place
            continue
        for message in conversation.messages:
            yield message["content"].encode(), True, place


def _decode_pieces(
    token_files: list[TokenFile], labels: list[str], tokenizer: Tokenizer
) -> Iterator[Piece]:
    """Yield the documents of token files, which know no lines."""
    spellings = [tokenizer.decode_token(token) for token in range(tokenizer.vocab_size)]
    for token in tokenizer.special_tokens.values():
        spellings[token] = b""
    for file, label in zip(token_files, labels, strict=True):
        starts_document = True
        for start in range(0, len(file), TOKENS_AT_ONCE):
            tokens = file.read(start, min(TOKENS_AT_ONCE, len(file) - start))
            (ends,) = (tokens == tokenizer.eos_token_id).nonzero()
            for number, part in enumerate(np.split(tokens, ends)):
                starts_document = starts_document or number > 0
                if text := b"".join(map(spellings.__getitem__, part.tolist())):
                    yield text, starts_document, Place(label, 0)
                    starts_document = False


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
    header += b" " * (-(len(header) + 1) % 64) + b"\n"
    arrays = [index.text, index.order.astype("<i4"), index.pieces.astype("<i8")]
    parts: list[bytes | memoryview] = [header, *(array.data for array in arrays)]
    digest = hashlib.sha256()
    with files.atomic_write(path) as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def read_index(path: Path) -> TextIndex:
    """Map an index into memory, once all its bytes are checked.

    FileNotFoundError if there is none, DataError for one that is damaged.
    """
    try:
        files.open_regular(path).close()
        stored = np.memmap(path, np.uint8, "r")
        end = len(stored) - SHA256_BYTES
        if hashlib.sha256(stored[:end].data).digest() != stored[end:].tobytes():
            raise ValueError("damaged")
        begin = _find_line_end(stored)
        header: dict[str, Any] = json.loads(stored[:begin].tobytes())
        if header["magic"] != MAGIC:
            raise ValueError("another version")
        text = stored[begin : begin + header["text"]]
        begin += header["text"]
        order = stored[begin : begin + 4 * header["order"]].view("<i4")
        begin += 4 * header["order"]
        pieces = stored[begin:end].view("<i8").reshape(header["pieces"], 5)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, LookupError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}; delete it and run again") from None
    return TextIndex(text, order, header["names"], pieces)


def _find_line_end(stored: Bytes) -> int:
    """Return where the line ends that begins a file."""
    at = 0
    while stored[at] != ord("\n"):
        at += 1
    return at + 1
