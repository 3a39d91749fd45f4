"""The index of a run's training text, if that is the same; its order is kept in the cache."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from gptmini.config.settings import DataConfig
from gptmini.console import format_bytes, show_elapsed
from gptmini.data.corpus import TrainingText, open_text
from gptmini.errors import DataError
from gptmini.extras.sources.find import Copies, search
from gptmini.extras.sources.index import Piece, TextIndex, build_index
from gptmini.generate.run import Run
from gptmini.tokenizer.chunks import TextChunk, count_utf8_bytes

# Sorting takes 25 bytes of memory for each of the text, and half a second a million of them
# (scripts/LOG.md: How does one find copies of a training text?).
MAX_TEXT_BYTES = 300_000_000


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
        names = ", ".join(settings.path)
        if text.content != content:
            raise DataError(f"{names}: not the text that {run} was trained on; restore it")
        with show_elapsed("indexing the text"):
            pieces = _read_pieces(text.iter_chunks(), names)
            return build_index(pieces, cache / f"{content[:20]}-order.npz")


def _read_pieces(chunks: Iterable[TextChunk], names: str) -> Iterator[Piece]:
    """Yield the pieces of a text; the messages of a conversation count as documents."""
    size = 0
    for text, starts_document, conversation, place in chunks:
        size += count_utf8_bytes(text)
        if size > MAX_TEXT_BYTES:
            raise DataError(
                f"{names}: too much text for an index; sources are found in up to "
                f"{format_bytes(MAX_TEXT_BYTES)}"
            )
        if conversation is None:
            yield text.encode(), starts_document, place
            continue
        for message in conversation.messages:
            yield message["content"].encode(), True, place
