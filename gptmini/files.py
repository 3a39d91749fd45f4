"""Read and write files safely.

Reading never hangs: what we expect in a run or a cache is opened only if it is a regular file.

Writing is atomic and durable: a file or folder has its final name only when it is complete, even
after a crash or a power cut. It is written under a temporary name and synced; then it is renamed,
and the directory that holds it is synced.
"""

import difflib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gptmini.errors import (
    ConfigError,
    DataError,
    GptminiError,
    MachineError,
    describe_invalid_utf8,
    describe_os_error,
)

IS_WINDOWS = sys.platform == "win32"
RENAME_DELAYS_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def get_cache_folder() -> Path:
    """Get the folder for prepared texts and compiled code: $GPTMINI_CACHE, or ~/.cache/gptmini."""
    if chosen := os.environ.get("GPTMINI_CACHE"):
        return Path(os.path.expanduser(chosen))
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # never raises
    return Path(caches, "gptmini")


# -- what is there ---------------------------------------------------------------------------------


def is_run(folder: str | Path) -> bool:
    """Return whether a folder is a run: it has a configuration and what training made of it."""
    path = Path(folder)
    made = os.path.exists(path / "request.yaml") or os.path.exists(path / "checkpoints")
    return made and os.path.exists(path / "config.yaml")


def check_run_folder(out: Path) -> None:
    """Raise ConfigError if a run cannot be in `out` as something else is there.

    Nothing may be there, an empty folder, a run, or what a run that was hardly begun has left.
    """
    if not out.exists() or is_run(out):
        return
    if not out.is_dir():
        raise ConfigError(f"--out {out}: a file, not a directory; choose another --out")
    names = {name for name in os.listdir(out) if not name.startswith(".tmp-")}
    is_begun = "lock" in names and names <= {
        "lock",
        "checkpoints",
        "tokenizer.json",
        "request.yaml",
    }
    if names and not is_begun:
        raise ConfigError(f"--out {out}: not empty, and no run; choose another --out")


def suggest_file(missing: str | Path | None) -> str:
    """Suggest the file with the nearest name for one that is missing; "" if there is none."""
    path = Path(missing or "")
    names = {}
    with suppress(OSError, ValueError):
        if missing and not path.exists():
            names = {name.lower(): name for name in os.listdir(path.parent)}
    near = difflib.get_close_matches(path.name.lower(), names, 1)
    return f"did you mean {path.with_name(names[near[0]])}?" if near else ""


def check_replaceable(out: Path, mark: bytes) -> None:
    """Raise ConfigError for a link, and for a file without `mark`, which all have that we write."""
    if out.is_symlink() or (out.exists() and mark not in read_regular(out)):
        raise ConfigError(f"--out {out}: a file that gptmini did not write; choose another name")


# -- reading ---------------------------------------------------------------------------------------


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading; OSError for a device, or a FIFO, which would block a plain open."""
    flag = getattr(os, "O_NONBLOCK", 0)  # Windows has neither it nor FIFOs
    file = open(  # noqa: SIM115 - returned open
        path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | flag)
    )
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


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
        temporary.unlink(missing_ok=True)  # or a link there would be followed
        with temporary.open("xb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        rename(temporary, path)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(temporary):
            error.filename = str(path)  # a full disk names no file
        raise
    finally:
        with suppress(OSError):  # renamed, or never made
            temporary.unlink()


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Create a file or replace its content, atomically."""
    with atomic_write(path) as file:
        file.write(data)


