"""From paths to documents: files, folders, globs, standard input, the Hub and built-in corpora.

A Text is a list of files, how to read them, and its splits: training, validation and test. It is
read block by block, so it may be larger than memory. Reading it again gives the same text, or an
error that names the file that changed.
"""

import glob
import hashlib
import json
import os
import pydoc_data
import re
import secrets
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from gptmini.config.settings import DataConfig
from gptmini.console import quote, say, show_byte_progress
from gptmini.data import hub, hub_dataset, stories
from gptmini.data.formats import (
    CHAT_KINDS,
    PYTHON_DOCS,
    STORIES,
    File,
    find_format,
    open_unchanged,
    raise_unreadable,
    read_documents,
    warn_once,
)
from gptmini.errors import DataError, describe_os_error
from gptmini.files import get_cache_folder, is_run, read_checked, write_checked
from gptmini.tokenizer.chunks import TEXT_BLOCK_SIZE, TextChunk, count_utf8_bytes, find_boundary

STDLIB_DIR = Path(os.__file__).parent  # the standard library's sources
say_once = cache(say)  # `gptmini compare` prepares the same files for every variant
# Text that has more in it than its words.
MARKUP = re.compile(r"\.(html?|xhtml|ipynb|mbox|toml|ya?ml|tsv|json)(\.gz|\.zst)?$")
MAX_SKIPPED_LISTED = 10  # files
BUILTIN_CORPORA = (STORIES, PYTHON_DOCS, "builtin:python-code")
Split = Literal["training", "validation", "test"]


