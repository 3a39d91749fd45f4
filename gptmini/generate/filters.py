"""From logits to one token: bias and bans, penalties, top-k, temperature, top-p, min-p.

The token is a pure function of the logits, the settings and one number in [0, 1), and that number
depends only on the seed, the number of the text and the position in it. So equal logits give equal
texts in every batch, and a drafted token is verified by drawing the real one.

`ADJUSTMENTS` change logits; after top-k and temperature, `FILTERS` leave out unlikely tokens. Each
takes many texts as well as one, on any device. `draw_tokens` draws for one text after the other.

Letters: B texts, V vocabulary, N tokens that are weighed.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import CheckpointError, ConfigError, GptminiError
from gptmini.generate.sequence import Sequence
from gptmini.machine import Compute

TokenIds = np.ndarray[tuple[int], np.dtype[np.intp]]
Logits = np.ndarray[tuple[int], np.dtype[np.float32]]
TokenWeights = np.ndarray[tuple[int], np.dtype[np.float64]]

# -- drawing ---------------------------------------------------------------------------------------


def draw_tokens(logits: list[Tensor], texts: list[Sequence]) -> dict[Sequence, int]:
    """Draw the next token of each text from the model's logits on the host, (V,) each.

    A text that can have no token, such as one with a ban of all, fails, and gets none.
    """
    tokens: dict[Sequence, int] = {}
    for row, text in zip(logits, texts, strict=True):
        try:
            tokens[text] = draw_token(row, text)
        except GptminiError as error:
            text.fail(error)
    return tokens


def draw_token(logits: Tensor, text: Sequence) -> int:
    """Draw the next token of a text from the model's logits (V,) on the host."""
    # argmax of NaN would be token 0, silently.
    if not np.isfinite(logits.numpy()).all():
        raise make_non_finite_error()
    (scores,) = adjust_logits(logits[None], [text])  # (V,)
    random = make_random_number(text.sample.seed, text.number, len(text.tokens))
    return sample_token(scores, text.sample, random)


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
    weights (N,) are unnormalized probabilities, 0 for what is filtered out. Raises ConfigError if
    no token is left.
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
    total = weights.sum()
    if tokens is None and sample.top_p is not None and sample.top_p < 1:
        # Sorts what top-k has not; `keep_top_p` below then cuts.
        tokens = find_heaviest(values, weights, sample.top_p * total)
        weights = weights[tokens]
    for name, each in FILTERS.items():
        value = getattr(sample, name)
        if value is not None:
            weights = weights * each.keep(weights, value, total)
    return tokens, weights


def make_no_token_error() -> ConfigError:
    """Make the error of a text all of whose tokens are ruled out."""
    return ConfigError("sample.ban: no token is left to draw; ban fewer")


def make_non_finite_error() -> CheckpointError:
    """Make the error of logits that are not numbers."""
    return CheckpointError("model: non-finite logits, the weights are damaged; train again")


def compute_logprob(logits: Tensor, token: int) -> float:
    """Compute the log-probability (nats) of a token under the model's own logits (V,)."""
    return float(logits[token] - logits.logsumexp(dim=0))


# -- the likeliest tokens: of equal ones, the first comes first ------------------------------------


def find_top_k(values: Logits, k: int) -> TokenIds:
    """Find the indices of the k largest of values (V,), largest first."""
    # Sorting all of a large vocabulary takes far longer (scripts/LOG.md: Which instructions carry
    # the compiled engine?). So lay the values out in 16 k columns. The k largest are rarely in the
    # same column, so the maxima of the columns hold most of them: at least k values reach the k-th
    # largest maximum, and hardly more.
    columns = 16 * k
    rows = len(values) // columns
    maxima = values
    if rows > 1:
        maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)  # (columns,)
    reaches = values >= np.partition(maxima, -k)[-k]  # (V,)
    return _sort_indices(values, reaches)[:k]


def find_heaviest(values: Logits, weights: TokenWeights, min_weight: float) -> TokenIds:
    """Find the indices of the largest of values (V,), largest first, as many as weigh `min_weight`.

    There may be more of them, never fewer. The largest weight is 1.
    """
    floor = 1.0
    while floor and (weights >= floor) @ weights < min_weight:
        floor /= 16
    return _sort_indices(values, weights >= floor)


