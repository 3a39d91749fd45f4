"""Drawing for all rows at once gives the tokens that drawing row by row gives."""

import math
from typing import Any

import pytest
import torch

from gptmini.config.settings import SampleConfig
from gptmini.extras.engine.device_draw import draw_on_device
from gptmini.generate.filters import draw_tokens
from gptmini.generate.sequence import Sequence

VOCABULARY = 300
FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.05},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": 1000},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "top_p tiny": {"top_p": 1e-9},
    "top_p of all": {"top_p": 1.0},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 40, "top_p": 0.7, "min_p": 0.05, "temperature": 0.8},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.5},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "top_k": 20},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.2, "temperature": 0},
}


def make_text(number: int, settings: dict[str, Any], random: torch.Generator) -> Sequence:
    sample = SampleConfig.model_validate(
        {"top_k": None, "temperature": 1.0, "seed": number % 7} | settings
    )

    def pick(n: int) -> list[int]:
        return torch.randint(VOCABULARY, (n,), generator=random).tolist()

    first_bias = None
    if number % 5 == 0:
        is_allowed = torch.rand(VOCABULARY, generator=random) < 0.3
        first_bias = torch.where(is_allowed, 0.0, -torch.inf)
    text = Sequence(number, pick(6), 100, sample, first_bias=first_bias)
    text.tokens = pick(9) * 2 if number % 3 else []
    if number % 4 == 0:
        text.bias = torch.randn(VOCABULARY, generator=random)
        text.bias[torch.tensor(pick(100))] = -torch.inf
    return text


def make_logits(n_rows: int, random: torch.Generator, rounded: bool) -> torch.Tensor:
    logits = 3 * torch.randn(n_rows, VOCABULARY, generator=random)
    # In bfloat16 many of the largest are equal; both zeros are among them.
    return logits.bfloat16().float().mul(2).round() / 2 if rounded else logits


@pytest.mark.parametrize("rounded", [False, True], ids=["far apart", "many equal"])
@pytest.mark.parametrize("name", [*FILTERS, "mixed"])
def test_the_same_tokens_as_row_by_row(name, rounded):
    random = torch.Generator().manual_seed(len(name))
    n_rows = 150
    kinds = list(FILTERS.values()) if name == "mixed" else [FILTERS[name]]
    texts = [make_text(n, kinds[n % len(kinds)], random) for n in range(n_rows)]
    logits = make_logits(n_rows, random, rounded)
    expected = draw_tokens(list(logits), texts)
    before = logits.clone()
    assert draw_on_device(logits, texts) == expected
    assert torch.equal(logits, before)  # they are still needed for log-probabilities
    if name in ("plain", "hot", "mixed"):
        assert len(set(expected.values())) > 50


def test_a_row_without_tokens_or_with_damaged_logits_has_an_error_of_its_own():
    random = torch.Generator().manual_seed(1)
    for settings in FILTERS.values():
        texts = [make_text(n, settings, random) for n in (1, 2, 6, 7)]
        texts[1].bias = torch.full((VOCABULARY,), -torch.inf)
        logits = make_logits(4, random, False)
        logits[2, 5] = math.nan
        found = draw_on_device(logits, texts)
        errors = [repr(text.error) for text in texts]
        assert list(found) == [texts[0], texts[3]]
        assert [text.finish_reason for text in texts] == [None, "error", "error", None]
        assert found == draw_tokens(list(logits), texts)
        assert [repr(text.error) for text in texts] == errors


def test_the_largest_random_number_draws_no_token_that_is_filtered_out(monkeypatch):
    from gptmini.extras.engine import device_draw

    monkeypatch.setattr(device_draw, "make_random_number", lambda *_: 1 - 2**-53)
    random = torch.Generator().manual_seed(2)
    for name in ("plain", "top_k", "top_p", "min_p", "all"):
        texts = [make_text(n, FILTERS[name], random) for n in (1, 2, 7)]
        logits = make_logits(3, random, False)
        logits[:, 200:] = -100
        found = draw_on_device(logits, texts)
        assert len(found) == len(texts)
        for row, token in enumerate(found.values()):
            if name == "plain":
                assert token < 200
            if name == "top_k":
                assert token == int(logits[row].topk(7).indices[-1])
