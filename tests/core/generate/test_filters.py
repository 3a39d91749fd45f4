import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptmini.config.settings import SampleConfig
from gptmini.errors import CheckpointError, ConfigError
from gptmini.generate.filters import (
    adjust_logits,
    compute_logprob,
    draw_token,
    filter_probabilities,
    find_heaviest,
    find_top_k,
    make_random_number,
    sample_index,
    sample_token,
)
from gptmini.generate.sequence import Sequence

OPEN = {"temperature": 1.0, "top_k": None}


def weights_of(logits: torch.Tensor, **settings) -> np.ndarray:
    """Probabilities (V,) in the order of the vocabulary."""
    sample = SampleConfig.model_validate(OPEN | settings)
    tokens, weights = filter_probabilities(logits, sample)
    found = np.zeros(len(logits))
    found[slice(None) if tokens is None else tokens] = weights
    return found / found.sum()


def test_each_filter_keeps_the_tokens_it_documents():
    logits = torch.tensor([0.15, 0.5, 0.2, 0.1, 0.05]).log()

    def kept(**settings) -> list[float]:
        return [round(p, 4) for p in weights_of(logits, **settings).tolist()]

    assert kept() == [0.15, 0.5, 0.2, 0.1, 0.05]
    assert kept(top_k=2) == [0, 0.7143, 0.2857, 0, 0]
    assert kept(top_k=9) == kept()
    assert kept(top_p=0.69) == [0, 0.7143, 0.2857, 0, 0]
    assert kept(top_p=0.71) == [0.1765, 0.5882, 0.2353, 0, 0]
    assert kept(top_p=0.01) == [0, 1, 0, 0, 0]
    assert kept(top_k=9, top_p=0.01) == [0, 1, 0, 0, 0]
    assert kept(min_p=0.39) == [0, 0.7143, 0.2857, 0, 0]
    assert kept(min_p=0.41) == [0, 1, 0, 0, 0]
    # top-p after top-k: 0.5 / 0.7 of the two that are left is enough
    assert kept(top_k=2, top_p=0.71) == [0, 1, 0, 0, 0]
    # temperature before all: at 0.5 the probabilities go with their squares
    assert kept(temperature=0.5)[1] == round(0.25 / (0.25 + 0.04 + 0.0225 + 0.01 + 0.0025), 4)
    assert kept(temperature=0.5, min_p=0.39) == [0, 1, 0, 0, 0]


def test_a_tie_at_the_edge_of_a_filter_keeps_what_is_enough():
    assert sorted(weights_of(torch.zeros(4), top_p=0.5)) == [0, 0, 0.5, 0.5]
    found = weights_of(torch.tensor([0.0, -1.0, -2.0]), min_p=float(np.exp(-1.0)))
    assert (found > 0).tolist() == [True, True, False]  # at least that fraction


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20, unique=True),
    st.none() | st.integers(1, 25),
    st.none() | st.floats(0.01, 1.0),
    st.none() | st.floats(0, 0.99),
    st.floats(0.01, 10),
    st.floats(0, 1, exclude_max=True),
)
def test_filters_keep_the_most_likely_tokens_and_a_draw_is_one_of_them(
    logits, top_k, top_p, min_p, temperature, number
):
    settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    found = weights_of(torch.tensor(logits), **settings)
    ordered = [found[place] > 0 for place in np.argsort(logits)[::-1]]
    assert ordered == sorted(ordered, reverse=True)
    assert ordered[0]
    sample = SampleConfig.model_validate(settings)
    assert found[sample_token(torch.tensor(logits), sample, number)] > 0


