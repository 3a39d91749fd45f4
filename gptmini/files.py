"""Files that are whole or absent: written aside, synced, renamed, the directory synced.

Everything that a run must not lose is written through these functions.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CACHE = Path(os.path.expanduser("~/.cache/gptmini"))  # Path.home() can raise


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears as `path` when the block ends, and not at all if it raises."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        rename(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Write a file, or give it a new content in one step."""
    with atomic_write(path) as file:
        file.write(data)


def write(path: Path, data: bytes) -> None:
    """Write and sync a new file inside a directory that is not yet under its final name."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        sync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Give a synced file or directory its final name, lastingly."""
    os.replace(source, target)
    sync_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory under another name first, so that no half of it looks whole."""
    for left in path.parent.glob(".trash-*"):  # by a process that was killed
        shutil.rmtree(left)
    if path.exists():
        trash = path.with_name(f".trash-{path.name}")
        os.replace(path, trash)
        shutil.rmtree(trash)


def sync_directory(path: Path) -> None:
    """Make the names in a directory last through a power cut."""
    if sys.platform == "win32":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Make what was written to an open file last."""
    if sys.platform == "darwin":  # there fsync leaves data in the drive's own cache
        import fcntl  # noqa: PLC0415 - not on Windows

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)
