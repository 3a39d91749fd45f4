"""Check that the compiled step computes the same as the model in torch, on a few tokens.

decode.cpp repeats what model/ says; when someone changes model/, it does not follow. So each model
is compared once, before the compiled step generates with it. The comparison is in float32, whatever
the precision of the weights: rounding inputs to 16 bits would hide small changes, and the paths of
bfloat16 and int8 differ from that of float32 in nothing but this rounding.

Copies of a whole model in float32 would take more memory than the generation. So both sides have
one layer at a time in float32, and the embeddings and logits of some tokens only.

Letters: T tokens of a row, V tokens of the vocabulary that are compared, D width.
"""

import copy
import ctypes
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.console import warn
from gptmini.generate.native.precision import AnyModule, copy_as, create_cache
from gptmini.generate.native.step import NativeStep, UnexpectedShapeError, check_shape
from gptmini.model.cache import KVCache, StaticCache
from gptmini.model.gpt import GPT

TOKENS_PER_ROW = 2
# How long a context is compared. Attention to more positions would take most of the time.
MAX_POSITIONS = 512
# How many tokens of the vocabulary are compared, if it has as many. Each is a row of the head, and
# all rows are computed alike.
MAX_TOKENS = 1024
# A share of the largest logit: ten times what rounding makes of it (scripts/LOG.md, 2026-11-22).
TOLERANCE = 2e-4

# What was found, for as long as the model lives: a weak reference keeps no model in memory.
_matches: WeakKeyDictionary[GPT, bool] = WeakKeyDictionary()
_lock = threading.Lock()  # threads may share a model, and one comparison is enough


def matches_torch(library: ctypes.CDLL, model: GPT) -> bool:
    """Compare the compiled step with this model, once per model; warn if they differ."""
    with _lock:
        if model not in _matches:
            mismatch = _describe_mismatch(library, model)
            _matches[model] = mismatch is None
            if mismatch:
                warn(
                    f"compiled engine: does not compute this model ({mismatch}), as after a "
                    "change in gptmini/model; generating with PyTorch, which is slower"
                )
        return _matches[model]


def _describe_mismatch(library: ctypes.CDLL, model: GPT) -> str | None:
    """Say why the compiled step does not compute this model; None if it does."""
    try:
        difference = measure_difference(library, model)
    except UnexpectedShapeError as error:
        return str(error)
    if not difference <= TOLERANCE:  # NaN is no match either
        return f"logits differ by {difference:.2g} of the largest"
    return None


@torch.inference_mode()
def measure_difference(library: ctypes.CDLL, model: GPT) -> float:
    """Return how far the compiled logits are from torch's, as a share of the largest logit.

    The first row of tokens begins the context. The second ends it, behind keys and values of zero,
    so that windows and long distances count too.
    """
    end = min(model.config.context_length, MAX_POSITIONS)
    T = min(TOKENS_PER_ROW, end)
    start = end - T
    positions = torch.tensor([[*range(T)], [*range(start, end)]])  # (2, T)
    model = _reduce(model, 2 * T)
    found = _compute_compiled(library, model, positions, end)  # (2, V)

    config = model.config.model_copy(update={"context_length": end})
    zeros = StaticCache(config, 2, model.device, torch.float32, max_pass_tokens=T)
    is_token = torch.ones(2, T, dtype=torch.bool)
    cache = zeros.select(slice(0, 2), positions, is_token, end)
    tokens = torch.arange(2 * T).view(2, T)
    hidden = model.forward_hidden(tokens, cache)  # (2, T, D)
    expected = model.compute_logits(hidden[:, -1]).float()  # (2, V)
    return _compute_relative_difference(found, expected)


