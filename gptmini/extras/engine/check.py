"""Check that the compiled step computes the same as the model in torch, on a few tokens.

decode.cpp repeats what model/ says; when someone changes model/, it does not follow. So each model
is compared before the compiled step generates with it, twice:

- in float32, layer by layer, as rounding inputs to 16 bits would hide small changes;
- in the precision of the weights, which is other code, with a model in torch that rounds likewise.
  This code is the same for all layers, so one of each window is enough.

Copies of a whole model in float32 would take more memory than the generation. So both sides have
one layer at a time in float32, and the embeddings and logits of some tokens only.

Letters: T tokens of a row, V tokens of the vocabulary that are compared, D width.
"""

import copy
import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.config.settings import ModelConfig
from gptmini.console import warn
from gptmini.extras.engine.packing import AnyModule, copy_as, create_cache
from gptmini.extras.engine.step import NativeStep, UnexpectedModelError, check_layers, check_tensor
from gptmini.generate.precision import dequantize, round_matrix
from gptmini.model.attention import Attention
from gptmini.model.cache import LayerCache, StaticCache
from gptmini.model.gpt import GPT

TOKENS_PER_ROW = 2
# How long a context is compared. Attention to more positions would take most of the time.
MAX_POSITIONS = 512
# How many tokens of the vocabulary are compared, if it has as many. Each is a row of the head, and
# all rows are computed alike.
MAX_TOKENS = 1024
# A share of the largest logit: ten times what rounding makes of it (scripts/LOG.md: Which
# instructions carry the compiled engine?).
TOLERANCE = 2e-4
# Here both sides round. Inputs that sums in another order round the other way made up to 3e-3.
NARROW_TOLERANCE = 5e-3

# Models that a warning was about: weak references keep no model in memory.
_reported: WeakSet[GPT] = WeakSet()


def matches_torch(library: ctypes.CDLL, model: GPT, weights: str) -> bool:
    """Compare the compiled step with this model; warn if they differ, once per model."""
    with _evaluating(model):
        mismatch = _describe_mismatch(library, model, weights)
    if mismatch:
        warn_of_mismatch(model, mismatch)
    return mismatch is None


def warn_of_mismatch(model: GPT, mismatch: str) -> None:
    """Say, once per model, why PyTorch generates with it."""
    if model not in _reported:
        _reported.add(model)
        warn(f"compiled engine: cannot run this model ({mismatch}); using PyTorch, which is slower")


@contextmanager
def _evaluating(model: GPT) -> Iterator[None]:
    """Turn off dropout, in a model that is being trained too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _describe_mismatch(library: ctypes.CDLL, model: GPT, weights: str) -> str | None:
    """Say why the compiled step does not compute this model; None if it does."""
    try:
        difference = measure_difference(library, model)
        tolerance = TOLERANCE
        if difference <= tolerance and weights != "float32":
            difference, by_rounding = measure_narrow_difference(library, model, weights)
            tolerance = max(NARROW_TOLERANCE, by_rounding)
    except UnexpectedModelError as error:
        return str(error)
    except Exception:  # modules of your own may lack anything; PyTorch runs them all
        return "it has modules that the engine does not know"
    if not difference <= tolerance:  # NaN is no match either
        return f"logits differ by {difference:.2g} of the largest"
    return None


@torch.inference_mode()
def measure_difference(library: ctypes.CDLL, model: GPT) -> float:
    """Return how far the compiled logits are from torch's, as a share of the largest logit."""
    check_layers(model)  # both sides would leave out those that are missing
    reduced = _reduce(model, _BlocksInFloat32(model.blocks))
    found = _compute_compiled(library, reduced, "float32")  # (2, V)
    expected = _compute_in_torch(reduced)  # (2, V)
    return _compute_relative_difference(found, expected)


