"""Figures by which a run is planned, for each kind of device.

Those of a CPU were measured on one or two cores. Those of an accelerator are estimates, except for
those of torch.compile.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class CandidateModel(NamedTuple):
    """A model to choose.

    batch_tokens: those of a step, in rows of its context unless others are stated.
    min_tokens_per_weight: what it must see for each weight of its blocks to beat the next smaller.
    """

    n_layer: int
    width: int
    context_length: int
    batch_tokens: int
    min_tokens_per_weight: float


@dataclass(frozen=True)
class Estimates:
    """Assumptions about a device, for planning.

    max_tokens_per_pass: a forward pass of more tokens is no faster; None: as many as fit.
    compile_speedup: how much faster torch.compile makes a step.
    compile_seconds: what compiling takes.
    few_epochs, many_epochs: the models that `train.minutes` chooses from, small to large, by
    how often they read the text.
    """

    max_tokens_per_pass: int | None
    compile_speedup: float
    compile_seconds: float
    few_epochs: tuple[CandidateModel, ...]
    many_epochs: tuple[CandidateModel, ...]


# Text read once or twice: two layers are enough, as they can copy (scripts/LOG.md: Which sizes for
# a text that is read once or twice?), and a longer context gives them more to copy (scripts/LOG.md:
# Should `--minutes` choose longer rows?).
CPU_FEW_EPOCHS = (
    CandidateModel(2, 128, 512, 2048, 2.0),
    CandidateModel(2, 192, 512, 4096, 2.0),
    CandidateModel(2, 256, 512, 4096, 2.0),
    CandidateModel(2, 384, 512, 4096, 2.0),
    CandidateModel(4, 384, 512, 4096, 2.0),  # from here on not measured
    CandidateModel(6, 384, 512, 4096, 2.0),
    CandidateModel(8, 512, 512, 8192, 2.0),
    CandidateModel(12, 768, 512, 16_384, 2.0),
)

# Text read often: more weights are better than more epochs (scripts/LOG.md: Which sizes for a text
# that is read often?).
CPU_MANY_EPOCHS = (
    CandidateModel(2, 128, 256, 2048, 0.7),
    CandidateModel(2, 192, 256, 4096, 1.0),
    CandidateModel(4, 192, 256, 4096, 0.7),
    CandidateModel(4, 256, 256, 4096, 0.7),
    CandidateModel(6, 256, 256, 4096, 0.7),
    CandidateModel(6, 384, 256, 4096, 0.7),
    CandidateModel(8, 512, 256, 8192, 0.7),
    CandidateModel(12, 768, 256, 16_384, 0.7),
)

CPU = Estimates(
    max_tokens_per_pass=8192,  # more leave the caches
    compile_speedup=1.15,  # scripts/LOG.md: When does compiling pay on a CPU?
    compile_seconds=30,
    few_epochs=CPU_FEW_EPOCHS,
    many_epochs=CPU_MANY_EPOCHS,
)

# Its tiles multiply so fast that what compiling speeds up is a larger share of a step.
CPU_WITH_AMX = replace(CPU, compile_speedup=1.2, compile_seconds=12)

ACCELERATOR_MODELS = (
    CandidateModel(2, 128, 256, 4096, 1.8),
    CandidateModel(4, 192, 256, 4096, 1.8),
    CandidateModel(4, 256, 256, 8192, 1.8),
    CandidateModel(6, 384, 256, 8192, 1.8),
    CandidateModel(8, 512, 256, 16_384, 1.8),
    CandidateModel(12, 768, 256, 16_384, 1.8),
    CandidateModel(16, 1024, 256, 32_768, 1.8),
    CandidateModel(24, 1024, 256, 32_768, 1.8),
)

# Mostly not measured.
ACCELERATOR = Estimates(
    max_tokens_per_pass=None,
    compile_speedup=1.35,  # scripts/LOG.md: What does an H100 say?
    compile_seconds=20,
    few_epochs=ACCELERATOR_MODELS,
    many_epochs=ACCELERATOR_MODELS,
)


def get_estimates(device: torch.device) -> Estimates:
    if device.type != "cpu":
        return ACCELERATOR
    return CPU_WITH_AMX if torch.cpu._is_amx_tile_supported() else CPU
