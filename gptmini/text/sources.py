"""The text people have, as documents: files, folders and globs, plain, packed or in tables.

A source is a list of files and how to read them. It is read block by block, so it may be larger
than memory, and twice over gives the same text, or an error that names the file which changed.
"""

import glob
import hashlib
import json
import os
import pydoc_data
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gptmini.config.settings import DataConfig
from gptmini.errors import DataError
from gptmini.text.formats import KINDS, File, opened, read, refuse
from gptmini.text.tokenizer import BLOCK, Piece

CODE = Path(os.__file__).parent  # the standard library's sources
BUILTIN = ("builtin:python-docs", "builtin:python-code")


@dataclass(frozen=True)
class Source:
    """Files in the order they are read; `part` keeps the documents of one side of a split.

    `share` of the documents, by their hash, is the validation part.
    """

    name: str
    files: tuple[File, ...]
    settings: DataConfig
    part: str = "all"  # or training, validation
    share: float = 0.0

    @property
    def bytes(self) -> int:
        """The size of the files as they lie on the disk."""
        return sum(file.bytes for file in self.files)

    def only(self, part: str, share: float) -> "Source":
        """The documents of one side of the split by the hashes of documents."""
        return replace(self, part=part, share=share)

    def digest(self) -> str:
        """SHA-256 (hex) of all that decides the text: the bytes of files and how they are read."""
        settings = self.settings
        options: list[object] = [settings.text_key, settings.separator]
        if self.part != "all":
            options += [self.part, self.share]
        hashed = hashlib.sha256(json.dumps(options).encode())
        for file in self.files:
            hashed.update(json.dumps([file.kind, file.packing, file.errors, file.bytes]).encode())
            with opened(file) as raw:
                while block := raw.read(BLOCK):
                    hashed.update(block)
        return hashed.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """The text, document by document, without empty ones.

        Raises DataError naming the file and the place of what is no text.
        """
        key, separator = self.settings.text_key, self.settings.separator or ""
        pieces = (piece for file in self.files for piece in read(file, key, separator))
        return pieces if self.part == "all" else self._chosen(pieces)

    def _chosen(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The documents on our side: the hash of a first piece decides, whatever is beside it."""
        ours = False
        for piece in pieces:
            if piece.starts_document:
                number = int.from_bytes(hashlib.sha256(piece.text.encode()).digest()[:8])
                ours = (number < self.share * 2**64) == (self.part == "validation")
            if ours:
                yield piece


@contextmanager
def stdin_as_file(paths: list[str], folder: Path) -> Iterator[list[str]]:
    """The paths, with `-` replaced by a file that holds standard input while the block runs."""
    if "-" not in paths:
        yield paths
        return
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
        file = Path(temporary) / "standard input"
        with file.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy, BLOCK)
        yield [str(file) if path == "-" else path for path in paths]


# -- finding files ---------------------------------------------------------------------------------


def find(paths: list[str], settings: DataConfig) -> Source:
    """The files that paths stand for; DataError for what is missing or no regular file."""
    found = [file for path in paths for file in _files(path, settings.errors)]
    return Source(", ".join(paths), tuple(found), settings)


def _files(path: str, errors: str) -> list[File]:
    if path == "builtin:python-docs":
        return [replace(_file(Path(pydoc_data.__path__[0]) / "topics.py", errors), kind="topics")]
    if path == "builtin:python-code":
        return [_file(source, "replace") for source in _standard_library()]
    if path.startswith("builtin:"):
        raise DataError(f"{path}: no such corpus; known: {', '.join(BUILTIN)}")
    place = Path(os.path.expanduser(path))  # Path.expanduser can raise
    if place.is_dir():
        found = list(_walk(place))
    elif not place.exists() and any(character in path for character in "*?["):
        matches = sorted(glob.glob(str(place), recursive=True))
        found = [match for name in matches if not (match := Path(name)).is_dir()]
    else:
        return [_file(place, errors)]
    if not found:
        raise DataError(
            f"{path}: no file there; name a folder or a pattern such as 'texts/**/*.md'"
        )
    return [_file(file, errors) for file in found]


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder, in order of names; hidden ones are left out."""
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


def _standard_library() -> Iterator[Path]:
    for path in sorted(CODE.rglob("*.py")):
        if not {"site-packages", "test", "tests"} & set(path.relative_to(CODE).parts):
            yield path


def _file(path: Path, errors: str) -> File:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        refuse(error, path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file; pipe it in with --data -")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    kind = KINDS.get(suffixes[-1] if suffixes else "", "text")
    return File(path, kind, packing, status.st_size, status.st_mtime_ns, errors)
