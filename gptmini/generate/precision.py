"""How weights are stored: rounded to a precision, and packed for decode.cpp."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.model.gpt import GPT

PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
COLUMNS, LANES = 64, 16  # as in decode.cpp


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (N, K) as int8 with one scale per row (N,), so that each row's largest is 127."""
    scales = weights.abs().amax(dim=1).clamp(min=1e-30) / 127  # (N,)
    return (weights / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def round_weights(model: GPT, precision: str) -> None:
    """Round every matrix in place to that precision, stored as float32: torch computes the same."""
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.embed:
            if precision == "bfloat16":
                module.weight.copy_(module.weight.bfloat16())
            elif precision == "int8":
                integers, scales = quantize(module.weight)
                module.weight.copy_(integers * scales[:, None])


# The first module of each matrix: its words, scales and bias, and how many rows and columns.
Packed = dict[nn.Module, tuple[list[Tensor | None], int, int]]


def pack(
    modules: Sequence[nn.Linear | nn.Embedding], precision: str
) -> tuple[list[Tensor | None], int, int]:
    """Modules with the same input as one matrix, in the layout that decode.cpp reads."""
    parts = [dict(module.named_parameters()) for module in modules]
    matrices = [part["weight"].detach() for part in parts]
    weights = torch.cat(matrices) if len(matrices) > 1 else matrices[0]  # (rows, columns)
    bias = torch.cat([part["bias"].detach() for part in parts]) if "bias" in parts[0] else None
    if missing := -weights.shape[1] % COLUMNS:
        weights = functional.pad(weights, (0, missing))
    rows, columns = weights.shape
    scales = None
    if precision == "bfloat16":
        weights = weights.bfloat16()
    elif precision == "int8":
        weights, scales = quantize(weights)
    # Interleave: a 32-bit word holds columns i, i + 16 (, i + 32, i + 48) of its block, so that
    # one shift of a vector of words widens 16 neighboring columns.
    per_word = 4 // weights.element_size()
    words = weights.view(rows, -1, per_word, LANES).transpose(2, 3).contiguous()
    return [words, scales, bias], rows, columns
