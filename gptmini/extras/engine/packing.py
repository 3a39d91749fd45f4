"""Lay weights and keys out as the compiled step reads them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.generate.precision import dequantize, quantize
from gptmini.model.cache import LayerCache

# As in product.h: widths are padded to a multiple of ROW_ALIGNMENT, a vector has LANES floats.
ROW_ALIGNMENT = 64
LANES = 16
CACHE_ALIGNMENT = 32  # as in attention.h

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_as(module: AnyModule, dtype: torch.dtype) -> AnyModule:
    """Copy a module with all parameters in a type; those that have it already are shared.

    Rotary angles are buffers, not parameters, and stay in float32.
    """
    replaced: dict[int, Any] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            converted = dequantize(part, parameter.detach()).to(dtype)
            # So that deepcopy takes it for the copy.
            replaced[id(parameter)] = nn.Parameter(converted, requires_grad=False)
    return copy.deepcopy(module, replaced)


def round_up(width: int, multiple: int = ROW_ALIGNMENT) -> int:
    """Round up to a multiple."""
    return -(-width // multiple) * multiple


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
    matrices = [dequantize(module, module.weight.detach()) for module in modules]
    weights = torch.cat(matrices) if len(matrices) > 1 else matrices[0]  # (rows, columns)
    bias = None
    if "bias" in parameters[0]:
        bias = torch.cat([each["bias"].detach().float() for each in parameters])  # (rows,)
    missing_rows = -weights.shape[0] % ROW_ALIGNMENT
    missing_columns = -weights.shape[1] % ROW_ALIGNMENT
    scales = None
    if precision == "int8":
        weights, scales = quantize(weights)
        scales = functional.pad(scales, (0, missing_rows))
    else:
        weights = weights.to(getattr(torch, precision))
    if bias is not None:
        bias = functional.pad(bias, (0, missing_rows))
    weights = functional.pad(weights, (0, missing_columns, 0, missing_rows))
    rows, columns = weights.shape
    # A word of 32 bits holds a column of a row in float32, 2 in bfloat16, 4 in int8.
    words = weights.view(rows, -1, 4 // weights.itemsize)  # (rows, words, columns of a word)
    if precision == "int8":
        # product.h extracts bytes 0 and 2 of a word with one shift, then 1 and 3. Put columns 0
        # and 1 into the first two, columns 2 and 3 into the others.
        words = words.view(rows, -1, 2, 2).transpose(2, 3)
    # Panels of LANES rows: the words of the same columns of all its rows lie side by side, so that
    # a vector of words is one load.
    panels = words.view(rows // LANES, LANES, *words.shape[1:]).transpose(1, 2).contiguous()
    return PackedMatrix(panels, scales, bias, rows, columns)


def create_cache(
    config: ModelConfig, precision: str, n_rows: int, spare_positions: int
) -> list[LayerCache]:
    """Create an empty cache for the compiled step, as attention.h describes it, layer by layer.

    Windowed layers store `spare_positions` more than their window. Keys and values are bfloat16,
    unless the weights are float32. Positions and head size are padded to whole blocks.
    """
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    head_dim = round_up(config.head_dim, CACHE_ALIGNMENT)
    layers = []
    for number in range(config.n_layer):
        size = min(config.get_cache_length(number) + spare_positions, config.context_length)
        shape = (n_rows, config.n_kv_head, round_up(size, CACHE_ALIGNMENT), head_dim)
        layers.append(LayerCache(create_zeros(shape, dtype), create_zeros(shape, dtype)))
    return layers


def create_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Create zeros that take memory only where they are used, which torch.zeros writes at once."""
    as_bytes = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(as_bytes).view(dtype)
