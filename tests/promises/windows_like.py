"""Run commands of gptmini as on Windows, as far as another system can pretend.

    python -m tests.promises.windows_like FOLDER COMMANDS

See commands.py for both. What Windows lacks is hidden. As there, a file that is open cannot be
renamed, replaced or deleted, nor can a folder with such a file.
"""

import errno
import fcntl
import os
import shutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch  # noqa: F401 - imports what is hidden below
import torch.distributed.fsdp  # noqa: F401
import tqdm  # noqa: F401

HIDDEN_MODULES = ("fcntl", "resource", "termios", "readline")
HIDDEN_SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2")


def pretend() -> None:
    """Make this process believe that it is on Windows, before it imports gptmini."""
    real_lock = fcntl.lockf
    replace = os.replace
    unlink = os.unlink
    rename = os.rename

    def refuse_open(path: Any, dir_fd: int | None = None) -> None:
        """Fail as Windows does if this process has a file open, or one in that folder."""
        base = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        target = str(Path(os.path.normpath(base / os.fspath(path))))
        for link in os.listdir("/proc/self/fd"):
            try:
                opened = os.readlink(f"/proc/self/fd/{link}")
            except OSError:  # the descriptor of this listing
                continue
            if opened == target or (opened.startswith(f"{target}/") and os.path.isfile(opened)):
                raise PermissionError(errno.EACCES, "Access is denied", os.fspath(path))

    def refusing(call: Any, *, is_rename: bool) -> Any:
        def refused(path: Any, *others: Any, **options: Any) -> None:
            refuse_open(path, options.get("dir_fd", options.get("src_dir_fd")))
            if is_rename:
                refuse_open(others[0])
            call(path, *others, **options)

        return refused

    def lock(descriptor: int, mode: int, size: int) -> None:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        real_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, size, start)

    os.replace = refusing(replace, is_rename=True)
    os.rename = refusing(rename, is_rename=True)
    os.unlink = os.remove = refusing(unlink, is_rename=False)
    shutil._use_fd_functions = False  # type: ignore[attr-defined] # as there, so paths are whole
    msvcrt: Any = types.ModuleType("msvcrt")
    msvcrt.locking = lock
    msvcrt.LK_NBLCK = 2
    sys.modules["msvcrt"] = msvcrt
    memory_info = psutil.Process.memory_info

    def with_peak(process: psutil.Process) -> Any:
        rss = memory_info(process).rss
        return types.SimpleNamespace(rss=rss, peak_wset=rss + 1)

    psutil.Process.memory_info = with_peak  # type: ignore[assignment,method-assign]
    for name in HIDDEN_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in HIDDEN_SIGNALS:
        delattr(signal, name)
    platform = sys.platform
    sys.platform = "win32"
    import gptmini.files

    sys.platform = platform
    assert gptmini.files.IS_WINDOWS


if __name__ == "__main__":
    pretend()
    from tests.promises.commands import run_all

    run_all(*sys.argv[1:])