@torch.inference_mode()
def measure_narrow_difference(
    library: ctypes.CDLL, model: GPT, weights: str
) -> tuple[float, float]:
    """Return how far logits in bfloat16 or int8 are from torch's with inputs rounded likewise.

    The second number is what rounding explains of it: twice what it changes in torch. Where
    attention hangs on the last bits, as with weights that are far too large, that is a large share
    of the logits. A single key that the two sides round in opposite directions then moves them
    apart, one this way and one that.
    """
    reduced = _reduce_to_windows(model, weights)
    found = _compute_compiled(library, reduced, weights)  # (2, V)
    exact = _compute_in_torch(reduced)  # (2, V)
    _round_inputs(library, reduced, weights)
    expected = _compute_in_torch(reduced)  # (2, V)
    difference = _compute_relative_difference(found, expected)
    return difference, 2 * _compute_relative_difference(expected, exact)


def _list_positions(config: ModelConfig) -> Tensor:
    """List the positions (2, T) of the tokens that are compared.

    The first row of tokens begins the context. The second ends it, behind keys and values of zero,
    so that windows and long distances count too.
    """
    end = min(config.context_length, MAX_POSITIONS)
    T = min(TOKENS_PER_ROW, end)
    return torch.tensor([[*range(T)], [*range(end - T, end)]])


def _compute_in_torch(model: GPT) -> Tensor:
    """Compute the logits (2, V) of the last tokens of both rows as model/ says."""
    positions = _list_positions(model.config)  # (2, T)
    T = positions.shape[1]
    end = int(positions[1, -1]) + 1
    config = model.config.model_copy(update={"context_length": end})
    zeros = StaticCache(config, 2, model.device, torch.float32, max_pass_tokens=T)
    is_token = torch.ones(2, T, dtype=torch.bool)
    cache = zeros.select(slice(0, 2), positions, is_token, end)
    tokens = torch.arange(2 * T).view(2, T)
    hidden = model.forward_hidden(tokens, cache)  # (2, T, D)
    return model.compute_logits(hidden[:, -1]).float()  # (2, V)


def _reduce(model: GPT, blocks: nn.ModuleList) -> GPT:
    """Copy a model with these blocks and some tokens of its vocabulary, in float32.

    A vocabulary that is smaller than the number of tokens compared is repeated.
    """
    config = model.config
    n_vocabulary = config.vocab_size or 0
    n_tokens = max(2 * TOKENS_PER_ROW, min(n_vocabulary, MAX_TOKENS))
    # Multiples of a large prime are spread over the vocabulary.
    chosen = torch.arange(n_tokens) * 7919 % n_vocabulary  # (V,)

    def reduce_rows(table: AnyModule) -> AnyModule:
        assert isinstance(table.weight, Tensor)
        weight = dequantize(table, table.weight)
        check_tensor(weight, n_vocabulary, config.d_model)
        return _replace_parts(table, weight=_freeze(weight.detach()[chosen].float()))

    parts: dict[str, Any] = {
        "config": config.model_copy(update={"vocab_size": n_tokens}),
        "embed": reduce_rows(model.embed),
        "blocks": blocks,
    }
    if model.head is not None:
        parts["head"] = reduce_rows(model.head)
    return _replace_parts(model, **parts)


def _reduce_to_windows(model: GPT, weights: str) -> GPT:
    """Copy a model with one layer of each window, and matrices rounded to a precision."""
    config = model.config
    layer_by_window: dict[int | None, int] = {}
    for layer in range(config.n_layer):
        layer_by_window.setdefault(config.get_window(layer), layer)
    layers = sorted(layer_by_window.values())
    blocks = nn.ModuleList(copy_as(model.blocks[layer], torch.float32) for layer in layers)
    reduced = _reduce(model, blocks)
    reduced.config = _describe_layer(reduced.config, 0)
    if len(layers) == 2:  # one with a window, then one without
        attention = reduced.config.attention.model_copy(update={"full_every": 2})
        reduced.config = reduced.config.model_copy(update={"n_layer": 2, "attention": attention})
    # The head is rounded, the table that tokens are looked up in is not.
    head: Any = reduced.head or reduced.embed
    reduced.head = _replace_parts(head, weight=_freeze(round_matrix(head.weight, weights).float()))
    for module in blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight = _freeze(round_matrix(module.weight, weights).float())
    reduced.final_norm = copy_as(model.final_norm, torch.float32)
    return reduced


