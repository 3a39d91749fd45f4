"""From logits to a token: what may be drawn, how likely, and the draw itself.

In this order: bias and bans, penalties, temperature, top-k, top-p, min-p. A draw is a pure function
of logits, settings and one number, which is one of the seed, the row and the place in its text: so
a row draws the same in every batch, and a guessed token is right exactly if it is drawn.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import CheckpointError, ConfigError

Probabilities = np.ndarray[tuple[int], np.dtype[np.float64]]


def uniform(seed: int, row: int, place: int) -> float:
    """A number in [0, 1), the same for the same three on every machine."""
    digest = hashlib.blake2b(f"{seed} {row} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53


def choose(logits: Tensor, sample: SampleConfig, number: float) -> int:
    """The token that a number in [0, 1) draws from logits (V,); temperature 0 takes the likeliest.

    ConfigError if nothing is left to draw.
    """
    if sample.temperature == 0:
        token = int(logits.argmax())
        if logits[token] > -torch.inf:
            return token
        raise ConfigError("sample.ban: nothing is left to draw; ban less")
    tokens, weights = probabilities(logits, sample)
    sums = weights.cumsum()
    place = int(sums.searchsorted(number * sums[-1], side="right"))
    return place if tokens is None else int(tokens[place])


def probabilities(logits: Tensor, sample: SampleConfig) -> tuple[Tensor | None, Probabilities]:
    """Logits (V,) to the tokens that are left, likeliest first, and their weights.

    The weights sum to anything; without top-k and top-p all tokens are there, as None, in order.
    Top-p keeps the smallest set of likeliest tokens that holds at least that much probability
    (Holtzman et al. 2020), min-p those at least so likely as the likeliest times it (Nguyen et al.
    2024). Among equal logits at the border of top-k the choice is torch's.
    """
    tokens = None
    if sample.top_k is not None and sample.top_k < len(logits):
        logits, tokens = logits.topk(sample.top_k)
    elif sample.top_p is not None:
        logits, tokens = logits.sort(descending=True, stable=True)
    values = logits.numpy().astype(np.float64) / sample.temperature
    highest = values.max()
    if highest == -np.inf:
        raise ConfigError("sample.ban: nothing is left to draw; ban less")
    weights: Probabilities = np.exp(values - highest)
    if sample.top_p is not None:
        if tokens is None:  # a top_k as large as the vocabulary
            tokens = torch.arange(len(weights))
        before = weights.cumsum() - weights
        weights[before >= sample.top_p * weights.sum()] = 0
    if sample.min_p is not None:
        weights[weights < sample.min_p] = 0
    return tokens, weights


class Adjustment:
    """What settings add to logits before they are compared: bias, bans, penalties."""

    def __init__(self, sample: SampleConfig, bias: Tensor | None) -> None:
        """`bias` (V,) holds -inf for what is banned."""
        self._sample, self._bias = sample, bias
        self._repetition = sample.repetition_penalty != 1
        self._counting = sample.presence_penalty != 0 or sample.frequency_penalty != 0

    def __call__(self, logits: Tensor, prompt: Sequence[int], drawn: Sequence[int]) -> Tensor:
        """Logits (V,) adjusted to the tokens before; CheckpointError if they are not finite.

        The repetition penalty divides positive logits of tokens of prompt and text, and multiplies
        negative ones (Keskar et al. 2019). The presence penalty is taken from the logits of drawn
        tokens, the frequency penalty as often as each was drawn, as in OpenAI's interface.
        """
        if not np.isfinite(logits.numpy().sum(dtype=np.float64)):
            raise CheckpointError("the model gives non-finite logits; its weights are damaged")
        if self._bias is not None:
            logits = logits + self._bias
        if self._repetition and (seen := {*prompt, *drawn}):
            places = torch.tensor(sorted(seen))
            found, penalty = logits[places], self._sample.repetition_penalty
            changed = torch.where(found > 0, found / penalty, found * penalty)
            logits = logits.index_put((places,), changed)
        if self._counting and drawn:
            counts = Counter(drawn)
            places, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()))
            taken = self._sample.presence_penalty + self._sample.frequency_penalty * times
            logits = logits.index_add(0, places, -taken.to(logits.dtype))
        return logits


def log_probability(logits: Tensor, token: int) -> float:
    """Of a token under logits (V,) as the model gives them, in nats."""
    return float(logits[token] - logits.logsumexp(dim=0))
