"""Check that the compiled step computes the same as the model in torch, on a few tokens.

decode.cpp repeats what model/ says; when someone changes model/, it does not follow. So each model
is compared once, before the compiled step generates with it. The comparison is in float32, whatever
the precision of the weights: rounding inputs to 16 bits would hide small changes, and the paths of
bfloat16 and int8 differ from that of float32 in nothing but this rounding.

Letters: T tokens of a row, D width, V vocabulary.
"""

import ctypes
import threading
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gptmini.console import warn
from gptmini.generate.native.precision import create_cache
from gptmini.generate.native.step import NativeStep, UnexpectedShapeError
from gptmini.model.attention import KVCache
from gptmini.model.gpt import GPT
from gptmini.model.static_cache import StaticCache

TOKENS_PER_ROW = 2
# How long a context is compared. Attention to more positions would take most of the time.
MAX_POSITIONS = 512
# A share of the largest logit. In 600 random models, with weights up to 150 times as large as
# initial ones, rounding made at most 2e-5 of it; bfloat16 inputs would make 0.27, int8 ones 0.54.
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
    # Multiples of a large prime are spread over the vocabulary.
    tokens = torch.arange(2 * T).view(2, T) * 7919 % model.embed.num_embeddings  # (2, T)
    cache = _create_zero_cache(model, end)
    step = NativeStep(library, model, "float32", cache)
    rows = [0] * T + [1] * T
    positions = [*range(T), *range(start, end)]
    found = step(tokens.flatten().tolist(), rows, positions, [T - 1, 2 * T - 1])  # (2, V)

    config = model.config.model_copy(update={"context_length": end})
    zeros = StaticCache(config, 2, model.device, torch.float32, max_pass_tokens=T)
    is_token = torch.ones(2, T, dtype=torch.bool)
    cache = zeros.select(slice(0, 2), torch.tensor(positions).view(2, T), is_token, end)
    hidden = model.forward_hidden(tokens, cache)  # (2, T, D)
    expected = model.compute_logits(hidden[:, -1]).float()  # (2, V)
    return _compute_relative_difference(found, expected)


def _create_zero_cache(model: GPT, length: int) -> KVCache:
    """Create a cache of two rows and `length` positions, filled with zeros."""
    config = model.config.model_copy(update={"context_length": length})
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
