"""Compile decode.cpp into a shared library, once, and keep it in the cache."""

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from gptmini import files
from gptmini.console import warn
from gptmini.files import IS_WINDOWS
from gptmini.machine import CPP_COMPILERS, find_compiler

SOURCE_FILES = [
    Path(__file__).with_name(name) for name in ("decode.cpp", "product.h", "attention.h")
]
if IS_WINDOWS:
    COMPILER_FLAGS = ["-O3", "-shared"]
    LIBRARY_SUFFIX = ".dll"
else:
    COMPILER_FLAGS = ["-O3", "-shared", "-fPIC"]
    LIBRARY_SUFFIX = ".so"
if sys.platform == "linux" and platform.machine() == "x86_64":
    # Tuned for Zen 2 and 3, and in newer versions for more, g++ takes some sums of 8 numbers apart
    # into products and additions, by the loop they are in: a prompt would get other bits than its
    # tokens one by one.
    COMPILER_FLAGS.append("--param=avoid-fma-max-bits=0")
COMPILE_TIMEOUT_SECONDS = 120  # it takes 5 to 20
NATIVE_TARGET = ("-march=native",)
# Where that is refused, as by Apple's clang before version 15 on Apple's processors.
OTHER_NATIVE_TARGETS: list[tuple[str, ...]] = [("-mcpu=native",), ()]


@lru_cache
def build_library(target: tuple[str, ...] = NATIVE_TARGET) -> ctypes.CDLL | None:
    """Return the compiled step, from the cache or compiled now; None if there is no compiler.

    If compiling fails, warns and returns None; as the result is remembered, once per process.
    `target` chooses the processor's instructions.
    """
    compiler = find_compiler(*CPP_COMPILERS)
    if compiler is None:
        if IS_WINDOWS:  # where no system comes with one
            warn("clang++: not found; install LLVM to generate faster")
        return None
    command = [compiler, *COMPILER_FLAGS, str(SOURCE_FILES[0])]
    attempts = _list_attempts(target)
    # The name of the library covers all that its bytes depend on, so a change compiles another.
    digest = hashlib.sha256()
    for source in SOURCE_FILES:
        digest.update(source.read_bytes())
    digest.update(json.dumps([command, attempts, _read_processor()]).encode())
    folder = files.get_cache_folder() / "native"
    name = digest.hexdigest()[:16]
    try:
        library = _find_library(folder, name) or _compile(command, attempts, folder, name)
        return ctypes.CDLL(str(library)) if _is_ours_alone(library) else None
    except (OSError, subprocess.SubprocessError) as error:
        reason = _describe_failure(error)
        warn(f"{Path(compiler).stem}: {reason}; using PyTorch, which is slower")
        return None


def _list_attempts(target: tuple[str, ...]) -> list[list[str]]:
    """List the options to try one after the other, those of the fastest code first."""
    targets = [target]
    if target == NATIVE_TARGET:
        targets += OTHER_NATIVE_TARGETS
    return [[*each, *openmp] for each in targets for openmp in [*_list_openmp(), []]]


def _list_openmp() -> list[list[str]]:
    """List the ways to OpenMP: to the one that torch has loaded, whose threads are there already.

    A second copy of LLVM's would end the process ("OMP: Error #15").
    """
    if IS_WINDOWS:  # torch's package has the library, but not what a linker needs
        return []
    if sys.platform != "darwin":
        return [["-fopenmp"]]
    # Apple's clang knows OpenMP but comes without it; torch's package has header and library.
    torch_folder = Path(torch.__file__).parent
    library_folder = torch_folder / "lib"
    compiling = ["-Xclang", "-fopenmp", f"-I{torch_folder / 'include'}"]
    linking = [f"-L{library_folder}", "-lomp", f"-Wl,-rpath,{library_folder}"]
    return [[*compiling, *linking]]


def _is_ours_alone(library: Path) -> bool:
    """Check that no other user could have written a library; never load one otherwise."""
    if IS_WINDOWS:  # which gives a user's folder to this user alone
        return True
    status = library.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


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
        if sys.platform == "darwin":
            return str(_run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]))
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration, subprocess.SubprocessError):
        features = platform.processor()
    return f"{platform.machine()} {features}"


def _find_library(folder: Path, name: str) -> Path | None:
    """Find an intact library; delete damaged ones.

    Loading one that a full disk or a power cut has cut off would end the process (SIGBUS).
    """
    for library in sorted(folder.glob(f"{name}-*{LIBRARY_SUFFIX}")):
        if library.stem == f"{name}-{_compute_digest(library)}":
            return library
        library.unlink(missing_ok=True)  # another process may have found it, too
    return None


def _compute_digest(library: Path) -> str:
    return hashlib.sha256(files.read_regular(library)).hexdigest()[:16]


def _compile(command: list[str], attempts: list[list[str]], folder: Path, name: str) -> Path:
    """Compile a library; its name is that of its sources and flags, and a digest of its bytes."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Compile in a folder of this call's own and rename at the end, so that nobody loads half a
    # library; if several compile at once, the last one wins.
    with tempfile.TemporaryDirectory(
        prefix=".tmp-", dir=folder, ignore_cleanup_errors=True
    ) as scratch:
        partial = Path(scratch) / f"{name}{LIBRARY_SUFFIX}"
        for options in attempts:
            try:
                _run([*command, *options, "-o", str(partial)])
                break
            except subprocess.CalledProcessError:  # it lacks OpenMP, or does not know an option
                if options is attempts[-1]:
                    raise
        partial.chmod(0o700)
        library = folder / f"{name}-{_compute_digest(partial)}{LIBRARY_SUFFIX}"
        files.rename(partial, library)
    return library


def _run(command: list[str]) -> bytes:
    """Return what a command prints; CalledProcessError if it fails, TimeoutExpired if it hangs."""
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_SECONDS
    )
    return done.stdout
