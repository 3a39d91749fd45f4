"""Read and write files safely.

Reading never hangs: what we expect in a run or a cache is opened only if it is a regular file.

Writing is atomic and durable: a file or folder has its final name only when it is complete, even
after a crash or a power cut. It is written under a temporary name and synced; then it is renamed,
and the directory that holds it is synced.
"""

import errno
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gptmini.errors import ConfigError, DataError, describe_invalid_utf8

IS_WINDOWS = sys.platform == "win32"
RENAME_DELAYS_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

DEFAULT_CACHE_DIR = Path(os.path.expanduser("~/.cache/gptmini"))  # Path.home() can raise


# -- reading ---------------------------------------------------------------------------------------


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading; OSError for a device, or a FIFO, which would block a plain open."""
    file = open(path, "rb", buffering, opener=_open_without_blocking)  # noqa: SIM115 - returned open
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _open_without_blocking(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has neither it nor FIFOs


def read_regular(path: Path) -> bytes:
    """Read a regular file; OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; OSError or ValueError if there is none."""
    try:
        data = json.loads(read_regular(path))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def decode_utf8(data: bytes, name: object) -> str:
    """Decode UTF-8; DataError, which calls the data `name`, if it is not."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(describe_invalid_utf8(name, f"at byte {error.start}")) from None


# -- files and folders that appear when they are complete ------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears as `path` when the block ends, or not at all if the block raises."""
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


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Create a file or replace its content, atomically."""
    with atomic_write(path) as file:
        file.write(data)


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which becomes `out` when the block ends.

    Nothing of it stays if the block raises. ConfigError if `out` exists.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out}: already exists; choose another name")
    partial = out.with_name(f".partial-{out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_output(partial)  # left by a process that was killed
    try:
        yield partial
        rename(partial, out)
    finally:
        _remove_output(partial)


def _remove_output(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Rename a directory, then delete it, so that half of it never looks complete.

    On Windows it stays, for the next call to remove, while another process reads a file in it.
    """
    for leftover in path.parent.glob(".trash-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=IS_WINDOWS)
    if path.exists():
        trash = path.with_name(f".trash-{path.name}")
        try:
            _replace(path, trash)
        except PermissionError:
            if not IS_WINDOWS:
                raise
        shutil.rmtree(trash, ignore_errors=IS_WINDOWS)


# -- the steps of a durable write ------------------------------------------------------------------


def write_and_sync(path: Path, data: bytes) -> None:
    """Create and sync a file in a directory that does not have its final name yet."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        sync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Give a synced file or directory its final name, durably."""
    _replace(source, target)
    sync_directory(target.parent)


def _replace(source: Path, target: Path) -> None:
    """Rename, replacing `target`; on Windows, wait for whoever has one of the two open.

    A virus scanner opens new files, `generate` and `plot` those of a run.
    """
    for delay in RENAME_DELAYS_SECONDS if IS_WINDOWS else ():
        try:
            os.replace(source, target)
            return
        except PermissionError:
            time.sleep(delay)
    os.replace(source, target)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    if IS_WINDOWS:  # cannot open directories
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Make what was written to an open file survive a power cut."""
    if sys.platform == "darwin":  # fsync there leaves data in the drive's own cache
        import fcntl  # noqa: PLC0415 - not on Windows

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # network drives, exFAT and FUSE refuse it
            pass
    os.fsync(descriptor)
