"""The machine that a run is on: device, number type, memory, signals."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from gptmini.errors import ConfigError, MachineError


@dataclass(frozen=True)
class Compute:
    """Where a model runs, and the type of its matrix products; weights stay in float32."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> torch.autocast:
        """A context in which matrix products run in `dtype`."""
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def synchronize(self) -> None:
        """Wait until the device has finished, so that the time read next is right."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def pick_compute(device: str, dtype: str) -> Compute:
    """The device and type of two settings, each of which may be `auto`.

    bfloat16 where the processor multiplies it in hardware: six times as fast as float32 on a CPU
    with AMX tiles. Other CPUs emulate it.
    """
    place = pick_device(device)
    if dtype != "auto":
        return Compute(place, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    if place.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return Compute(place, torch.bfloat16 if fast else torch.float32)


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is a device; MachineError for `cuda` without one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name}: unknown; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise MachineError("--device cuda: no CUDA device found; use auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def get_total_memory(device: torch.device) -> int:
    """Bytes of memory of a device; 8 GiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if os.name != "posix":
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def get_peak_memory(device: torch.device) -> int:
    """The most bytes this process has held: on a GPU, or resident in main memory."""
    return _read_process_memory(device, "VmHWM", torch.cuda.max_memory_reserved)


def get_resident_memory(device: torch.device) -> int:
    """Bytes this process holds now."""
    return _read_process_memory(device, "VmRSS", torch.cuda.memory_reserved)


def _read_process_memory(
    device: torch.device, field: str, on_cuda: Callable[[torch.device], int]
) -> int:
    if device.type == "cuda":
        return on_cuda(device)
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) << 10
    except (OSError, IndexError):  # not Linux, where ru_maxrss would include the parent's peak
        import resource  # noqa: PLC0415 - not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac


def estimate_training_bytes(
    parameters: int, device: torch.device, world_size: int, sharded: bool
) -> int:
    """Bytes of weights, gradients and AdamW's two moments, all float32, on one device.

    Processes have a GPU each, but share the memory of a CPU. Sharded, they hold one model together.
    """
    on_device = world_size if device.type == "cpu" else 1
    return 16 * parameters * on_device // (world_size if sharded else 1)


def check_memory(
    parameters: int, device: torch.device, world_size: int = 1, sharded: bool = False
) -> None:
    """MachineError if what training holds at least, besides activations, cannot fit."""
    needed, total = (
        estimate_training_bytes(parameters, device, world_size, sharded),
        get_total_memory(device),
    )
    if total < needed:
        raise MachineError(
            f"model: training {parameters:,} parameters needs {needed:,} bytes, {device.type} has "
            f"{total:,}; lower model.d_model, model.n_layer or the vocabulary"
        )


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks instead of returning them to the system at every step.

    Without this, page faults made a step of 32 x 256 tokens at width 256 between 2 and 32 % slower
    (three pairs of runs on two cores).
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            trim_threshold, mmap_threshold = -1, -3
            # Older versions accept at most 32 MiB.
            if mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 32 << 20):
                mallopt(trim_threshold, (1 << 31) - 1)


@dataclass
class ReceivedSignals:
    """Signals that arrived: the one that ends the work, and whether a checkpoint was asked for."""

    stop: int | None = None
    save: bool = False


@contextmanager
def catch_signals() -> Iterator[ReceivedSignals]:
    """Collect signals, for the caller to act on between steps.

    SIGINT, SIGTERM and SIGHUP end the work; a second SIGINT ends it at once. SIGUSR1 asks for a
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
    main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if main and signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
