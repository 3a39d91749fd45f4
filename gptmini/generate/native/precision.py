"""Round weights to a precision, and lay weights and keys out as the compiled step reads them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.model.attention import KVCache, LayerCache
from gptmini.model.gpt import GPT

PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
# As in product.h: widths are padded to a multiple of ROW_ALIGNMENT, a vector has LANES floats.
ROW_ALIGNMENT = 64
LANES = 16


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights (N, K) to int8 with one scale per row (N,); each row's largest is 127."""
    integers = []
    scales = []
    # In slices, as the float copies of a whole vocabulary would set the peak of memory.
    for rows in weights.split(1024):
        scale = rows.abs().amax(dim=1).clamp(min=1e-30) / 127  # (rows,)
        scales.append(scale)
        integers.append((rows / scale[:, None]).round().to(torch.int8))
    return torch.cat(integers), torch.cat(scales)


@torch.no_grad()
def round_weights(model: GPT, precision: str) -> None:
    """Round every matrix in place to a precision.

    The rounded values are stored as float32, so torch computes with the same weights.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.embed:
            if precision == "bfloat16":
                module.weight.copy_(module.weight.bfloat16())
            elif precision == "int8":
                integers, scales = quantize(module.weight)
                module.weight.copy_(integers * scales[:, None])


def copy_to_bfloat16(model: GPT) -> GPT:
    """Copy a model with all parameters in bfloat16; angles of rotary positions stay in float32."""
    replaced: dict[int, Any] = {}
    for parameter in model.parameters():
        narrow = nn.Parameter(parameter.detach().bfloat16(), requires_grad=False)
        replaced[id(parameter)] = narrow  # so that deepcopy takes it for the copy
    return copy.deepcopy(model, replaced)


def round_up(width: int, multiple: int = ROW_ALIGNMENT) -> int:
    """Round up to a multiple."""
    return -(-width // multiple) * multiple


def pad_with_zeros(weights: Tensor, rows: int, columns: int) -> Tensor:
    """Append rows and columns of zeros; without any, return `weights` itself, not a copy."""
    if not rows and not columns:
        return weights
    return functional.pad(weights, (0, columns, 0, rows))


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix in the layout that `Matrix` in product.h describes."""

    data: Tensor
    scales: Tensor | None  # (rows,), for int8
    bias: Tensor | None  # (rows,)
    rows: int
    columns: int


# Each matrix under the first of the modules that it consists of.
PackedMatrices = dict[nn.Module, PackedMatrix]


def pack(modules: Sequence[nn.Linear | nn.Embedding], precision: str) -> PackedMatrix:
    """Pack modules with the same input into one matrix, their outputs one behind the other."""
    parameters = [dict(module.named_parameters()) for module in modules]
    matrices = [each["weight"].detach() for each in parameters]
    weights = torch.cat(matrices) if len(matrices) > 1 else matrices[0]  # (rows, columns)
    bias = None
    if "bias" in parameters[0]:
        bias = torch.cat([each["bias"].detach() for each in parameters])  # (rows,)
    missing_rows = -weights.shape[0] % ROW_ALIGNMENT
    missing_columns = -weights.shape[1] % ROW_ALIGNMENT
    if precision == "float32":  # plain rows
        weights = pad_with_zeros(weights, 0, missing_columns)
        rows, columns = weights.shape
        return PackedMatrix(weights, None, bias, rows, columns)
    weights = pad_with_zeros(weights, missing_rows, missing_columns)
    rows, columns = weights.shape
    if bias is not None:
        bias = functional.pad(bias, (0, missing_rows))
    # A word of 32 bits holds 2 columns of a row in bfloat16, 4 in int8.
    if precision == "bfloat16":
        scales = None
        words = weights.bfloat16().view(rows, -1, 2)  # (rows, words, columns of a word)
    else:
        integers, scales = quantize(weights)
        words = integers.view(rows, -1, 4)  # (rows, words, columns of a word)
        # product.h extracts bytes 0 and 2 of a word with one shift, then 1 and 3. Put columns 0
        # and 1 into the first two, columns 2 and 3 into the others.
        words = words[:, :, [0, 2, 1, 3]]
    # Panels of LANES rows: the words of the same columns of all its rows lie side by side, so that
    # a vector of words is one load.
    panels = words.view(rows // LANES, LANES, *words.shape[1:]).transpose(1, 2).contiguous()
    return PackedMatrix(panels, scales, bias, rows, columns)


def create_cache(config: ModelConfig, precision: str, n_rows: int, spare_positions: int) -> KVCache:
    """Create an empty cache for the compiled step.

    Windowed layers store `spare_positions` more than their window. With float32 weights, torch can
    fill the cache too. Otherwise keys and values are bfloat16, positions and head size are padded
    to whole vectors, and keys lie in blocks as attention.h describes.
    """
    cache = KVCache(config, n_rows, torch.device("cpu"), torch.float32, spare_positions)
    if precision == "float32":
        return cache
    head_dim = round_up(config.head_dim, LANES)
    for number, layer in enumerate(cache.layers):
        shape = (n_rows, config.n_kv_head, round_up(layer.size, LANES), head_dim)
        keys = torch.empty(shape, dtype=torch.bfloat16)
        values = torch.empty(shape, dtype=torch.bfloat16)
        cache.layers[number] = LayerCache(keys, values)
    return cache
