"""How weights and keys are stored: rounded to a precision, in the layouts of the compiled step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.model.attention import KVCache, LayerCache
from gptmini.model.gpt import GPT

PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
ROW_ALIGNMENT, LANES = 64, 16  # as in product.h


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (N, K) as int8 with one scale per row (N,), so that each row's largest is 127."""
    integers, scales = [], []
    for rows in weights.split(1024):  # all of a vocabulary's rows would take the most memory
        scales.append(rows.abs().amax(dim=1).clamp(min=1e-30) / 127)
        integers.append((rows / scales[-1][:, None]).round().to(torch.int8))
    return torch.cat(integers), torch.cat(scales)


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


def round_up(width: int, multiple: int = ROW_ALIGNMENT) -> int:
    return -(-width // multiple) * multiple


def pad_with_zeros(weights: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Weights with zeros below and beside them; no copy of those that need none."""
    return functional.pad(weights, (0, columns, 0, rows)) if rows or columns else weights


# The first module of each matrix: its words, scales and bias, and how many rows and columns.
PackedMatrices = dict[nn.Module, tuple[list[Tensor | None], int, int]]


def pack(
    modules: Sequence[nn.Linear | nn.Embedding], precision: str
) -> tuple[list[Tensor | None], int, int]:
    """Modules with the same input as one matrix, in the layout that product.h reads."""
    parts = [dict(module.named_parameters()) for module in modules]
    matrices = [part["weight"].detach() for part in parts]
    weights = torch.cat(matrices) if len(matrices) > 1 else matrices[0]  # (rows, columns)
    bias = torch.cat([part["bias"].detach() for part in parts]) if "bias" in parts[0] else None
    if precision == "float32":
        weights = pad_with_zeros(weights, columns=-weights.shape[1] % ROW_ALIGNMENT)
        return [weights, None, bias], *weights.shape
    missing = -weights.shape[0] % ROW_ALIGNMENT
    weights = pad_with_zeros(weights, missing, -weights.shape[1] % ROW_ALIGNMENT)
    rows, columns = weights.shape
    bias = None if bias is None else functional.pad(bias, (0, missing))
    scales = None
    words = weights.bfloat16().view(rows, -1, 2)  # (rows, words, columns of a word)
    if precision == "int8":
        integers, scales = quantize(weights)
        # product.h widens columns 0 and 1 of a word by one shift, then 2 and 3.
        words = integers.view(rows, -1, 4)[:, :, [0, 2, 1, 3]]
    # Panels of 16 rows: a vector of words holds the same columns of all of them.
    panels = words.view(rows // LANES, LANES, *words.shape[1:]).transpose(1, 2).contiguous()
    return [panels, scales, bias], rows, columns


def create_cache(config: ModelConfig, precision: str, n_rows: int, spare_positions: int) -> KVCache:
    """An empty cache for the compiled step, whose windowed layers store `spare_positions` positions more.

    torch can fill it too if weights are float32. Else keys and values are bfloat16, positions and
    head size padded to whole vectors, and keys lie in blocks, as attention.h says.
    """
    cache = KVCache(config, n_rows, torch.device("cpu"), torch.float32, spare_positions)
    if precision != "float32":
        head_dim = round_up(config.head_dim, LANES)
        for number, layer in enumerate(cache.layers):
            shape = (n_rows, config.n_kv_head, round_up(layer.size, LANES), head_dim)
            memory = torch.empty(2, *shape, dtype=torch.bfloat16)
            cache.layers[number] = LayerCache(memory[0], memory[1])
    return cache
