"""From logits to one token: bias and bans, penalties, top-k, temperature, top-p, min-p.

The token is a pure function of the logits, the settings and one number in [0, 1), and that number
depends only on the seed, the number of the text and the position in it. So equal logits give equal
texts in every batch, and a drafted token (speculative.py) is verified by drawing the real one.

Letters: V vocabulary, N tokens that pass the filters.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import CheckpointError, ConfigError
from gptmini.generate.ranking import TokenIds, TokenWeights, find_top_k, find_top_p, sample_index


def make_random_number(seed: int, text_number: int, position: int) -> float:
    """Make the random number in [0, 1) of a token, the same on every machine and in every batch."""
    digest = hashlib.blake2b(f"{seed} {text_number} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53  # 53 bits fill a float64


def sample_token(logits: Tensor, sample: SampleConfig, random: float) -> int:
    """Draw a token from logits (V,) with a random number in [0, 1); temperature 0 is greedy."""
    if sample.temperature == 0:
        token = int(logits.numpy().argmax())
        if logits[token] > -torch.inf:
            return token
        raise make_no_token_error()
    tokens, weights = filter_probabilities(logits, sample)
    index = sample_index(weights, random)
    return index if tokens is None else int(tokens[index])


def filter_probabilities(
    logits: Tensor, sample: SampleConfig
) -> tuple[TokenIds | None, TokenWeights]:
    """Choose the tokens (N,) that may be drawn from logits (V,); return them and their weights.

    The tokens are None for all V; after top-k or top-p they run from most to least likely. The
    weights (N,) are unnormalized probabilities. Top-p keeps the smallest set of most
    likely tokens with at least that probability (Holtzman et al. 2020), min-p the tokens at least
    that fraction as likely as the most likely one (Nguyen et al. 2024). Raises ConfigError if no
    token is left.
    """
    tokens: TokenIds | None = None
    values = logits.numpy()  # (V,)
    if sample.top_k is not None and sample.top_k < len(values):
        tokens = find_top_k(values, sample.top_k)
        values = values[tokens]
    scaled = values.astype(np.float64) / sample.temperature
    highest = scaled.max()
    if highest == -np.inf:
        raise make_no_token_error()
    weights: TokenWeights = np.exp(scaled - highest)  # the most likely token weighs 1
    if sample.top_p is not None and sample.top_p < 1:
        enough = sample.top_p * weights.sum()
        if tokens is None:
            tokens = find_top_p(values, weights, enough)
            weights = weights[tokens]
        before = weights.cumsum() - weights  # the weight of all tokens more likely than each
        weights[before >= enough] = 0
    if sample.min_p is not None:
        kept = np.flatnonzero(weights >= sample.min_p)
        tokens = kept if tokens is None else tokens[kept]
        weights = weights[kept]
    return tokens, weights


def make_no_token_error() -> ConfigError:
    """Make the error of a text all of whose tokens are ruled out."""
    return ConfigError("sample.ban: no token is left to draw; ban fewer")


def make_non_finite_error() -> CheckpointError:
    """Make the error of logits that are not numbers."""
    return CheckpointError("model: non-finite logits, the weights are damaged; train again")


class LogitsProcessor:
    """Applies bias (-inf bans a token) and penalties to logits, before the filters."""

    def __init__(self, sample: SampleConfig, bias: Tensor | None) -> None:
        self.sample = sample
        self._bias = bias  # (V,)
        self._bias_on_device: Tensor | None = None

    def get_bias(self, device: torch.device) -> Tensor | None:
        """Return the bias (V,) on a device; it is copied there once."""
        if self._bias_on_device is None and self._bias is not None:
            self._bias_on_device = self._bias.to(device)
        return self._bias_on_device

    def __call__(self, logits: Tensor, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
        """Return adjusted logits (V,).

        The repetition penalty divides positive and multiplies negative logits of tokens in prompt
        and text (Keskar et al. 2019). The presence penalty is subtracted once from each token
        drawn, the frequency penalty once per occurrence, as in OpenAI's API.

        Raises CheckpointError if the logits are not finite.
        """
        # argmax of NaN would be token 0, silently.
        if not np.isfinite(logits.numpy()).all():
            raise make_non_finite_error()
        sample = self.sample
        if self._bias is not None:
            logits = logits + self._bias
        penalty = sample.repetition_penalty
        if penalty != 1 and (seen := {*prompt, *generated}):
            tokens = torch.tensor(sorted(seen))
            old = logits[tokens]
            new = torch.where(old > 0, old / penalty, old * penalty)
            logits = logits.index_put((tokens,), new)
        if generated and (sample.presence_penalty != 0 or sample.frequency_penalty != 0):
            counts = Counter(generated)
            tokens = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()))
            penalties = sample.presence_penalty + sample.frequency_penalty * times
            logits = logits.index_add(0, tokens, -penalties.to(logits.dtype))
        return logits


def compute_logprob(logits: Tensor, token: int) -> float:
    """Compute the log-probability (nats) of a token under the model's own logits (V,)."""
    return float(logits[token] - logits.logsumexp(dim=0))
