"""decode.cpp as a library: compiled once, in a second, into the cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from functools import lru_cache
from pathlib import Path

from gptmini.console import warn

SOURCE_FILES = [
    Path(__file__).with_name(name) for name in ("decode.cpp", "product.h", "attention.h")
]
COMPILER_FLAGS = ["-O3", "-shared", "-fPIC"]
NATIVE_TARGET = ("-march=native",)


@lru_cache
def build_library(cache: Path, target: tuple[str, ...] = NATIVE_TARGET) -> ctypes.CDLL | None:
    """The compiled step, from the cache or compiled now; None if there is no compiler.

    None and a warning if it fails, once per process. `target` chooses the instructions.
    """
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        return None
    words = " ".join([compiler, *COMPILER_FLAGS, *target, _read_processor()])
    name = hashlib.sha256(
        b"".join(map(Path.read_bytes, SOURCE_FILES)) + words.encode()
    ).hexdigest()[:16]
    library = cache / "native" / f"{name}.so"
    try:
        if not library.exists():
            _compile([compiler, *COMPILER_FLAGS, *target], library)
        if library.stat().st_uid != os.getuid() or library.stat().st_mode & 0o022:
            return None  # never load code that another user could have written
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        warn(f"g++: {_describe_failure(error)}; generating with PyTorch, which is slower")
        return None


def _describe_failure(error: OSError | subprocess.CalledProcessError) -> str:
    """Why there is no library, in one line: the compiler's first error, if it named one."""
    if isinstance(error, OSError):
        return f"cannot use the compiled code ({error})"
    lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines()]
    named = [line for line in lines if "error" in line.lower()] or list(filter(None, lines))
    return f"cannot compile the decoder ({named[0] if named else f'exit {error.returncode}'})"


def _read_processor() -> str:
    """The processor's instructions: -march=native, and machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()} {features}"


def _compile(compiler: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    command = [*compiler, str(SOURCE_FILES[0]), "-o", str(partial)]
    try:  # share torch's OpenMP threads; Macs mostly lack the library, so fall back to one thread
        subprocess.run([*command, "-fopenmp"], capture_output=True, check=True)  # noqa: S603
    except subprocess.CalledProcessError:
        subprocess.run(command, capture_output=True, check=True)  # noqa: S603
    partial.chmod(0o700)
    os.replace(partial, library)