def sample_index(weights: TokenWeights, random: float) -> int:
    """Draw an index in proportion to weights (N,), by a random number in [0, 1)."""
    sums = weights.cumsum()
    # Rounding must not lead past the last weight, which may be followed by zeros.
    target = min(random * sums[-1], np.nextafter(sums[-1], 0))
    return int(sums.searchsorted(target, side="right"))


def _sort_indices(values: Logits, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> TokenIds:
    """Return the indices where `mask` is true, from the largest value to the smallest."""
    indices = np.flatnonzero(mask)
    return indices[np.argsort(-values[indices], kind="stable")]


# -- filters: which of the weights (..., N) to keep, for a setting and the total of all weights ----

# Arrays of one text, with a number for each setting, or tensors of B texts, with B of them (B, 1).
Weights = Any


def keep_top_p(weights: Weights, top_p: Weights, total: Weights) -> Weights:
    """Keep the fewest most likely tokens with at least this share (Holtzman et al. 2020).

    The weights run from most to least likely, unless `top_p` is 1.
    """
    before = weights.cumsum(-1) - weights  # of all tokens more likely than each
    return (before < top_p * total) | (top_p >= 1)


def keep_min_p(weights: Weights, min_p: Weights, total: Weights) -> Weights:
    """Keep tokens at least this fraction as likely as the most likely one (Nguyen et al. 2024)."""
    return weights >= min_p


class Filter(NamedTuple):
    """Says which weights to keep; at the setting `off`, which stands for null, all of them."""

    keep: Callable[[Weights, Weights, Weights], Weights]
    off: float


# By setting, in the order of their use.
FILTERS = {"top_p": Filter(keep_top_p, 1.0), "min_p": Filter(keep_min_p, 0.0)}


# -- adjustments of the logits (B, V) of B texts ---------------------------------------------------


def adjust_logits(logits: Tensor, texts: list[Sequence]) -> Tensor:
    """Adjust logits (B, V) before the filters; those given stay as they are."""
    for adjust in ADJUSTMENTS:
        logits = adjust(logits, texts)
    return logits


def add_bias(logits: Tensor, texts: list[Sequence]) -> Tensor:
    """Add the bias of each text, and that of a first token; -inf bans a token."""
    adjusted = logits
    for row, text in enumerate(texts):
        if text.bias is not None:
            text.bias = text.bias.to(logits.device)  # it stays there
        for bias in (text.bias, None if text.tokens else text.first_bias):
            if bias is not None:
                adjusted = logits.clone() if adjusted is logits else adjusted
                adjusted[row] += bias.to(logits.device)
    return adjusted


def penalize(logits: Tensor, texts: list[Sequence]) -> Tensor:
    """Make tokens less likely that stand in a text already.

    The repetition penalty divides positive and multiplies negative logits of those in prompt and
    text (Keskar 2019). Of those that were drawn, the presence penalty is then subtracted once, the
    frequency penalty each time.
    """
    places: list[tuple[int, int]] = []
    penalties: list[tuple[float, ...]] = []
    for row, text in enumerate(texts):
        sample = text.sample
        rates = (sample.repetition_penalty, sample.presence_penalty, sample.frequency_penalty)
        if rates != (1, 0, 0):
            drawn = Counter(text.tokens)
            seen = {*text.prompt_tokens, *drawn} if sample.repetition_penalty != 1 else {*drawn}
            places += [(row, token) for token in seen]
            penalties += [(*rates, drawn[token]) for token in seen]
    if not places:
        return logits
    upload = Compute(logits.device, logits.dtype).copy
    indices = upload(torch.tensor(places)).unbind(dim=1)
    columns = upload(torch.tensor(penalties, dtype=logits.dtype)).unbind(dim=1)
    repetition, presence, frequency, times = columns  # (N,) each
    old = logits[indices]
    scaled = torch.where(old > 0, old / repetition, old * repetition)
    subtracted = presence * times.clamp(max=1) + frequency * times
    return logits.index_put(indices, scaled - subtracted)


ADJUSTMENTS = [add_bias, penalize]
