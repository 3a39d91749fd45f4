"""Filters and draws for all rows of a step at once on a GPU, as filters.py does for one text.

A GPU has all logits at hand; copying 50,000 of them to the host for each row, and drawing there row
by row, would take longer than computing them. The results are those of filters.py, up to rounding.
The host waits once a step, for the tokens.

Letters: R rows, B rows that are drawn alike, V vocabulary, N tokens that pass the filters.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import GptminiError
from gptmini.generate.filters import (
    LogitsProcessor,
    make_no_token_error,
    make_non_finite_error,
    make_random_number,
)
from gptmini.generate.texts import Text
from gptmini.machine import Compute

# What a row gets in place of a token.
NON_FINITE = -1
NO_TOKEN = -2


class DrawSettings(NamedTuple):
    """What B rows are drawn with: their settings and random numbers, each (B, 1), float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    random: Tensor


@torch.inference_mode()
def draw_on_device(
    logits: Tensor, texts: Sequence[Text], processors: Sequence[LogitsProcessor]
) -> list[int | GptminiError]:
    """Draw a token from each row of logits (R, V) as `sampler.draw_token` does, or give its error.

    Each row has a text and a processor.
    """
    V = logits.shape[1]
    compute = Compute(logits.device, logits.dtype)
    is_finite = logits.isfinite().all(dim=1)  # (R,)
    scores = _process(logits, texts, processors, compute)  # (R, V)
    rows_of_kind: dict[str, list[int]] = {}
    for row, processor in enumerate(processors):
        rows_of_kind.setdefault(_find_kind(processor.sample, V), []).append(row)
    listed = [_list_settings(*row) for row in zip(texts, processors, strict=True)]
    settings = compute.copy(torch.tensor(listed, dtype=torch.float64))  # (R, 5)
    tokens = torch.empty(len(texts), dtype=torch.long, device=logits.device)  # (R,)
    for kind, rows in rows_of_kind.items():
        alike: Tensor | slice = slice(None)
        if len(rows_of_kind) > 1:
            alike = compute.copy(torch.tensor(rows))  # (B,)
        columns = settings[alike].split(1, dim=1)
        ks = [processors[row].sample.top_k or V for row in rows]
        n_sorted = max(ks) if kind == "top_k" else V
        tokens[alike] = _draw_alike(scores[alike], kind, DrawSettings(*columns), n_sorted)
    tokens = torch.where(is_finite, tokens, NON_FINITE)
    errors = {NON_FINITE: make_non_finite_error, NO_TOKEN: make_no_token_error}
    return [errors[token]() if token in errors else token for token in tokens.cpu().tolist()]


def _find_kind(sample: SampleConfig, vocab_size: int) -> str:
    """Say what a row needs: the largest logit, all in order, some in order, or none in order."""
    if sample.temperature == 0:
        return "greedy"
    if sample.top_k is not None and sample.top_k < vocab_size:
        return "top_k"
    if sample.top_p is not None and sample.top_p < 1:
        return "top_p"
    return "unsorted"


def _list_settings(text: Text, processor: LogitsProcessor) -> list[float]:
    """List the fields of `DrawSettings` for a row. Filters that are off let everything pass."""
    sample = processor.sample
    return [
        sample.temperature,
        math.inf if sample.top_k is None else sample.top_k,
        math.inf if sample.top_p is None or sample.top_p == 1 else sample.top_p,
        sample.min_p or 0,
        make_random_number(sample.seed, text.number, len(text.tokens)),
    ]


