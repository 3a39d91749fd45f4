"""docs/own-attention.md: its attentions are those of their papers."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.model.cache import KVCache, NoCache
from gptmini.model.gpt import GPT
from tests.support import ROOT

PAGE = ROOT / "docs" / "own-attention.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def classes() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for program in PROGRAMS[:3]:
        exec(program, names)
    return names


def make(attention: Any, **settings: Any) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """A layer with random parameters, and q, k and v of two rows of 7 tokens, in float64."""
    torch.manual_seed(1)
    config = ModelConfig.model_validate(
        {"vocab_size": 9, "n_head": 4, "d_model": 32, "attention": settings}
    )
    layer = attention(config, 3).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    layer.requires_grad_(False)
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)
    return layer, (q, k[:, : config.n_kv_head], v[:, : config.n_kv_head])


def softmax_by_hand(scores: list[Tensor], sink: float = 0.0) -> list[Tensor]:
    total = sum(score.exp() for score in scores) + sink
    return [score.exp() / total for score in scores]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", [{}, {"variant": "gqa", "n_kv_head": 2}], ids=["mha", "gqa"])
def test_differential_attention_is_that_of_its_paper(kind, window, classes):
    """Formulas (1) to (3) of Ye et al. 2024, one query at a time."""
    layer, (q, k, v) = make(classes["DifferentialAttention"], window=window, **kind)
    found = layer.mix(q, k, v, NoCache(q.device))  # (B, H, T, K)
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * 3)  # the fourth layer
    q1, k1, q2, k2 = layer.lambdas
    weight = math.exp(sum(q1 * k1)) - math.exp(sum(q2 * k2)) + lambda_init
    group = 4 // k.shape[1]
    for row in range(2):
        for pair in range(2):
            first, second = 2 * (pair // group), 2 * (pair // group) + 1
            for t in range(7):
                seen = range(0 if window is None else max(0, t - window + 1), t + 1)
                one = softmax_by_hand(
                    [q[row, 2 * pair, t] @ k[row, first, s] / 8**0.5 for s in seen]
                )
                two = softmax_by_hand(
                    [q[row, 2 * pair + 1, t] @ k[row, second, s] / 8**0.5 for s in seen]
                )
                head = torch.zeros(16, dtype=torch.float64)
                for s, a, b in zip(seen, one, two, strict=True):
                    head += (a - weight * b) * torch.cat([v[row, first, s], v[row, second, s]])
                normed = head / (head.square().mean() + 1e-5).sqrt() * layer.norm.weight
                expected = (1 - lambda_init) * normed
                torch.testing.assert_close(found[row, 2 * pair, t], expected[:8])
                torch.testing.assert_close(found[row, 2 * pair + 1, t], expected[8:])


def test_a_sink_takes_part_in_the_softmax(classes):
    layer, (q, k, v) = make(classes["SinkAttention"])
    found = layer.mix(q, k, v, NoCache(q.device))  # (B, H, T, K)
    for row in range(2):
        for head in range(4):
            for t in range(7):
                scores = [q[row, head, t] @ k[row, head, s] / 8**0.5 for s in range(t + 1)]
                weights = softmax_by_hand(scores, math.exp(layer.sink[head]))
                expected = sum(weight * v[row, head, s] for s, weight in enumerate(weights))
                torch.testing.assert_close(found[row, head, t], expected)


def test_first_and_last_sees_the_first_token_and_those_of_its_window(classes):
    layer, _ = make(classes["FirstAndLastAttention"])
    (mask,) = layer.mask(torch.arange(40), torch.arange(40), {})  # (T, S)
    assert mask.tolist() == [[s == 0 or t - 16 < s <= t for s in range(40)] for t in range(40)]


@pytest.mark.parametrize(
    ("name", "window"),
    [("DifferentialAttention", 5), ("SinkAttention", None), ("FirstAndLastAttention", None)],
)
def test_stepwise_they_are_what_they_are_of_a_whole_text(name, window, classes):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": 24}
    config = ModelConfig.model_validate({"vocab_size": 9, **sizes, "attention": {"window": window}})
    model = GPT(config)
    for layer, block in enumerate(model.blocks):
        block.attn = classes[name](config, layer)
    model.double().eval()
    tokens = torch.randint(0, 9, (2, 24))
    cache = KVCache(config, 2, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        whole = model(tokens)  # (B, T, V)
        parts = [model(part, cache=cache) for part in tokens.split([7, 1, 1, 9, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