def write_checked(path: Path, data: bytes) -> None:
    """Write data behind its SHA-256, atomically."""
    atomic_write_bytes(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def read_checked(path: Path) -> bytes:
    """Read what `write_checked` wrote; OSError if it is missing, ValueError if it is damaged."""
    checksum, _, data = read_regular(path).partition(b"\n")
    if checksum != hashlib.sha256(data).hexdigest().encode():
        raise ValueError("damaged")
    return data


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which becomes `out` when the block ends.

    Nothing of it stays if the block raises. Raises ConfigError if `out` exists or its name is not
    UTF-8, which not every program can open; MachineError if it cannot be written, or if another
    process is writing it.
    """
    if not out.name:  # `.` and `/`, beside which no folder can be made
        raise ConfigError(f"--out {out}: already exists; choose another name")
    if re.search("[\ud800-\udfff]", str(out)):  # as Python keeps bytes that are not UTF-8
        raise ConfigError(f"--out {str(out)!a}: not UTF-8; choose another name")
    folder = out.with_name(f".partial-{out.name}")
    partial = folder / out.name
    with _report_failed_output(out, partial):
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock_file(folder / f".{out.name}") as locked:
            if not locked:
                raise MachineError(
                    f"--out {out}: another process is writing it; choose another name"
                )
            try:
                if out.exists() or out.is_symlink():
                    raise ConfigError(f"--out {out}: already exists; choose another name")
                # A process that was killed may have left something.
                shutil.rmtree(partial, ignore_errors=True)
                partial.unlink(missing_ok=True)
                yield partial
                rename(partial, out)
            finally:
                # It may be gone: a writer that had just ended removed it before we got its lock.
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _report_failed_output(out: Path, partial: Path) -> Iterator[None]:
    """Name `out` instead of `partial` in errors, and the free space if writing failed."""
    try:
        yield
    except GptminiError as error:
        error.lines = tuple(line.replace(str(partial), str(out)) for line in error.lines)
        raise
    except OSError as error:
        place = str(error.filename or partial)  # a full disk names no file
        if not place.startswith(str(partial.parent)):
            raise
        parent = next(each for each in out.parents if os.path.exists(each))
        free = shutil.disk_usage(parent).free
        raise MachineError(
            f"{out}: could not be written ({describe_os_error(error)}), {free:,} bytes free; "
            f"choose another place with --out"
        ) from None


@contextmanager
def _hold_lock_file(path: Path) -> Iterator[bool]:
    """Create a file and lock it as `try_lock` does, until the block ends."""
    locked = False
    try:
        with path.open("ab") as file:
            locked = try_lock(file.fileno())
            yield locked
    finally:
        if locked and IS_WINDOWS:  # where the block could not delete it, as it was open
            with suppress(OSError):  # another process has opened it
                path.unlink()
                path.parent.rmdir()


def remove_tree(path: Path) -> None:
    """Rename a directory, then delete it, so that half of it never looks complete.

    On Windows it stays, for the next call to remove, while another process reads a file in it.
    """
    for leftover in path.parent.glob(".trash-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=IS_WINDOWS)
    if path.exists():
        trash = path.with_name(f".trash-{path.name}")
        while trash.exists():  # of the last call, which could not delete it
            trash = trash.with_name(f"{trash.name}~")
        try:
            _replace(path, trash)
        except PermissionError:
            if not IS_WINDOWS:
                raise
        shutil.rmtree(trash, ignore_errors=IS_WINDOWS)


# -- one writer at a time --------------------------------------------------------------------------


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if another process has locked it.

    The system releases the lock when the process ends, however it ends, so that a killed one locks
    nobody out. Where the file system has no locks, returns True.
    """
    if IS_WINDOWS:
        return _try_lock_on_windows(descriptor)
    import fcntl  # noqa: PLC0415 - not on Windows

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no locks
    return True


def _try_lock_on_windows(descriptor: int) -> bool:
    """Lock a byte far behind the end, as others cannot read what Windows has locked."""
    import msvcrt  # noqa: PLC0415 - only there

    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, 1 << 30, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EDEADLK)
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
    return True


# -- the steps of a durable write ------------------------------------------------------------------


def write_and_sync(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Create and sync a file in a directory that does not have its final name yet."""
    with name_in_errors(path), path.open("xb") as file:
        file.writelines(pieces)
        file.flush()
        sync(file.fileno())


def sync_and_hash(path: Path) -> str:
    """Sync a file that another library wrote, and return the SHA-256 of its bytes."""
    with name_in_errors(path), path.open("rb+") as file:  # Windows syncs only what can be written
        sync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Name a file in the system's errors that name none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


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
    """Make the names in a directory survive a power cut, where the file system can do that."""
    if IS_WINDOWS:  # cannot open directories
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # older SMB, WSL's drives, some FUSE
            raise
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
