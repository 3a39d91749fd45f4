"""Round weights to a precision, and lay weights and keys out as the compiled step reads them."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.model.cache import LayerCache
from gptmini.model.gpt import GPT

PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
# As in product.h: widths are padded to a multiple of ROW_ALIGNMENT, a vector has LANES floats.
ROW_ALIGNMENT = 64
LANES = 16
CACHE_ALIGNMENT = 32  # as in attention.h

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights (N, K) to int8 with one scale per row (N,); each row's largest is 127."""
    integers = weights.new_empty(weights.shape, dtype=torch.int8)  # (N, K)
    scales = weights.new_empty(len(weights), dtype=torch.float32)  # (N,)
    # In slices, as the float copies of a whole vocabulary would set the peak of memory.
    for part, result, scale in zip(
        weights.split(1024), integers.split(1024), scales.split(1024), strict=True
    ):
        rows = part.float()  # (rows, K)
        scale.copy_(rows.abs().amax(dim=1).clamp(min=1e-30) / 127)  # (rows,)
        result.copy_((rows / scale[:, None]).round())
    return integers, scales


def round_matrix(weights: Tensor, precision: str) -> Tensor:
    """Round a matrix (N, K) to a precision, or for int8 to the float32 that it stands for."""
    if precision == "int8":
        integers, scales = quantize(weights)
        return integers.float().mul_(scales[:, None])
    return weights.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)


def round_weights(model: GPT, precision: str) -> None:
    """Round every matrix to a precision, one after the other.

    They are stored in it, as the compiled step needs no others; `widen_weights` makes the model one
    that torch computes. All other weights become float32. So does the table of embeddings with
    int8, after rounding: the compiled step takes its inputs from it.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weights = parameter.detach()
            if name != "weight" or not (isinstance(module, nn.Linear) or module is model.embed):
                rounded = weights.float()
            elif precision == "int8" and module is not model.embed:
                rounded, module.scales = quantize(weights)  # (N, K) and (N,), for `dequantize`
            else:
                rounded = round_matrix(weights, precision)
            is_trainable = rounded.is_floating_point()
            setattr(module, name, nn.Parameter(rounded, requires_grad=is_trainable))


def dequantize(module: nn.Module, weights: Tensor) -> Tensor:
    """Return weights of a module as they are, or those in int8 as the float32 they stand for."""
    if weights.dtype != torch.int8:
        return weights
    scales = module.scales  # (N,)
    assert isinstance(scales, Tensor)
    return weights.float().mul_(scales[:, None])  # `*` would hold another float copy


def iter_weights(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model by name as they are, or those in int8 in float32."""
    for name, weights in model.state_dict().items():
        yield name, dequantize(model.get_submodule(name.rpartition(".")[0]), weights)


def widen_weights(model: GPT) -> None:
    """Store every weight of a model as float32, in place and without rounding."""
    with torch.inference_mode(False):  # which may be on, and would make weights without gradients
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != torch.float32:
                    wide = dequantize(module, parameter.detach()).float()
                    setattr(module, name, nn.Parameter(wide))


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
    matrices = [dequantize(module, module.weight.detach()) for module in modules]
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
    scales = None
    if precision == "bfloat16":
        weights = weights.bfloat16()
    else:
        weights, scales = quantize(weights)
        scales = functional.pad(scales, (0, missing_rows))
    if bias is not None:
        bias = functional.pad(bias, (0, missing_rows))
    weights = pad_with_zeros(weights, missing_rows, missing_columns)
    rows, columns = weights.shape
    # A word of 32 bits holds 2 columns of a row in bfloat16, 4 in int8.
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
        # Zeros from the system cost nothing until they are used.
        keys = torch.zeros(shape, dtype=dtype)
        values = torch.zeros(shape, dtype=dtype)
        layers.append(LayerCache(keys, values))
    return layers
