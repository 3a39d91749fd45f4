"""The training text of a run, if that is the same."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from gptmini.config.settings import DataConfig
from gptmini.console import format_bytes, show_elapsed
from gptmini.data.corpus import open_text
from gptmini.errors import DataError
from gptmini.extras.sources.find import Copies, Piece, SourceText
from gptmini.generate.run import Run
from gptmini.runs.progress import describe_changed_text
from gptmini.tokenizer.chunks import TextChunk, count_utf8_bytes

MAX_TEXT_BYTES = 300_000_000  # all of it is in memory

# Threads that share a run share its text.
_texts: WeakKeyDictionary[Run, SourceText] = WeakKeyDictionary()
_reading = Lock()


def find_copies(run: Run, text: str, prompt: str = "") -> Copies:
    """Find what of a text stands in the training text of a run; `Run.find_copies` describes it."""
    with _reading:
        if run not in _texts:
            _texts[run] = read_training_text(run.path, run.config.data, run.corpus)
        source = _texts[run]
    return Copies(source, text, prompt)


def read_training_text(run: Path, settings: DataConfig, content: str) -> SourceText:
    """Read the training text of a run.

    `settings` are those of the section `data`, and `content` is the SHA-256 of the text that the
    run was trained on. DataError for a text that is not there any more or has changed, for a run
    without one, and for a text that is too large.
    """
    if not content:
        raise DataError(f"{run}: no training text on record; name a run of gptmini train")
    if "-" in settings.path:
        raise DataError(f"{run}: trained on standard input, which is gone; train on a file")
    with open_text(settings) as text:
        if text.content != content:
            raise DataError(describe_changed_text(settings.path, run, "restore the old one"))
        with show_elapsed("reading the text"):
            return SourceText(_read_pieces(text.iter_chunks(), ", ".join(settings.path)))


def _read_pieces(chunks: Iterable[TextChunk], names: str) -> Iterator[Piece]:
    """Yield the pieces of a text; the messages of a conversation count as documents."""
    size = 0
    for text, starts_document, messages, place in chunks:
        size += count_utf8_bytes(text)
        if size > MAX_TEXT_BYTES:
            raise DataError(
                f"{names}: too long to search; use a text of up to {format_bytes(MAX_TEXT_BYTES)}"
            )
        if messages is None:
            yield text, starts_document, place
            continue
        for message in messages:
            yield message["content"], True, place
