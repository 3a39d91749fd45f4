"""Filters and draws for all rows of a step at once on a GPU, by the functions of filters.py.

A GPU has all logits at hand; copying 50,000 of them to the host for each row, and drawing there row
by row, would take longer than computing them. The results are those of filters.py, up to rounding.
The host waits once a step, for the tokens.

Letters: B texts, V vocabulary, N tokens that may pass the filters.
"""

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.generate.filters import (
    FILTERS,
    adjust_logits,
    make_no_token_error,
    make_non_finite_error,
    make_random_number,
)
from gptmini.generate.sequence import Sequence
from gptmini.machine import Compute

# What a row gets in place of a token.
NON_FINITE = -1
NO_TOKEN = -2


@torch.inference_mode()
def draw_on_device(logits: Tensor, texts: list[Sequence]) -> dict[Sequence, int]:
    """Draw a token from each row of logits (B, V) as `filters.draw_tokens` does."""
    V = logits.shape[1]
    is_finite = logits.isfinite().all(dim=1)  # (B,)
    scores = adjust_logits(logits, texts)  # (B, V)
    listed = torch.tensor([_list_settings(text, V) for text in texts], dtype=torch.float64)
    settings = Compute(logits.device, logits.dtype).copy(listed)  # (B, S)
    n_candidates = max(_count_candidates(text.sample, V) for text in texts)
    tokens = torch.where(is_finite, _draw_rows(scores, settings, n_candidates), NON_FINITE)
    errors = {NON_FINITE: make_non_finite_error, NO_TOKEN: make_no_token_error}
    drawn: dict[Sequence, int] = {}
    for text, token in zip(texts, tokens.cpu().tolist(), strict=True):
        if token in errors:
            text.fail(errors[token]())
        else:
            drawn[text] = token
    return drawn


def _count_candidates(sample: SampleConfig, vocab_size: int) -> int:
    """Count the tokens that may be drawn before FILTERS; a greedy row needs none in order."""
    return 1 if sample.temperature == 0 else min(sample.top_k or vocab_size, vocab_size)


def _list_settings(text: Sequence, vocab_size: int) -> list[float]:
    """List what a row is drawn with.

    These are the random number, temperature, top-k, whether tokens run from most to least likely,
    and the settings of FILTERS.
    """
    sample = text.sample
    n_candidates = _count_candidates(sample, vocab_size)
    values = {name: getattr(sample, name) for name in FILTERS}
    return [
        make_random_number(sample.seed, text.number, len(text.tokens)),
        sample.temperature,
        n_candidates,
        n_candidates < vocab_size or (sample.top_p is not None and sample.top_p < 1),
        *(FILTERS[name].off if value is None else value for name, value in values.items()),
    ]


def _draw_rows(scores: Tensor, settings: Tensor, n_candidates: int) -> Tensor:
    """Draw a token from each row of scores (B, V), by `filter_probabilities`; (B,).

    The settings are those of `_list_settings`, (B, S), float64. No row has more candidates.
    """
    random, temperature, top_k, is_sorted, *of_filters = settings.split(1, dim=1)  # (B, 1) each
    is_greedy = temperature == 0
    temperature = torch.where(is_greedy, 1, temperature)
    highest, greedy = scores.max(dim=1, keepdim=True)  # (B, 1) each
    order = _order_tokens(scores, is_sorted > 0, n_candidates)  # (B, N)
    scaled = scores.gather(1, order).double() / temperature  # (B, N)
    weights = (scaled - highest.double() / temperature).exp()  # the most likely token weighs 1
    rank = torch.arange(n_candidates, device=scores.device)
    weights = torch.where(rank < top_k, weights, 0)
    total = weights.sum(dim=1, keepdim=True)  # (B, 1)
    for each, setting in zip(FILTERS.values(), of_filters, strict=True):
        weights = torch.where(each.keep(weights, setting, total), weights, 0)
    sums = weights.cumsum(dim=1)  # (B, N)
    left = sums[:, -1:]
    # Rounding must not lead past the last weight, which may be followed by zeros.
    target = torch.minimum(random * left, left.nextafter(torch.zeros_like(left)))
    index = torch.searchsorted(sums, target, right=True)  # (B, 1)
    # A row without any token to draw has no sums, only NaN.
    index = index.clamp(max=n_candidates - 1)
    tokens = torch.where(is_greedy, greedy, order.gather(1, index))
    return torch.where(highest > -torch.inf, tokens, NO_TOKEN)[:, 0]


def _order_tokens(scores: Tensor, is_sorted: Tensor, n: int) -> Tensor:
    """Order the tokens of scores (B, V), and return the first n of each row, (B, n).

    Where `is_sorted` (B, 1) they run from the largest score to the smallest, of equal ones the
    first first; elsewhere by their numbers.
    """
    # Which of equal values comes first is not fixed on a GPU, so no two keys are equal: integers of
    # 64 bits, with the score in the upper half and the token, counted down, in the lower. The bits
    # of a float32 are in the order of the values, except that those of negative ones grow as they
    # fall, so they are inverted.
    bits = (scores + 0).view(torch.int32)  # of both zeros, those of one
    ordered = torch.where(is_sorted, bits ^ (bits >> 31 & 0x7FFFFFFF), 0).long()
    down = 0xFFFFFFFF - torch.arange(scores.shape[1], device=scores.device)
    keys = ordered << 32 | down  # (B, V)
    is_partial = n < scores.shape[1]
    first = keys.topk(n).values if is_partial else keys.sort(descending=True).values  # (B, n)
    return 0xFFFFFFFF - (first & 0xFFFFFFFF)
