"""Compile decode.cpp into a shared library, once, and keep it in the cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from functools import lru_cache
from pathlib import Path

from gptmini import files
from gptmini.console import warn

SOURCE_FILES = [
    Path(__file__).with_name(name) for name in ("decode.cpp", "product.h", "attention.h")
]
COMPILER_FLAGS = ["-O3", "-shared", "-fPIC"]
COMPILE_TIMEOUT_SECONDS = 120  # it takes 5 to 20
NATIVE_TARGET = ("-march=native",)


@lru_cache
def build_library(cache: Path, target: tuple[str, ...] = NATIVE_TARGET) -> ctypes.CDLL | None:
    """Return the compiled step, from the cache or compiled now; None if there is no compiler.

    If compiling fails, warns and returns None; as the result is remembered, once per process.
    `target` chooses the processor's instructions.
    """
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        return None
    # The name of the library covers all that its bytes depend on, so a change compiles another.
    digest = hashlib.sha256()
    for source in SOURCE_FILES:
        digest.update(source.read_bytes())
    command = [compiler, *COMPILER_FLAGS, *target]
    digest.update(" ".join([*command, _read_processor()]).encode())
    folder = cache / "native"
    name = digest.hexdigest()[:16]
    try:
        library = _find_library(folder, name) or _compile(command, folder, name)
        # Never load code that another user could have written.
        status = library.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        warn(f"g++: {_describe_failure(error)}; generating with PyTorch, which is slower")
        return None


def _describe_failure(error: OSError | subprocess.SubprocessError) -> str:
    """Say in one line why there is no library: the compiler's first error, if it reports one."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"has not compiled the decoder within {error.timeout:g} seconds"
    if not isinstance(error, subprocess.CalledProcessError):
        return f"cannot use the compiled code ({error})"
    lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines()]
    errors = [line for line in lines if "error" in line.lower()]
    reasons = errors or [line for line in lines if line] or [f"exit {error.returncode}"]
    return f"cannot compile the decoder ({reasons[0]})"


def _read_processor() -> str:
    """Name the processor and its instructions.

    -march=native compiles for this processor only, but machines may share a home directory.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()} {features}"


def _find_library(folder: Path, name: str) -> Path | None:
    """Find an intact library; delete damaged ones.

    Loading one that a full disk or a power cut has cut off would end the process (SIGBUS).
    """
    for library in sorted(folder.glob(f"{name}-*.so")):
        if library.stem == f"{name}-{_compute_digest(library)}":
            return library
        library.unlink(missing_ok=True)  # another process may have found it, too
    return None


def _compute_digest(library: Path) -> str:
    return hashlib.sha256(files.read_regular(library)).hexdigest()[:16]


def _compile(compiler: list[str], folder: Path, name: str) -> Path:
    """Compile a library; its name is that of its sources and flags, and a digest of its bytes."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Compile under a name of this thread's own and rename at the end, so that nobody loads half a
    # library; if several compile at once, the last one wins.
    partial = folder / f"{name}.{os.getpid()}-{threading.get_ident()}"
    command = [*compiler, str(SOURCE_FILES[0]), "-o", str(partial)]
    try:  # with OpenMP, whose threads torch has started already
        _run([*command, "-fopenmp"])
    except subprocess.CalledProcessError:  # most Macs lack OpenMP: use one thread
        _run(command)
    partial.chmod(0o700)
    library = folder / f"{name}-{_compute_digest(partial)}.so"
    os.replace(partial, library)
    return library


def _run(command: list[str]) -> None:
    """Run the compiler; CalledProcessError if it fails, TimeoutExpired if it hangs."""
    subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_SECONDS
    )
