"""Whether the compiled step computes the model as it is: both read a few tokens.

decode.cpp repeats what model/ says, and cannot follow someone who changes model/. So each model is
compared once before the compiled step generates with it, in float32 whatever the precision of its
weights: rounding inputs to 16 bits would hide a small change, and those two paths differ from the
float32 one in nothing else.

Letters: T tokens of a row, V vocabulary.
"""

import ctypes
import threading
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gptmini.console import warn
from gptmini.generate.precision import cache_of
from gptmini.generate.step import NativeStep
from gptmini.model.attention import KVCache
from gptmini.model.gpt import GPT

TOKENS = 2  # of each of the two rows
FARTHEST = 512  # positions that are looked at: attention to more would take most of the time
# Of the largest logit. In 600 random models, with weights up to 150 times as large as initial ones,
# rounding made at most 2e-5 of it; bfloat16 inputs would make 0.27, int8 ones 0.54.
TOLERANCE = 2e-4

_verdicts: WeakKeyDictionary[GPT, bool] = WeakKeyDictionary()
_lock = threading.Lock()


def computes(library: ctypes.CDLL, model: GPT) -> bool:
    """Whether the compiled step computes this model; a warning if not. Compared once per model."""
    with _lock:  # threads may share a run
        if model not in _verdicts:
            off = difference(library, model)
            _verdicts[model] = off <= TOLERANCE
            if off > TOLERANCE:
                warn(
                    f"compiled engine: does not compute this model (logits differ by {off:.2g} of "
                    "the largest), as after a change in gptmini/model; generating with PyTorch, "
                    "which is slower"
                )
        return _verdicts[model]


@torch.inference_mode()
def difference(library: ctypes.CDLL, model: GPT) -> float:
    """The largest difference of the compiled step's logits from torch's, as a share of the largest.

    One row of tokens begins the context. The other ends it, behind keys and values of zero, so that
    windows and long distances count too. torch takes both as one batch, the first padded.
    """
    end = min(model.config.context_length, FARTHEST)
    T = min(TOKENS, end)
    start = end - T
    tokens = torch.arange(2 * T).view(2, T) * 7919 % model.embed.num_embeddings  # (2, T)
    cache = _zeros(model, end)
    step = NativeStep(library, model, "float32", cache)
    rows = [0] * T + [1] * T
    positions = [*range(T), *range(start, end)]
    found = step(tokens.flatten().tolist(), rows, positions, [T - 1, 2 * T - 1])  # (2, V)

    cache = _zeros(model, end)
    cache.truncate(start)
    hidden = model.hidden(tokens, cache, torch.tensor([start, 0]))  # (2, T, D)
    expected = model.logits(hidden[:, -1]).float()  # (2, V)
    return _distance(found, expected)


def _zeros(model: GPT, length: int) -> KVCache:
    """A cache of two rows for this many positions, all zero."""
    config = model.config.model_copy(update={"context_length": length})
    cache = cache_of(config, "float32", 2, TOKENS)
    for layer in cache.layers:
        # Fresh memory is zero already, and takes no time until it is used.
        layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
    return cache


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest; 0 where the model itself overflows."""
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    return float((found - expected)[finite].abs().max() / expected[finite].abs().max())
