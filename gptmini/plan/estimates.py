"""Figures by which a run is planned, for each kind of device.

Those of a CPU were measured on one or two cores. Those of an accelerator are estimates.
"""

from dataclasses import dataclass
from typing import NamedTuple


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
    few_epochs, many_epochs: the models that `train.minutes` chooses from, small to large, by
    how often they read the text.
    """

    max_tokens_per_pass: int | None
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
    few_epochs=CPU_FEW_EPOCHS,
    many_epochs=CPU_MANY_EPOCHS,
)

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

ACCELERATOR = Estimates(
    max_tokens_per_pass=None, few_epochs=ACCELERATOR_MODELS, many_epochs=ACCELERATOR_MODELS
)
