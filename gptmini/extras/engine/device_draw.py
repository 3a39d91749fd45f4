"""Filters and draws for all rows of a step at once on a GPU, by the functions of filters.py.

A GPU has all logits at hand; copying 50,000 of them to the host for each row, and drawing there row
by row, would take longer than computing them. The results are those of filters.py, up to rounding.
The host waits once a step, for the tokens.

Letters: B texts, A of them that are drawn alike, V vocabulary, N tokens that pass the filters.
"""

import math

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
    compute = Compute(logits.device, logits.dtype)
    is_finite = logits.isfinite().all(dim=1)  # (B,)
    scores = adjust_logits(logits, texts)  # (B, V)
    rows_of_kind: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows_of_kind.setdefault(_find_kind(text.sample, V), []).append(row)
    listed = [_list_settings(text) for text in texts]
    settings = compute.copy(torch.tensor(listed, dtype=torch.float64))  # (B, S)
    tokens = torch.empty(len(texts), dtype=torch.long, device=logits.device)  # (B,)
    for kind, rows in rows_of_kind.items():
        alike: Tensor | slice = slice(None)
        if len(rows_of_kind) > 1:
            alike = compute.copy(torch.tensor(rows))  # (A,)
        columns = settings[alike].split(1, dim=1)
        samples = [texts[row].sample for row in rows]
        n_sorted = V
        if kind == "top_k":
            n_sorted = max(sample.top_k or V for sample in samples)
        used = {name for name in FILTERS for sample in samples if getattr(sample, name) is not None}
        tokens[alike] = _draw_alike(scores[alike], kind, columns, used, n_sorted)
    tokens = torch.where(is_finite, tokens, NON_FINITE)
    errors = {NON_FINITE: make_non_finite_error, NO_TOKEN: make_no_token_error}
    drawn: dict[Sequence, int] = {}
    for text, token in zip(texts, tokens.cpu().tolist(), strict=True):
        if token in errors:
            text.fail(errors[token]())
        else:
            drawn[text] = token
    return drawn


def _find_kind(sample: SampleConfig, vocab_size: int) -> str:
    """Say what a row needs: the largest logit, all in order, some in order, or none in order."""
    if sample.temperature == 0:
        return "greedy"
    if sample.top_k is not None and sample.top_k < vocab_size:
        return "top_k"
    if sample.top_p is not None and sample.top_p < 1:
        return "top_p"
    return "unsorted"


def _list_settings(text: Sequence) -> list[float]:
    """List what a row is drawn with: random number, temperature, top-k, then those of FILTERS."""
    sample = text.sample
    values = {name: getattr(sample, name) for name in FILTERS}
    return [
        make_random_number(sample.seed, text.number, len(text.tokens)),
        sample.temperature,
        math.inf if sample.top_k is None else sample.top_k,
        *(FILTERS[name].off if value is None else value for name, value in values.items()),
    ]


def _draw_alike(
    scores: Tensor, kind: str, settings: tuple[Tensor, ...], used: set[str], n_sorted: int
) -> Tensor:
    """Draw a token from each row of scores (A, V), by `filter_probabilities`; (A,).

    The settings are those of `_list_settings`, (A, 1) each, float64; filters in `used` are on.
    """
    random, temperature, top_k, *of_filters = settings
    if kind == "greedy":
        highest, greedy = scores.max(dim=1)  # (A,) and (A,)
        return torch.where(highest > -torch.inf, greedy, NO_TOKEN)
    order: Tensor | None = None
    values = scores
    if kind != "unsorted":
        order = _sort(scores, n_sorted)  # (A, N)
        values = scores.gather(1, order)
    scaled = values.double() / temperature  # (A, N)
    highest = scaled.amax(dim=1, keepdim=True)  # (A, 1)
    weights = (scaled - highest).exp()  # (A, N), the most likely token weighs 1
    if order is not None:
        rank = torch.arange(order.shape[1], device=scores.device)
        weights = torch.where(rank < top_k, weights, 0)
    total = weights.sum(dim=1, keepdim=True)  # (A, 1)
    for name, setting in zip(FILTERS, of_filters, strict=True):
        if name in used:
            weights = torch.where(FILTERS[name].keep(weights, setting, total), weights, 0)
    sums = weights.cumsum(dim=1)  # (A, N)
    left = sums[:, -1:]
    # Rounding must not lead past the last weight, which may be followed by zeros.
    target = torch.minimum(random * left, left.nextafter(torch.zeros_like(left)))
    index = torch.searchsorted(sums, target, right=True)  # (A, 1)
    # A row without any token to draw has no sums, only NaN.
    index = index.clamp(max=sums.shape[1] - 1)
    tokens = index if order is None else order.gather(1, index)
    return torch.where(highest > -torch.inf, tokens, NO_TOKEN)[:, 0]


def _sort(scores: Tensor, n: int) -> Tensor:
    """Find the n largest of scores (A, V), largest first, of equal ones the first first; (A, n)."""
    # Which of equal values comes first is not fixed on a GPU, so no two keys are equal: see
    # `ranking._sort_indices`.
    bits = scores.view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    down = 0xFFFFFFFF - torch.arange(scores.shape[1], device=scores.device)
    keys = ordered << 32 | down  # (A, V)
    is_partial = n < scores.shape[1]
    largest = keys.topk(n).values if is_partial else keys.sort(descending=True).values  # (A, n)
    return 0xFFFFFFFF - (largest & 0xFFFFFFFF)
