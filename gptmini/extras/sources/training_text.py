"""The index of a run's training text: taken from the cache, or made if the text is the same.

Its name there is a digest of the text and of the names of its files.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from gptmini.config.settings import DataConfig
from gptmini.console import format_bytes, say, show_elapsed
from gptmini.data.corpus import TrainingText, open_text
from gptmini.errors import DataError
from gptmini.extras.sources.find import Copies, search
from gptmini.extras.sources.index import Piece, TextIndex, build_index, read_index, write_index
from gptmini.generate.run import Run
from gptmini.tokenizer.chunks import TextChunk

# Sorting takes 25 bytes of memory for each of the text, and half a second a million of them
# (scripts/LOG.md: How does one find copies of a training text?).
MAX_TEXT_BYTES = 300_000_000
SLOW_TEXT_BYTES = 20_000_000


# Threads that share a run share its index.
_indexes: WeakKeyDictionary[Run, TextIndex] = WeakKeyDictionary()
_indexing = Lock()


def find_copies(run: Run, text: str, prompt: str = "") -> Copies:
    """Find what of a text stands in the training text of a run; `Run.find_copies` describes it."""
    return search(open_index(run), text, prompt)


def open_index(run: Run) -> TextIndex:
    """Return the index of a run's training text, which the first call opens or makes."""
    with _indexing:
        if run not in _indexes:
            _indexes[run] = load_index(run.path, run.config.data, run.corpus, run.cache)
        return _indexes[run]


def load_index(run: Path, settings: DataConfig, content: str, cache: Path) -> TextIndex:
    """Load the index of a run's training text; make it if it is not in the cache.

    `settings` are those of the section `data`, and `content` is the SHA-256 of the text that the
    run was trained on. DataError for a text that is not there any more or has changed, for a run
    without one, and for a text that is too large.
    """
    if not content:
        raise DataError(
            f"{run}: has no record of a text, as it was not trained here; sources are found for "
            f"runs of gptmini train"
        )
    if "-" in settings.path:
        raise DataError(
            f"{run}: was trained on standard input, which is gone; train on a file to find sources"
        )
    with open_text(settings, cache) as text:
        if not isinstance(text, TrainingText):
            raise DataError(
                f"{run}: was trained on token numbers, which say no words; sources are found in "
                f"texts"
            )
        file_names = [str(file.path) for whole in text.divided for file in whole.text.files]
        # The same text may lie in files of other names.
        digest = hashlib.sha256(json.dumps([content, file_names]).encode()).hexdigest()
        path = cache / f"{digest[:20]}.copies"
        names = ", ".join(settings.path)
        if text.content != content:
            raise DataError(f"{names}: not the text that {run} was trained on; restore it")
        with suppress(DataError):  # not there yet, or damaged
            return read_index(path)
        size = sum(part.text_bytes for part in text.training)
        if size > MAX_TEXT_BYTES:
            raise DataError(
                f"{names}: {format_bytes(size)} of text, too much for an index; sources are found "
                f"in up to {format_bytes(MAX_TEXT_BYTES)}"
            )
        if size > SLOW_TEXT_BYTES:
            say(f"sorting {format_bytes(size)} of text to find sources in it; this is done once")
        with show_elapsed("indexing the text"):
            write_index(build_index(_read_pieces(text.iter_chunks())), path)
    return read_index(path)


def _read_pieces(chunks: Iterable[TextChunk]) -> Iterator[Piece]:
    """Yield the pieces of a text; the messages of a conversation count as documents."""
    for text, starts_document, conversation, place in chunks:
        if conversation is None:
            yield text.encode(), starts_document, place
            continue
        for message in conversation.messages:
            yield message["content"].encode(), True, place