def _reduce(model: GPT, min_tokens: int) -> GPT:
    """Reduce a model to some tokens of its vocabulary; its layers become float32 as they are used.

    A smaller vocabulary than `min_tokens` is repeated.
    """
    config = model.config
    n_vocabulary = config.vocab_size or 0
    n_tokens = max(min_tokens, min(n_vocabulary, MAX_TOKENS))
    # Multiples of a large prime are spread over the vocabulary.
    chosen = torch.arange(n_tokens) * 7919 % n_vocabulary  # (V,)

    def reduce_rows(table: AnyModule) -> AnyModule:
        weight = table.weight
        assert isinstance(weight, Tensor)
        check_shape(weight, n_vocabulary, config.d_model)
        return _replace_parts(table, weight=_freeze(weight.detach()[chosen].float()))

    parts: dict[str, Any] = {
        "config": config.model_copy(update={"vocab_size": n_tokens}),
        "embed": reduce_rows(model.embed),
        "blocks": _BlocksInFloat32(model.blocks),
    }
    if model.head is not None:
        parts["head"] = reduce_rows(model.head)
    return _replace_parts(model, **parts)


class _BlocksInFloat32(nn.ModuleList):
    """Blocks of which those that are not in float32 are copied to it while they are looked at."""

    def __iter__(self) -> Iterator[nn.Module]:
        for block in super().__iter__():
            is_wide = all(weight.dtype == torch.float32 for weight in block.parameters())
            yield block if is_wide else copy_as(block, torch.float32)


def _compute_compiled(library: ctypes.CDLL, model: GPT, positions: Tensor, end: int) -> Tensor:
    """Compute the logits (2, V) of the last tokens of both rows, one layer after the other.

    Each layer is a model of its own, whose embeddings are what the layer before it has computed.
    """
    T = positions.shape[1]
    tokens = [*range(2 * T)]
    rows = [0] * T + [1] * T
    embed = model.embed
    learned = model.positions
    logits = torch.empty(0)
    for number, block in enumerate(model.blocks):
        config = _describe_layer(model.config, number)
        layer = _replace_parts(
            model,
            config=config,
            embed=embed,
            positions=learned,
            blocks=nn.ModuleList([block]),
            head=model.head or model.embed,
        )
        step = NativeStep(library, layer, "float32", _create_zero_cache(config, end))
        logits = step(tokens, rows, positions.flatten().tolist(), [T - 1, 2 * T - 1])  # (2, V)
        hidden = step.x[: 2 * T, : config.d_model]  # (2 T, D)
        missing = model.embed.weight.shape[0] - 2 * T
        embed = _replace_parts(embed, weight=_freeze(functional.pad(hidden, (0, 0, 0, missing))))
        learned = None  # added before the first layer
    return logits


def _describe_layer(config: ModelConfig, number: int) -> ModelConfig:
    """Return the configuration of a model that has this layer alone."""
    changes = {"window": config.get_window(number), "full_every": None}
    attention = config.attention.model_copy(update=changes)
    return config.model_copy(update={"n_layer": 1, "attention": attention})


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _replace_parts(module: AnyModule, **parts: Any) -> AnyModule:
    """Copy a module with other parts; the copy shares all the rest with it."""
    copied = copy.copy(module)
    copied._parameters = dict(module._parameters)
    copied._modules = dict(module._modules)
    for name, part in parts.items():
        setattr(copied, name, part)
    return copied


def _create_zero_cache(config: ModelConfig, length: int) -> KVCache:
    """Create a cache of two rows and `length` positions, filled with zeros."""
    config = config.model_copy(update={"context_length": length})
    cache = create_cache(config, "float32", 2, TOKENS_PER_ROW)
    for layer in cache.layers:
        # torch.zeros gets pages from the system that are zero already, and costs nothing until
        # they are used; filling the present tensors would touch every page.
        layer.keys = torch.zeros_like(layer.keys)
        layer.values = torch.zeros_like(layer.values)
    return cache


def _compute_relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest logit.

    Logits that overflow in torch too do not count: they are reported elsewhere.
    """
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    largest_difference = (found - expected)[finite].abs().max()
    return float(largest_difference / expected[finite].abs().max())