@dataclass(frozen=True)
class Text:
    """Files in reading order, how to read them, and which share of them is held out.

    `validation` and `test` are fractions of the text, or of its documents.
    """

    name: str
    files: tuple[File, ...]
    settings: DataConfig
    validation: float = 0.0
    test: float = 0.0

    @property
    def bytes(self) -> int:
        """Size on disk, compressed where the files are; of stories, that of their text."""
        sizes = (stories.BYTES if file.kind == "stories" else file.bytes for file in self.files)
        return sum(sizes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that determines the text: bytes, formats and options."""
        options = [self.settings.text_key, _normalize_newlines(self.settings.separator)]
        hashed = hashlib.sha256(json.dumps(options).encode())
        with show_byte_progress("hashing the text", self.bytes) as advance:
            for file in self.files:
                has_returns = False
                described = [file.kind, file.compression, file.errors, file.bytes]
                hashed.update(json.dumps(described).encode())
                with open_unchanged(file) as raw:
                    while block := raw.read(TEXT_BLOCK_SIZE):
                        hashed.update(block)
                        advance(len(block))
                        has_returns = has_returns or b"\r" in block
                if file.kind == "text" and (has_returns or file.compression):
                    # The same bytes gave other tokens when CR was kept.
                    hashed.update(b"line feeds")
        return hashed.hexdigest()

    def hash_split(self, split: Split) -> str:
        """Return the SHA-256 (hex) of everything that determines a split."""
        rule = [self.settings.split, split, self.validation, self.test]
        return hashlib.sha256(json.dumps([self.digest, *rule]).encode()).hexdigest()

    @cached_property
    def spans(self) -> dict[Split, tuple[int, int]]:
        """Where each split begins and ends in the bytes of the text, in their order.

        Of documents these are only their shares. DataError if the text is all white space.
        """
        size = self._size_and_kind[0]
        n_test = max(1, round(size * self.test)) if self.test else 0
        n_validation = max(1, round(size * self.validation)) if self.validation else 0
        validation_start = size - n_validation
        test_start = validation_start - n_test
        return {
            "training": (0, test_start),
            "test": (test_start, validation_start),
            "validation": (validation_start, size),
        }

    @property
    def has_conversations(self) -> bool:
        """Whether some of its documents are conversations, which only records can be."""
        return any(file.kind in CHAT_KINDS for file in self.files) and self._size_and_kind[1]

    @cached_property
    def _size_and_kind(self) -> tuple[int, bool]:
        """Size in UTF-8, and whether it has conversations: known to the cache, or read."""
        kept = get_cache_folder() / f"{self.digest[:20]}.size"
        with suppress(OSError, ValueError):  # not there yet, or damaged
            size, has_conversations = json.loads(read_checked(kept))
            return size, has_conversations
        size = 0
        has_conversations = False
        with show_byte_progress("reading the text", self.bytes) as advance:
            for chunk in self.iter_chunks():
                length = count_utf8_bytes(chunk.text)
                size += length
                has_conversations = has_conversations or chunk.messages is not None
                advance(length)
        with suppress(OSError):  # it can be read again
            write_checked(kept, json.dumps([size, has_conversations]).encode())
        return size, has_conversations

    def iter_chunks(self) -> Iterator[TextChunk]:
        """Yield the text, document by document, without empty ones.

        Anything that is not valid text raises a DataError with the file and the position, and so
        does the end of a text that is all white space.
        """
        separator = _normalize_newlines(self.settings.separator) or ""
        is_blank = True
        for file in self.files:
            for chunk in read_documents(file, self.settings.text_key, separator):
                is_blank = is_blank and not chunk.text.strip()
                yield chunk
        if is_blank:
            raise DataError(f"{self.name}: contains no text; choose a file that has some")

    def iter_splits(self, splits: Collection[Split]) -> Iterator[tuple[Split, TextChunk]]:
        """Yield the text of some splits, as iter_chunks does all of it, in one pass.

        Of documents, DataError at its end if one of them has only white space.
        """
        if not self.validation and not self.test:
            return (("training", chunk) for chunk in self.iter_chunks())
        if self.settings.split == "tail":
            return self._iter_spans(splits)
        return self._iter_documents(splits)

    def iter_training(self) -> Iterator[TextChunk]:
        """Yield what is trained on."""
        return (chunk for _, chunk in self.iter_splits(["training"]))

    def _iter_spans(self, splits: Collection[Split]) -> Iterator[tuple[Split, TextChunk]]:
        """Yield the spans of the text: training first, then test, then validation.

        The text is cut between words where that is possible, a conversation before it begins.
        """
        spans = {split: span for split, span in self.spans.items() if split in splits}
        last_end = max(end for _, end in spans.values())
        reach = min(4096, self.spans["validation"][1] // 100)  # a short text is cut near that place
        at = 0  # bytes before this chunk
        for chunk in self.iter_chunks():
            if at >= last_end:
                return
            text = chunk.text
            length = count_utf8_bytes(text)
            for split, (begin, end) in spans.items():
                if chunk.messages is not None:
                    if begin < at + length <= end:  # by its end, so that the last split has some
                        yield split, chunk
                    continue
                first = _find_cut(text, length, begin - at, reach)
                last = _find_cut(text, length, end - at, reach)
                if first < last:
                    starts_document = chunk.starts_document and first == 0
                    place = chunk.place.after(text[:first])
                    yield split, TextChunk(text[first:last], starts_document, place=place)
            at += length

    def _iter_documents(self, splits: Collection[Split]) -> Iterator[tuple[Split, TextChunk]]:
        """Yield the documents of some splits, in the order of the text."""
        split: Split = "training"
        blank = set(splits)
        for chunk in self.iter_chunks():
            if chunk.starts_document:
                split = self._assign_document(chunk.text)
            if split in splits:
                if chunk.text.strip():
                    blank.discard(split)
                yield split, chunk
        for split in splits:
            if split in blank:
                raise DataError(
                    f"{self.name}: its split leaves no document for {split}; use a text with "
                    f"more documents, or hold out the tail with --set data.split=tail"
                )

    def _assign_document(self, first_text: str) -> Split:
        """Assign a document to a split, by the hash of its first chunk alone."""
        number = int.from_bytes(hashlib.sha256(first_text.encode()).digest()[:8])
        if number < self.validation * 2**64:
            return "validation"
        if number < (self.validation + self.test) * 2**64:
            return "test"
        return "training"


def _find_cut(text: str, length: int, offset: int, reach: int) -> int:
    """Find the character at which to cut a text of `length` bytes about `offset` bytes in."""
    if offset <= 0:
        return 0
    if offset >= length:
        return len(text)
    characters = len(text.encode()[:offset].decode("utf-8", "ignore"))
    return find_boundary(text, characters, reach)


@contextmanager
def spool_stdin(paths: list[str], folder: Path) -> Iterator[list[str]]:
    """Yield the paths, with `-` replaced by a file that holds standard input in the meantime."""
    if "-" not in paths:
        yield paths
        return
    # Named before it exists, so that a signal at any moment finds it; only its owner may read it.
    file = str(folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(file, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy, TEXT_BLOCK_SIZE)
        yield [file if path == "-" else path for path in paths]
    except DataError as error:
        lines = (line.replace(file, "standard input") for line in error.lines)
        raise DataError(*lines) from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(file)


def _normalize_newlines(separator: str | None) -> str | None:
    """Write a separator as it is in a text, where CR LF and CR have become LF."""
    if separator is None:
        return None
    return separator.replace("\r\n", "\n").replace("\r", "\n")


# -- finding files ---------------------------------------------------------------------------------


def find_text(paths: list[str], settings: DataConfig) -> Text:
    """Find the files that paths name; DataError if one is missing, or begins with no text."""
    files = [file for path in paths for file in _find_files(path, settings)]
    problems = [_find_problem(file, settings.text_key) for file in files]
    if any(problems):
        raise DataError(*filter(None, problems))
    if found := [str(file.path) for file in files if MARKUP.search(file.path.name.lower())]:
        names = hub.list_some(found)
        warn_once(f"{names}: trained on with its markup; to avoid that, extract the text")
    counts = Counter(os.path.abspath(file.path) for file in files)
    if repeated := [name for name, count in counts.items() if count > 1]:
        warn_once(f"{hub.list_some(repeated)}: read twice; name a file or its folder, not both")
    return Text(", ".join(paths), tuple(files), settings)


def _find_builtin_files(name: str, errors: str) -> list[File]:
    """Find the files of a corpus that is there without a download."""
    if name == STORIES:
        grammar = _describe_file(Path(stories.__file__), errors)
        return [replace(grammar, kind="stories")]
    if name == PYTHON_DOCS:
        topics = _describe_file(Path(pydoc_data.__path__[0]) / "topics.py", errors)
        return [replace(topics, kind="topics")]
    if name == "builtin:python-code":
        skipped = {"site-packages", "test", "tests"}
        return [
            _describe_file(file, "replace")
            for file in sorted(STDLIB_DIR.rglob("*.py"))
            if skipped.isdisjoint(file.relative_to(STDLIB_DIR).parts)
        ]
    raise DataError(f"{name}: no such corpus; choose {', '.join(BUILTIN_CORPORA)}")


def _find_files(path: str, settings: DataConfig) -> list[File]:
    """Find the files of one path, in reading order; of a folder or pattern those that are text."""
    errors = settings.errors
    if path.startswith("builtin:"):
        return _find_builtin_files(path, errors)
    if hub_dataset.is_dataset_name(path):
        cached = [_describe_file(file, errors) for file in hub_dataset.fetch_dataset(path)]
        names = hub.list_some(file.path.name for file in cached)
        say_once(f"{path}: {names}, {sum(file.bytes for file in cached):,} bytes")
        return cached
    place = Path(os.path.expanduser(path))  # neither it nor os.path raises, as Path does
    problems: dict[Path, str] = {}
    if is_run(place):
        raise DataError(f"{path}: a run, not a text; to resume it: gptmini train {quote(path)}")
    if os.path.isdir(place):
        found = [Path(root) / name for root, names in _walk(place, problems) for name in names]
    elif not os.path.exists(place) and any(character in path for character in "*?["):
        found = sorted(_match_pattern(place, problems), key=str)
        found = [match for match in found if not os.path.isdir(match)]
    else:
        return [_describe_file(place, errors)]
    files = []
    for each in found:
        if os.path.islink(each) and not os.path.exists(each):
            continue
        try:
            file = _describe_file(each, errors)
        except DataError as error:
            problems[each] = error.lines[0]
            continue
        if problem := _find_problem(file, settings.text_key):
            problems[each] = problem
        else:
            files.append(file)
    _report_files(path, len(files), problems)
    return files


def _report_files(path: str, n_files: int, problems: dict[Path, str]) -> None:
    """Warn of files that are not read, with their problems the first time.

    DataError if there are no files to read.
    """
    # Of records if there are any, as among a thousand pictures nobody would see them.
    by_kind = sorted(problems, key=lambda file: find_format(file.name)[0] == "text")
    if not n_files and problems:
        raise DataError(f"{path}: no text in it, but {problems[by_kind[0]]}")
    if not n_files:
        raise DataError(
            f"{path}: no files found; give a folder that has some, or a pattern such as "
            f"'texts/**/*.md'"
        )
    read = f"{path}: {n_files} of {n_files + len(problems)} files read"
    if not problems:
        return
    skipped = f"{read}; skipped {hub.list_some(file.name for file in by_kind)}"
    details = problems.values() if len(problems) <= MAX_SKIPPED_LISTED else [problems[by_kind[0]]]
    if not warn_once(skipped, *details):
        say_once(f"warning: {skipped}")


@cache
def _find_problem(file: File, text_key: str) -> str | None:
    """Find why a file cannot be read as text, by its beginning."""
    try:
        next(read_documents(file, text_key, ""), None)
    except DataError as error:
        return error.lines[0]
    return None


def _walk(folder: Path, problems: dict[Path, str]) -> Iterator[tuple[str, list[str]]]:
    """Walk a folder and those below it: each with its files, sorted, without hidden ones.

    Runs are no text, as they change while they are trained. Symbolic links to folders are not
    followed, as they may form loops. `problems` gets the folders that cannot be read.
    """

    def note(error: OSError) -> None:
        problems[Path(error.filename)] = (
            f"{error.filename}: {describe_os_error(error)}; check its permissions"
        )

    for root, folders, names in os.walk(folder, onerror=note):
        if is_run(root):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield root, sorted(name for name in names if not name.startswith("."))


def _match_pattern(pattern: Path, problems: dict[Path, str]) -> set[Path]:
    """Find the paths that a pattern matches; `**` walks folders as above.

    glob.glob would follow links there.
    """
    if "**" not in pattern.parts:
        return {Path(match) for match in glob.glob(str(pattern))}
    at = pattern.parts.index("**")
    before = Path(*pattern.parts[:at])
    after = Path(*pattern.parts[at + 1 :] or "*")
    matches: set[Path] = set()
    for start in glob.glob(str(before)):
        for root, _ in _walk(Path(start), problems):
            matches |= _match_pattern(Path(glob.escape(root)) / after, problems)
    return matches


def _describe_file(path: Path, errors: str) -> File:
    """Describe a file as it is now; DataError if it is missing or not a regular file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        from gptmini.data.fetch import KNOWN_CORPORA  # noqa: PLC0415 - loads urllib

        if path in [Path("data", f"{name}.txt") for name in KNOWN_CORPORA]:
            raise DataError(
                f"{path}: {describe_os_error(error)}; get it with gptmini data fetch {path.stem}"
            ) from None
        raise_unreadable(error, path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; pipe it in with --data -")
    kind, compression, _ = find_format(path.name)
    return File(path, kind, compression, status.st_size, status.st_mtime_ns, errors)