def _round_inputs(library: ctypes.CDLL, model: GPT, weights: str) -> None:
    """Let torch round what the compiled step rounds: inputs of products, keys and values.

    With int8, inputs are rounded to int16. That is fine, but keys and values that it moves across
    the middle of two bfloat16 numbers are rounded the other way. Where AMX attends, it rounds
    queries and the weights of the values.
    """
    round_input = _round_to_int16 if weights == "int8" else _narrow

    def narrow_keys_and_values(
        project: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Callable[..., Any]:
        def project_narrow(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = project(*inputs)
            return q, _narrow(k), _narrow(v)

        return project_narrow

    for block in model.blocks:
        attn: Any = block.attn
        attn.project_qkv = narrow_keys_and_values(attn.project_qkv)
        if library.gptmini_attends_by_tiles():
            attn.mix = functools.partial(_mix_narrow, attn)
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (round_input(inputs[0]),))
    model.final_norm.register_forward_hook(lambda _, __, hidden: round_input(hidden))


def _narrow(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _round_to_int16(x: Tensor) -> Tensor:
    """Round the inputs (..., D) of products to int16, one scale a token, as product.h does."""
    sizes = x.abs()  # (..., D)
    scale = torch.maximum(sizes.amax(-1) / 32767, sizes.sum(-1) / 16e6)  # (...)
    scale = scale.clamp(min=1e-30)[..., None]  # (..., 1)
    return (x / scale).round() * scale  # (..., D)


def _mix_narrow(attn: Attention, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
    """Compute `Attention.mix` with queries and weights rounded too; (B, H, T, K)."""
    queries = cache.next_positions(q.shape[2])  # (B, T)
    k, v, keys = cache.update(k, v)  # (B, G, S, K) twice, (B, S)
    mask = attn.mask(queries, keys, {})  # (B, 1, T, S) or (B, H, T, S)
    assert mask is not None
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)  # (B, H, S, K)
    v = v.repeat_interleave(group, dim=1)  # (B, H, S, K)
    bias = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
    scores = _narrow(q * attn.head_dim**-0.5) @ k.transpose(-1, -2) + bias  # (B, H, T, S)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return _narrow(weights) @ v / weights.sum(-1, keepdim=True)


class _BlocksInFloat32(nn.ModuleList):
    """Blocks in float32: one of another type is copied while it is looked at."""

    def __iter__(self) -> Iterator[nn.Module]:
        for block in super().__iter__():
            is_wide = all(weight.dtype == torch.float32 for weight in block.parameters())
            yield block if is_wide else copy_as(block, torch.float32)


def _compute_compiled(library: ctypes.CDLL, model: GPT, weights: str) -> Tensor:
    """Compute the logits (2, V) of the last tokens of both rows, one layer after the other.

    Each layer is a model of its own, whose embeddings are what the layer before it has computed.
    """
    positions = _list_positions(model.config)  # (2, T)
    T = positions.shape[1]
    end = int(positions[1, -1]) + 1
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
        shortened = config.model_copy(update={"context_length": end})
        cache = create_cache(shortened, weights, 2, TOKENS_PER_ROW)
        step = NativeStep(library, layer, weights, cache)
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


def _compute_relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest logit.

    Logits that overflow in both do not count: they are reported elsewhere.
    """
    finite = expected.isfinite()
    if found[~finite].isfinite().any():
        return math.inf
    if not finite.any():
        return 0.0
    largest_difference = (found - expected)[finite].abs().max()
    return float(largest_difference / expected[finite].abs().max())
