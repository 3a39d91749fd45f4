"""The machine that a run is on: device, number type, memory, signals."""

import ctypes
import gc
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from gptmini.errors import ConfigError, MachineError
from gptmini.files import IS_WINDOWS

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")  # with which cuBLAS adds in a fixed order

# Parameters of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Compute:
    """Where a model runs, and the type of its matrix products; weights stay in float32.

    `deterministic` forbids kernels that add in an order which varies; a CPU has none of those.
    `threads` are those of a CPU while training; None: as many as torch has.
    """

    device: torch.device
    dtype: torch.dtype
    deterministic: bool = False
    threads: int | None = None

    def autocast(self) -> torch.autocast:
        """Create a context in which matrix products run in `dtype`."""
        if self.dtype == torch.float32:
            return torch.autocast(self.device.type, enabled=False)
        return torch.autocast(self.device.type, self.dtype)

    @contextmanager
    def enter_training(self) -> Iterator[None]:
        """Set how torch computes on the device while training; what it was is restored afterwards.

        On CUDA, products of float32 numbers are in TF32 there: factors keep the range of float32
        and the ten bits of float16, and the products take about a seventh of the time. All else
        that runs in float32 (evaluate, score, inspect, generate, the check of an import) keeps
        full float32, torch's default: its results are compared with those of other machines.

        With `deterministic`, flash and memory-efficient attention add their gradients in a fixed
        order, torch leaves cuDNN's attention out, and torch.compile chooses kernels without timing
        them. An operation that torch cannot make deterministic raises a RuntimeError.
        """
        with ExitStack() as restored:
            if self.threads is not None:
                restored.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(self.threads)
            if self.device.type == "cuda":
                restored.enter_context(_use_tf32())
            if self.deterministic:
                restored.enter_context(_use_deterministic_algorithms(True))
            yield

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device; an NVIDIA or AMD GPU goes on computing meanwhile."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def synchronize(self) -> None:
        """Wait until the device has finished, so that the time read next is right."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@contextmanager
def _use_tf32() -> Iterator[None]:
    """Multiply float32 matrices in TF32 where the GPU can."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set it for each kind of device: that is kept
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _use_deterministic_algorithms(on: bool) -> Iterator[None]:
    """Forbid or allow algorithms whose results vary, without filling new memory to no purpose."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    options: Any = torch.utils.deterministic
    filled = options.fill_uninitialized_memory
    # Not with warn_only, under which attention stays as it is.
    torch.use_deterministic_algorithms(on)
    options.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        options.fill_uninitialized_memory = filled


def allow_varying_algorithms() -> AbstractContextManager[None]:
    """Allow algorithms that training may forbid, for what does not reach the weights."""
    if torch.are_deterministic_algorithms_enabled():
        return _use_deterministic_algorithms(False)
    return nullcontext()


def pick_compute(device: str, dtype: str, deterministic: str = "auto") -> Compute:
    """Pick what three settings say, each of which may be `auto`: see TrainConfig."""
    picked = pick_device(device)
    picked_dtype = _pick_dtype(picked) if dtype == "auto" else DTYPES[dtype]
    return Compute(picked, picked_dtype, _pick_deterministic(deterministic, picked))


def _pick_dtype(device: torch.device) -> torch.dtype:
    """Pick the number type that a device multiplies fast.

    That is bfloat16 where the processor has it in hardware: six times as fast as float32 on a CPU
    with AMX tiles. Other CPUs emulate it. Before Ampere, NVIDIA's GPUs of compute capability 7 have
    tensor cores for float16 alone.
    """
    if multiplies_bfloat16(device):
        return torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability() >= (7, 0):
        return torch.float16
    return torch.float32


def _pick_deterministic(setting: str, device: torch.device) -> bool:
    """Pick whether to forbid kernels whose sums vary.

    `auto` does on NVIDIA's GPUs, where it costs 7 % of a step of GPT-2 (scripts/LOG.md: What does
    an H100 say?). Other accelerators may lack such kernels, so there it must be asked for. Raises
    MachineError if it is too late for cuBLAS.
    """
    if device.type == "cpu" or setting == "off":
        return False
    if device.type != "cuda":
        return setting == "on"
    is_possible = os.environ.get(CUBLAS_VARIABLE) in DETERMINISTIC_CUBLAS
    if setting == "on" and not is_possible:
        raise MachineError(
            f"train.deterministic: {CUBLAS_VARIABLE} must be {DETERMINISTIC_CUBLAS[0]} before "
            f"this process uses the GPU; set it, or use auto"
        )
    is_nvidia = torch.version.hip is None
    return is_possible and (setting == "on" or is_nvidia)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Check whether a device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "xpu":
        return torch.xpu.is_bf16_supported(including_emulation=False)
    if device.type == "mps":  # from the M2 on; torch does not tell which chip it is
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def pick_device(name: str) -> torch.device:
    """Pick a device; `auto` takes an accelerator where there is one.

    AMD's GPUs are `cuda` to PyTorch. Raises MachineError if the machine lacks the device.
    """
    if name not in DEVICES:
        choices = ", ".join(DEVICES[:-1])
        raise ConfigError(f"--device {name}: unknown; use {choices} or {DEVICES[-1]}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if accelerator is None else accelerator.type
    if name == "auto":
        name = found if found in DEVICES else "cpu"
    if name not in ("cpu", found):
        others = "auto or cpu" if found == "cpu" else f"auto, {found} or cpu"
        raise MachineError(f"--device {name}: no such device found; use {others}")
    if name == "cuda" and not torch.cuda.is_initialized():
        # cuBLAS reads this once, when it begins; a fixed workspace costs nothing.
        os.environ.setdefault(CUBLAS_VARIABLE, DETERMINISTIC_CUBLAS[0])
    return torch.device(name)


def can_choose_threads(compute: Compute) -> bool:
    """Return whether nobody has said how many threads there shall be, by --threads or otherwise."""
    is_open = "OMP_NUM_THREADS" not in os.environ and compute.threads is None
    return is_open and compute.device.type == "cpu" and torch.get_num_threads() > 1


def describe_device(device: torch.device) -> str:
    """Name a device, with what the last bits of its results depend on."""
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"  # the widest vectors it has
    if device.type == "cuda":
        toolkit = torch.version.cuda or torch.version.hip
        return f"cuda ({torch.cuda.get_device_name(device)}, {toolkit})"
    return f"{device.type} ({platform.platform()})"


# -- memory ----------------------------------------------------------------------------------------


def get_total_memory(device: torch.device) -> int:
    """Get the bytes of memory of a device."""
    if device.type == "mps":  # what the system lets a process have of the memory that both share
        return torch.mps.recommended_max_memory()
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[1]
    return psutil.virtual_memory().total


def get_resident_memory(device: torch.device) -> int:
    """Get the bytes this process holds now: on an accelerator, or resident in main memory."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return torch.accelerator.memory_reserved(device)
    return psutil.Process().memory_info().rss


