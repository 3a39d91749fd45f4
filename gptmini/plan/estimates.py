"""Figures by which a run is planned, for each kind of device.

Those of a CPU were measured on two cores; those of an accelerator are estimates, not measured.
"""

from dataclasses import dataclass

import torch

Rung = tuple[int, int, int]  # layers, width, rows per batch


@dataclass(frozen=True)
class Estimates:
    """What planning assumes of a device.

    max_tokens_per_pass: a forward pass of more tokens is no faster; None: as many as fit.
    proxy_tokens: tokens of a pass that is timed in place of a larger one.
    probe_rows, probe_length: the pass by which fine-tuning finds how large a batch may be.
    compile_speedup: how much faster passes become where torch.compile pays.
    compile_seconds: what compiling takes.
    min_seconds_to_compile: of training, below which compiling is not tried.
    startup_seconds: a command's time before its steps: imports, text, timing, the first kernels.
    model_ladder: the models that `train.minutes` chooses from, small to large.
    """

    max_tokens_per_pass: int | None
    proxy_tokens: int
    probe_rows: int
    probe_length: int
    compile_speedup: float
    compile_seconds: float
    min_seconds_to_compile: float
    startup_seconds: float
    model_ladder: tuple[Rung, ...]


CPU = Estimates(
    max_tokens_per_pass=8192,  # more leave the caches
    proxy_tokens=8192,
    probe_rows=1,
    probe_length=64,
    compile_speedup=1.2,  # 1.05 to 1.45
    compile_seconds=12,
    min_seconds_to_compile=90,  # compiling takes less than a quarter of that
    startup_seconds=5,
    model_ladder=(
        (2, 128, 8),
        (3, 128, 8),
        (4, 128, 8),
        (4, 192, 16),
        (4, 256, 16),
        (6, 256, 16),
        (6, 384, 16),
        (8, 512, 32),
        (12, 768, 64),
    ),
)

# Not measured. An accelerator computes smaller passes than these in the time of launching their
# kernels, which says nothing of larger ones.
ACCELERATOR = Estimates(
    max_tokens_per_pass=None,
    proxy_tokens=65_536,
    probe_rows=16,
    probe_length=1024,
    compile_speedup=1.5,
    compile_seconds=40,
    min_seconds_to_compile=160,
    startup_seconds=10,
    model_ladder=(
        (2, 128, 16),
        (4, 192, 16),
        (4, 256, 32),
        (6, 384, 32),
        (8, 512, 64),
        (12, 768, 64),
        (16, 1024, 128),
        (24, 1024, 128),
    ),
)


def get_estimates(device: torch.device) -> Estimates:
    return CPU if device.type == "cpu" else ACCELERATOR