def _draw_alike(scores: Tensor, kind: str, settings: DrawSettings, n_sorted: int) -> Tensor:
    """Draw a token from each row of scores (B, V), by `filter_probabilities`; (B,)."""
    if kind == "greedy":
        highest, greedy = scores.max(dim=1)  # (B,) and (B,)
        return torch.where(highest > -torch.inf, greedy, NO_TOKEN)
    order: Tensor | None = None
    values = scores
    if kind != "unsorted":
        order = _sort(scores, n_sorted)  # (B, N)
        values = scores.gather(1, order)
    scaled = values.double() / settings.temperature  # (B, N)
    highest = scaled.amax(dim=1, keepdim=True)  # (B, 1)
    weights = (scaled - highest).exp()  # (B, N), the most likely token weighs 1
    if order is not None:
        rank = torch.arange(order.shape[1], device=scores.device)
        weights = torch.where(rank < settings.top_k, weights, 0)
        enough = settings.top_p * weights.sum(dim=1, keepdim=True)
        before = weights.cumsum(dim=1) - weights  # of all tokens more likely than each
        weights = torch.where(before < enough, weights, 0)
    weights = torch.where(weights >= settings.min_p, weights, 0)
    sums = weights.cumsum(dim=1)  # (B, N)
    total = sums[:, -1:]
    # Rounding must not lead past the last weight, which may be followed by zeros.
    target = torch.minimum(settings.random * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True)  # (B, 1)
    # A row without any token to draw has no sums, only NaN.
    index = index.clamp(max=sums.shape[1] - 1)
    tokens = index if order is None else order.gather(1, index)
    return torch.where(highest > -torch.inf, tokens, NO_TOKEN)[:, 0]


def _sort(scores: Tensor, n: int) -> Tensor:
    """Find the n largest of scores (B, V), largest first, of equal ones the first first; (B, n)."""
    # Which of equal values comes first is not fixed on a GPU, so no two keys are equal: see
    # `ranking._sort_indices`.
    bits = scores.view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    down = 0xFFFFFFFF - torch.arange(scores.shape[1], device=scores.device)
    keys = ordered << 32 | down  # (B, V)
    is_partial = n < scores.shape[1]
    largest = keys.topk(n).values if is_partial else keys.sort(descending=True).values  # (B, n)
    return 0xFFFFFFFF - (largest & 0xFFFFFFFF)


# -- bias, penalties, limits of the first token ----------------------------------------------------


def _process(
    logits: Tensor, texts: Sequence[Text], processors: Sequence[LogitsProcessor], compute: Compute
) -> Tensor:
    """Adjust logits (R, V) as `LogitsProcessor` does, and rule out tokens that may not be first."""
    scores = logits.clone()
    for row, processor in enumerate(processors):
        bias = processor.get_bias(logits.device)  # (V,)
        if bias is not None:
            scores[row] += bias
    _penalize(scores, texts, processors, compute)
    for row, text in enumerate(texts):
        allowed = text.allowed_first
        if allowed is not None and not text.tokens:
            scores[row].masked_fill_(~compute.copy(allowed), -torch.inf)
    return scores


def _penalize(
    scores: Tensor, texts: Sequence[Text], processors: Sequence[LogitsProcessor], compute: Compute
) -> None:
    """Apply the penalties of all rows to scores (R, V), in place."""
    # Places in `scores`, and what to do there.
    repeated: list[tuple[int, int]] = []
    factors: list[float] = []
    drawn: list[tuple[int, int]] = []
    penalties: list[float] = []
    for row, (text, processor) in enumerate(zip(texts, processors, strict=True)):
        sample = processor.sample
        if sample.repetition_penalty != 1:
            seen = {*text.prompt_tokens, *text.tokens}
            repeated += [(row, token) for token in seen]
            factors += [sample.repetition_penalty] * len(seen)
        if sample.presence_penalty != 0 or sample.frequency_penalty != 0:
            for token, times in Counter(text.tokens).items():
                drawn.append((row, token))
                penalties.append(sample.presence_penalty + sample.frequency_penalty * times)
    if repeated:
        places = compute.copy(torch.tensor(repeated)).unbind(dim=1)
        factor = compute.copy(torch.tensor(factors, dtype=scores.dtype))
        old = scores[places]
        scores[places] = torch.where(old > 0, old / factor, old * factor)
    if drawn:
        places = compute.copy(torch.tensor(drawn)).unbind(dim=1)
        scores[places] -= compute.copy(torch.tensor(penalties, dtype=scores.dtype))