def get_peak_memory(device: torch.device) -> int:
    """Get the most bytes this process has held: on an accelerator, or resident in main memory.

    On a Mac's GPU it is what the process holds now, as PyTorch does not count the peak there.
    """
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return torch.accelerator.max_memory_reserved(device)
    return _get_peak_resident_memory()


def release_freed_memory(device: torch.device) -> None:
    """Give back what an accelerator keeps of tensors that are gone, and begin its peak anew.

    For what follows timing runs: their models are in reference cycles once they are compiled.
    """
    if device.type == "cpu":
        return
    gc.collect()
    if device.type == "mps":
        torch.mps.empty_cache()
        return
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()


def _get_peak_resident_memory() -> int:
    """Get the peak of main memory, which psutil knows on Windows only."""
    info = psutil.Process().memory_info()
    if IS_WINDOWS:
        return info.peak_wset  # type: ignore[attr-defined] # only there
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmHWM:\s*(\d+) kB", status)
        if found:  # gVisor, which some containers run on, does not tell
            return int(found[1]) << 10
    import resource  # noqa: PLC0415 - not on Windows

    # Second choice on Linux, where a child process begins with the peak of its parent.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks instead of returning them to the system after every pass.

    Without this, page faults make passes slower (scripts/LOG.md: Does returning freed memory cost
    time?).
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    # Older versions accept at most 32 MiB.
    if mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 32 << 20):
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


# Those for our own code. On Windows LLVM's alone: Microsoft's compiler lacks the vector types of
# decode.cpp, and MinGW's g++ does not align the stack for them (GCC's bug 54412), so its code would
# crash.
CPP_COMPILERS = ["g++"]
if IS_WINDOWS:
    CPP_COMPILERS = ["clang++"]
elif sys.platform == "darwin":
    CPP_COMPILERS = ["clang++", "g++"]


def find_compiler(*names: str) -> str | None:
    """Find the first C++ compiler of these names that is there.

    On a Mac without Apple's command line tools, those in /usr/bin only open an installer.
    """
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        if sys.platform == "darwin" and path.startswith("/usr/bin/") and not _has_apple_tools():
            continue
        return path
    return None


def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler, which it needs on a CPU."""
    return find_compiler("g++", "clang++", "cl") is not None


def _has_apple_tools() -> bool:
    asked = subprocess.run(["/usr/bin/xcode-select", "-p"], capture_output=True, check=False)
    return asked.returncode == 0


@dataclass
class ReceivedSignals:
    """Signals that arrived: the one that ends the work, and whether a checkpoint was requested."""

    stop: int | None = None
    save: bool = False


@contextmanager
def catch_signals() -> Iterator[ReceivedSignals]:
    """Collect signals, for the caller to act on between steps.

    SIGINT, SIGTERM and SIGHUP end the work; a second SIGINT ends it at once. SIGUSR1 requests a
    checkpoint. A signal that was ignored, as SIGHUP is under nohup, stays ignored. Only the main
    thread can collect any.
    """
    received = ReceivedSignals()

    def note(number: int, _: FrameType | None) -> None:
        if number == getattr(signal, "SIGUSR1", None):
            received.save = True
        elif received.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            received.stop = received.stop or number

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # Windows lacks the last two
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    handled: list[int] = []
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
