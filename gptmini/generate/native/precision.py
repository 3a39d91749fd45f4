"""Round weights to a precision, and lay weights and keys out as the compiled step reads them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.model.cache import KVCache, LayerCache
from gptmini.model.gpt import GPT

PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
# As in product.h: widths are padded to a multiple of ROW_ALIGNMENT, a vector has LANES floats.
ROW_ALIGNMENT = 64
LANES = 16

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights (N, K) to int8 with one scale per row (N,); each row's largest is 127."""
    integers = []
    scales = []
    # In slices, as the float copies of a whole vocabulary would set the peak of memory.
    for part in weights.split(1024):
        rows = part.float()  # (rows, K)
        scale = rows.abs().amax(dim=1).clamp(min=1e-30) / 127  # (rows,)
        scales.append(scale)
        integers.append((rows / scale[:, None]).round().to(torch.int8))
    return torch.cat(integers), torch.cat(scales)


def round_matrix(weights: Tensor, precision: str) -> Tensor:
    """Round a matrix (N, K) to a precision; one in int8 is returned as the float32 it stands for.

    The result is a copy, also of the same type: the bytes of a file lie at any address, and the
    last bits of torch's products depend on it.
    """
    if precision == "int8":
        integers, scales = quantize(weights)
        return integers * scales[:, None]
    return weights.to(torch.bfloat16 if precision == "bfloat16" else torch.float32, copy=True)


def round_weights(model: GPT, precision: str) -> None:
    """Round every matrix to a precision, one after the other.

    Those in bfloat16 are stored in it, as the compiled step needs no others; `widen_weights` makes
    the model one that torch computes. All other weights become float32, those of int8 after
    rounding.
    """
    for module in model.modules():
        is_matrix = isinstance(module, nn.Linear) or module is model.embed
        for name, parameter in module.named_parameters(recurse=False):
            is_rounded = is_matrix and name == "weight"
            rounded = round_matrix(parameter.detach(), precision if is_rounded else "float32")
            setattr(module, name, nn.Parameter(rounded))


def widen_weights(model: GPT) -> None:
    """Store every weight of a model as float32, in place and without rounding."""
    with torch.inference_mode(False):  # which may be on, and would make weights without gradients
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != torch.float32:
                    setattr(module, name, nn.Parameter(parameter.detach().float()))


def copy_as(module: AnyModule, dtype: torch.dtype) -> AnyModule:
    """Copy a module with all parameters in a type; those that have it already are shared.

    Rotary angles are buffers, not parameters, and stay in float32.
    """
    replaced: dict[int, Any] = {}
    for parameter in module.parameters():
        converted = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        replaced[id(parameter)] = converted  # so that deepcopy takes it for the copy
    return copy.deepcopy(module, replaced)


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
        bias = torch.cat([each["bias"].detach().float() for each in parameters])  # (rows,)
    missing_rows = -weights.shape[0] % ROW_ALIGNMENT
    missing_columns = -weights.shape[1] % ROW_ALIGNMENT
    if precision == "float32":  # plain rows
        weights = pad_with_zeros(weights.float(), 0, missing_columns)
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
