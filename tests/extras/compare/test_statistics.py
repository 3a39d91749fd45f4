"""Intervals and verdicts over seeds, against published tables and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gptmini.extras.compare.statistics import (
    ERROR_RATE,
    Estimate,
    compute_half_width,
    compute_p_value,
    conclude,
    correct_p_values,
    count_seeds_needed,
    estimate_difference,
)

DRAWS = 2000  # a coverage of 0.95 is then measured within 0.015, with three standard errors


def by_seed(figures, first_seed: int = 0) -> dict[int, float]:
    return dict(enumerate(figures, first_seed))


def draw(chance, runs: int, spreads: list[float], correlation: float = 0.0) -> list:
    """Draw figures (DRAWS, variants, runs); runs of one number share a part of their noise."""
    shared = chance.normal(size=(DRAWS, 1, runs))
    own = chance.normal(size=(DRAWS, len(spreads), runs))
    noise = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return (2.0 + noise * np.array(spreads)[:, None]).tolist()


@pytest.mark.parametrize("runs", [(2, 2), (2, 10), (5, 2)])
@pytest.mark.parametrize("spreads", [[1, 1], [3, 1]], ids=["equal", "unequal"])
def test_intervals_of_two_runs_of_other_seeds_are_rather_too_wide(runs, spreads):
    chance = np.random.default_rng(sum(runs))
    covered = 0
    for ours, theirs in draw(chance, max(runs), spreads):
        estimate = estimate_difference(by_seed(ours[: runs[0]]), by_seed(theirs[: runs[1]], 100))
        covered += compute_p_value(estimate) > ERROR_RATE
    assert covered / DRAWS > 0.95


def test_only_seeds_that_both_have_are_paired():
    ours, theirs = {1: 2.5, 2: 2.6, 3: 9.0}, {2: 2.0, 1: 2.1, 7: 0.0}
    paired = estimate_difference(ours, theirs)
    assert paired.counts == (2,)
    assert paired.difference == pytest.approx(0.5)
    assert compute_half_width(paired, 0.05) == pytest.approx(12.706 * 0.1, rel=1e-3)
    apart = estimate_difference(ours, {2: 2.0, 7: 2.1})  # a single one in common
    assert apart.counts == (3, 2)
    alone = estimate_difference(ours, {1: 2.0})
    assert (alone.variances, alone.counts) == ((), (3, 1))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("runs", [3, 5])
def test_p_values_and_intervals_are_those_of_scipy(paired, runs):
    for ours, theirs in draw(np.random.default_rng(runs), runs, [1, 3], 0.5)[:20]:
        estimate = estimate_difference(by_seed(ours), by_seed(theirs, 0 if paired else 100))
        if paired:
            expected = stats.ttest_rel(ours, theirs)
        else:
            expected = stats.ttest_ind(ours, theirs, equal_var=False)
        assert compute_p_value(estimate) == pytest.approx(expected.pvalue, rel=1e-9)
        for rate in (0.05, 0.05 / 3):
            low, high = expected.confidence_interval(1 - rate)
            half_width = compute_half_width(estimate, rate)
            assert half_width == pytest.approx((high - low) / 2, rel=1e-9)


def test_holm_corrects_as_in_his_example():
    """As R's p.adjust does; the rates are those that each is tested at, up to the first to fail."""
    adjusted = correct_p_values([0.01, 0.04, 0.03, 0.005])
    assert [corrected for corrected, _ in adjusted] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [rate for _, rate in adjusted] == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert correct_p_values([]) == []


@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(0.001, 1), st.integers(2, 12)), min_size=1, max_size=6
    )
)
def test_an_interval_excludes_zero_exactly_if_there_is_a_verdict(drawn):
    estimates = [Estimate(mean, (spread**2,), (count,)) for mean, spread, count in drawn]
    adjusted = correct_p_values([compute_p_value(estimate) for estimate in estimates])
    for estimate, (corrected, rate) in zip(estimates, adjusted, strict=True):
        assert rate <= ERROR_RATE
        if abs(corrected - ERROR_RATE) > 1e-9:  # not on the border
            excludes_zero = abs(estimate.difference) > compute_half_width(estimate, rate)
            assert excludes_zero == (corrected <= ERROR_RATE)


def test_unknown_spreads_get_no_verdict_and_do_not_count():
    one = Estimate(0.5, (), (1, 1))
    three = Estimate(0.5, (0.01,), (3,))
    unknown, known = conclude([one, three], 0.01)
    assert unknown.verdict == "one run: spread unknown"
    assert (unknown.half_width, unknown.p, unknown.seeds_needed) == (None, None, None)
    assert known == conclude([three], 0.01)[0]
    assert known.confidence == 0.95


def test_more_comparisons_need_more_seeds():
    estimate = Estimate(0.005, (0.01**2,), (3,))
    (alone,) = conclude([estimate], 0.01)
    beside, *_ = conclude([estimate] * 3, 0.01)
    assert alone.seeds_needed is not None
    assert beside.seeds_needed == count_seeds_needed(estimate, 0.01, ERROR_RATE / 3)
    assert beside.seeds_needed > alone.seeds_needed


def test_equal_runs_differ_by_nothing():
    (same,) = conclude([estimate_difference({1: 2.0, 2: 2.1}, {1: 2.0, 2: 2.1})], 0.01)
    assert (same.verdict, same.p, same.half_width) == ("unresolved", 1, 0)
    (shifted,) = conclude([estimate_difference({1: 3.0, 2: 4.0}, {1: 2.0, 2: 3.0})], 0.01)
    assert (shifted.verdict, shifted.p) == ("worse", 0)


@pytest.mark.parametrize(
    ("effect", "paired", "published"),
    [(1.0, True, 10), (0.8, True, 15), (0.5, True, 34), (1.0, False, 17), (0.5, False, 64)],
)
def test_seeds_needed_are_those_of_published_tables(effect, paired, published):
    """Power 80 %, two-sided 5 %; the effect is in standard deviations (Cohen 1988)."""
    sides = 1 if paired else 2
    estimate = Estimate(0.0, (1.0,) * sides, (3,) * sides)
    assert count_seeds_needed(estimate, effect, 0.05) == published
    assert count_seeds_needed(estimate, 0.01, 0.05) is None  # more than MAX_SEEDS
