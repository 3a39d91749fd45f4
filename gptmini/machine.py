"""What this machine offers a run: device, number type, memory, signals."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from gptmini.config.settings import TrainConfig
from gptmini.errors import ConfigError, MachineError


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU; MachineError for CUDA without a device."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name}: not one of auto, cpu and cuda; take auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise MachineError("device cuda: no CUDA device here; take auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def pick_dtype(settings: TrainConfig, device: torch.device) -> torch.dtype:
    """The type of matrix products.

    `auto` is bfloat16 where the processor multiplies it in hardware: on a CPU with AMX tiles it is
    six times as fast as float32, elsewhere it is emulated.
    """
    if settings.dtype != "auto":
        return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def precision(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context in which matrix products run in float32 or bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def memory(device: torch.device) -> int:
    """Bytes of memory in all; a guess where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if os.name != "posix":
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has held at most: on a device, or else in all."""
    return _held(device, "VmHWM", torch.cuda.max_memory_reserved)


def resident_memory(device: torch.device) -> int:
    """Bytes that this process holds now."""
    return _held(device, "VmRSS", torch.cuda.memory_reserved)


def _held(device: torch.device, field: str, on_cuda: Callable[[torch.device], int]) -> int:
    if device.type == "cuda":
        return on_cuda(device)
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) << 10
    except (OSError, IndexError):  # not on Linux, where ru_maxrss would count the parent's
        import resource  # noqa: PLC0415 - not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac


def check_memory(parameters: int, device: torch.device) -> None:
    """MachineError if weights, gradients and AdamW's two moments in float32 cannot fit."""
    needed, total = 16 * parameters, memory(device)
    if total < needed:
        raise MachineError(
            f"model: {parameters:,} parameters need {needed:,} bytes to train, {device.type} has "
            f"{total:,}; lower model.d_model, model.n_layer or the vocabulary"
        )


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks instead of returning them to the system at every step.

    Without it, page faults made a step of 32 x 256 tokens at width 256 between 2 and 32 % slower
    (three pairs of runs on two cores).
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            trim_threshold, mmap_threshold = -1, -3
            # Older versions take 32 MiB at most.
            if mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 32 << 20):
                mallopt(trim_threshold, (1 << 31) - 1)


@dataclass
class Received:
    """The signals that came: one that ends the work, and whether to save and go on."""

    stop: int | None = None
    save: bool = False


@contextmanager
def signals() -> Iterator[Received]:
    """Collects signals, to be acted on between steps.

    SIGINT, SIGTERM and SIGHUP end the work, a second SIGINT at once; SIGUSR1 asks for a checkpoint.
    What is ignored, as SIGHUP is under nohup, stays so.
    """
    received = Received()

    def note(number: int, _: FrameType | None) -> None:
        if number == getattr(signal, "SIGUSR1", None):
            received.save = True
        elif received.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            received.stop = received.stop or number

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # the last two are not on Windows
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