@given(st.integers(0, 999), st.integers(2, 3000), st.integers(1, 200), st.floats(0.01, 0.999))
def test_large_vocabularies_are_ranked_and_drawn_from_as_by_sorting_all_of_them(seed, V, k, part):
    """With ties, of which the first comes first, and many tokens of no weight."""
    dice = np.random.default_rng(seed)
    values = dice.integers(-30, 12, V).astype(np.float32) / 4
    values[dice.integers(V, size=V // 3)] = -np.inf
    values[dice.integers(V)] = 3  # not all are -inf
    ranked = sorted(range(V), key=lambda token: (-values[token], token))
    k = min(k, V)
    assert find_top_k(values, k).tolist() == ranked[:k]

    weights = 2.0 ** np.floor(values.astype(np.float64) - 3)  # their sums are exact
    enough = part * weights.sum()
    found = find_heaviest(values, weights, enough).tolist()
    assert found == ranked[: len(found)]
    assert weights[found].sum() >= enough

    ends = weights.cumsum()
    for place in (int(ends.searchsorted(part * ends[-1], side="right")), int(weights.argmax())):
        assert sample_index(weights, (ends[place] - weights[place] / 2) / ends[-1]) == place
    weights *= dice.random(V)  # sums of these are rounded
    near = weights.cumsum()[511::512] / weights.sum()
    for random in (0.0, *near, *np.nextafter(near, 0), 1 - 2**-53):
        assert weights[sample_index(weights, min(random, 1 - 2**-53))] > 0


@pytest.mark.parametrize("settings", [{"min_p": 0.05}, {"top_k": 9, "top_p": 0.8}])
def test_draws_follow_the_exact_probabilities(settings):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    sample = SampleConfig.model_validate({"temperature": 0.7, "top_k": None} | settings)
    expected = weights_of(logits, temperature=0.7, **settings)
    exact = (logits.double() / 0.7).softmax(0).numpy()
    kept = expected > 0
    np.testing.assert_allclose(expected[kept], exact[kept] / exact[kept].sum(), rtol=1e-6)
    draws = 20_000
    counts = np.zeros(12)
    for n in range(draws):
        counts[sample_token(logits, sample, make_random_number(5, 0, n))] += 1
    assert not counts[~kept].any()
    chi_squared = ((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum()
    # 1 in 1000, for 1 to 11 degrees of freedom
    limit = [10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3][kept.sum() - 2]
    assert chi_squared < limit


def test_random_numbers_are_uniform_and_differ_by_seed_text_and_place():
    numbers = [
        make_random_number(s, r, p) for s in range(10) for r in range(10) for p in range(100)
    ]
    assert len(set(numbers)) == 10_000
    counts, _ = np.histogram(numbers, 10, (0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # 1 in 1000 with 9 degrees of freedom
    assert make_random_number(1337, 0, 0) == 0.16112765958959163  # on every machine


def text_of(prompt: list[int], drawn: list[int], **settings) -> Sequence:
    text = Sequence(0, prompt, 99, SampleConfig.model_validate(settings))
    text.tokens = drawn
    return text


def test_penalties_are_those_of_the_papers():
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0])

    def adjusted(prompt, drawn, **settings) -> list[float]:
        return adjust_logits(logits[None], [text_of(prompt, drawn, **settings)])[0].tolist()

    assert adjusted([0], [1, 1], repetition_penalty=2.0) == [1, -4, 1, 1]
    assert adjusted([0], [1, 1, 2], presence_penalty=0.5) == [2, -2.5, 0.5, 1]
    assert adjusted([0], [1, 1, 2], frequency_penalty=0.5) == [2, -3, 0.5, 1]
    both = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert adjusted([], [1, 1], **both) == [2, -3.5, 1, 1]
    assert adjusted([], [], **both, repetition_penalty=2.0) == logits.tolist()
    assert logits.tolist() == [2, -2, 1, 1]


def test_bias_is_added_before_the_penalties():
    text = text_of([0], [], repetition_penalty=2.0)
    text.bias = torch.tensor([4.0, 0])
    found = adjust_logits(torch.tensor([[-2.0, 0]]), [text])
    assert found.tolist() == [[1, 0]]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_banning_every_token_is_an_error(temperature):
    sample = SampleConfig(temperature=temperature)
    with pytest.raises(ConfigError, match=r"sample.ban: no token is left"):
        sample_token(torch.tensor([-torch.inf, -torch.inf]), sample, 0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_an_error(bad):
    with pytest.raises(CheckpointError, match="non-finite"):
        draw_token(torch.tensor([0.0, bad]), text_of([], []))


def test_log_probability_equals_log_softmax():
    logits = torch.randn(9)
    found = [compute_logprob(logits, token) for token in range(9)]
    torch.testing.assert_close(torch.tensor(found), logits.log_softmax(0))
