"""Figures by which a run is planned, for each kind of device.

Those of a CPU were measured on one or two cores; those of an accelerator are estimates.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Rung(NamedTuple):
    """A model to choose.

    min_tokens_per_weight: what it must see for each weight of its blocks to beat the rung below.
    """

    n_layer: int
    width: int
    batch_size: int
    min_tokens_per_weight: float


Ladder = tuple[Rung, ...]  # small to large


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
    few_epochs, many_epochs: the models that `train.minutes` chooses from, by how often they read
    the text.
    """

    max_tokens_per_pass: int | None
    proxy_tokens: int
    probe_rows: int
    probe_length: int
    compile_speedup: float
    compile_seconds: float
    min_seconds_to_compile: float
    startup_seconds: float
    few_epochs: Ladder
    many_epochs: Ladder


# For a text that is read a few times, two layers are enough, as they can copy from the start
# (model/induction.py). Bits per byte after 1 to 10 minutes on one core of a Xeon with AMX; in
# brackets the tokens per weight; one run each:
#
#     layers x width, rows   2 x 128, 8   2 x 192, 16  2 x 256, 16  3 x 256, 16  4 x 192, 16
#     German pages, 1 min.   1.158 (4.7)  1.153 (1.5)
#                   2        0.980 (10)   0.930 (3.5)  0.950 (1.4)               1.014 (0.9)*
#                   4                     0.807 (5.6)  0.799 (2.4)  0.829 (1.2)  0.826 (1.9)
#     std. library, 1        1.125 (4.7)  1.139 (1.4)*
#                   4                                  0.894 (2.4)  0.910 (1.3)  0.916 (1.8)
#
#                            2 x 256, 16  2 x 384, 16  4 x 256, 16
#     Python packages, 10    0.940 (6.2)  0.946 (1.8)  0.960 (2.0)
#
# (* with 8 rows.) docs/experiments.md has the other shapes.
CPU_FEW_EPOCHS: Ladder = (
    Rung(2, 128, 8, 2.0),
    Rung(2, 192, 16, 2.0),
    Rung(2, 256, 16, 2.0),
    Rung(2, 384, 16, 2.0),
    Rung(4, 384, 16, 2.0),  # from here on not measured
    Rung(6, 384, 16, 2.0),
    Rung(8, 512, 32, 2.0),
    Rung(12, 768, 64, 2.0),
)

# For a text that is read often, more weights are better than more epochs, and from two minutes on
# four layers better than two. As above, with 8 rows at a width of 128, else 16:
#
#                     3 x 128      4 x 128      2 x 192      2 x 256      4 x 192      4 x 256
#     Shakespeare, 1  2.044 (2.0)  2.081 (1.1)  2.031 (1.3)  2.027 (0.6)  2.024 (0.4)
#                  2  2.056 (3.9)  2.034 (2.1)               2.003 (1.1)  1.948 (1.0)  1.976 (0.4)
#     by character, 4                                        2.404 (3.6)  2.346 (2.5)
#     manual, 2                    1.620 (2.0)               1.617 (1.1)  1.570 (0.8)  1.570 (0.4)
#     both, 1         2.028 (1.9)  2.070 (1.2)  1.985 (1.3)  2.035 (0.6)  1.967 (0.4)
#           2                                                1.931 (1.2)  1.962 (0.9)  1.925 (0.4)
#
# By an earlier recipe, 4 x 192 (1.5) won against 4 x 256 (0.5) on Shakespeare by character. All are
# from before the recipe followed the risk of overfitting (plan/recipe.py). With it, after half a
# minute, 2 x 192 (0.7) is 1.4 % better than 2 x 128 on the manual, 0.5 % worse on Shakespeare and
# on both, and no better on German pages. After a minute, 2 x 192 has 2.001 on Shakespeare and 1.924
# on both, 2 x 256 has 2.003 and 1.967. After two, 2 x 256 and 2 x 384 have 1.994 and 1.984 on
# Shakespeare.
CPU_MANY_EPOCHS: Ladder = (
    Rung(2, 128, 8, 0.7),
    Rung(2, 192, 16, 1.0),
    Rung(4, 192, 16, 0.7),
    Rung(4, 256, 16, 0.7),
    Rung(6, 256, 16, 0.7),
    Rung(6, 384, 16, 0.7),
    Rung(8, 512, 32, 0.7),
    Rung(12, 768, 64, 0.7),
)

CPU = Estimates(
    max_tokens_per_pass=8192,  # more leave the caches
    proxy_tokens=8192,
    probe_rows=1,
    probe_length=64,
    compile_speedup=1.2,  # 1.05 to 1.45
    compile_seconds=12,
    min_seconds_to_compile=90,  # compiling takes less than a quarter of that
    startup_seconds=5,
    few_epochs=CPU_FEW_EPOCHS,
    many_epochs=CPU_MANY_EPOCHS,
)

ACCELERATOR_LADDER: Ladder = (
    Rung(2, 128, 16, 1.8),
    Rung(4, 192, 16, 1.8),
    Rung(4, 256, 32, 1.8),
    Rung(6, 384, 32, 1.8),
    Rung(8, 512, 64, 1.8),
    Rung(12, 768, 64, 1.8),
    Rung(16, 1024, 128, 1.8),
    Rung(24, 1024, 128, 1.8),
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
    few_epochs=ACCELERATOR_LADDER,
    many_epochs=ACCELERATOR_LADDER,
)


def get_estimates(device: torch.device) -> Estimates:
    return CPU if device.type == "cpu" else ACCELERATOR
