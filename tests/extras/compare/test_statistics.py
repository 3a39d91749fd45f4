"""Intervals and verdicts over seeds, against published tables and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.extras.compare.statistics import (
    ERROR_RATE,
    Estimate,
    compute_half_width,
    compute_p_value,
    compute_t_tails,
    conclude,
    correct_p_values,
    count_seeds_needed,
    estimate_difference,
    find_t_quantile,
)

DRAWS = 2000  # a coverage of 0.95 is then measured within 0.015, with three standard errors
PUBLISHED_T = {  # two-sided 5 % and 1 %, by degrees of freedom
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    8: (2.306, 3.355),
    10: (2.228, 3.169),
    12: (2.179, 3.055),
    15: (2.131, 2.947),
    20: (2.086, 2.845),
    30: (2.042, 2.750),
    60: (2.000, 2.660),
    120: (1.980, 2.617),
}


def by_seed(figures, first_seed: int = 0) -> dict[int, float]:
    return dict(enumerate(figures, first_seed))


def draw(chance, runs: int, spreads: list[float], correlation: float = 0.0) -> list:
    """Draw figures (DRAWS, variants, runs); runs of one number share a part of their noise."""
    shared = chance.normal(size=(DRAWS, 1, runs))
    own = chance.normal(size=(DRAWS, len(spreads), runs))
    noise = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return (2.0 + noise * np.array(spreads)[:, None]).tolist()


@pytest.mark.parametrize("freedom", PUBLISHED_T)
def test_quantiles_are_those_of_published_tables(freedom):
    at_5, at_1 = PUBLISHED_T[freedom]
    assert find_t_quantile(0.05, freedom) == pytest.approx(at_5, abs=6e-4)
    assert find_t_quantile(0.01, freedom) == pytest.approx(at_1, abs=6e-4)


def test_tails_are_those_of_the_closed_forms_for_one_and_two_degrees():
    for t in (0.0, 0.5, -4.0, 1e4):
        cauchy = 1 - 2 / math.pi * math.atan(abs(t))
        assert compute_t_tails(t, 1) == pytest.approx(cauchy, abs=1e-12)
        assert compute_t_tails(t, 2) == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t), abs=1e-12)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("spreads", [[1, 1], [5, 1]], ids=["equal", "unequal"])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_intervals_of_paired_seeds_cover_nineteen_times_in_twenty(seeds, spreads, correlation):
    chance = np.random.default_rng(seeds)
    covered = 0
    for ours, theirs in draw(chance, seeds, spreads, correlation):
        estimate = estimate_difference(by_seed(ours), by_seed(theirs))
        assert estimate.counts == (seeds,)
        covered += compute_p_value(estimate) > ERROR_RATE
    assert covered / DRAWS == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("runs", [(3, 3), (10, 10), (3, 5), (10, 3)])
@pytest.mark.parametrize("spreads", [[1, 1], [5, 1]], ids=["equal", "unequal"])
def test_intervals_of_other_seeds_cover_nineteen_times_in_twenty(runs, spreads):
    chance = np.random.default_rng(sum(runs))
    covered = 0
    for ours, theirs in draw(chance, max(runs), spreads):
        estimate = estimate_difference(by_seed(ours[: runs[0]]), by_seed(theirs[: runs[1]], 100))
        assert estimate.counts == runs
        covered += compute_p_value(estimate) > ERROR_RATE
    assert covered / DRAWS == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("runs", [(2, 2), (2, 10), (5, 2)])
@pytest.mark.parametrize("spreads", [[1, 1], [3, 1]], ids=["equal", "unequal"])
def test_intervals_of_two_runs_of_other_seeds_are_rather_too_wide(runs, spreads):
    chance = np.random.default_rng(sum(runs))
    covered = 0
    for ours, theirs in draw(chance, max(runs), spreads):
        estimate = estimate_difference(by_seed(ours[: runs[0]]), by_seed(theirs[: runs[1]], 100))
        covered += compute_p_value(estimate) > ERROR_RATE
    assert covered / DRAWS > 0.95


@pytest.mark.parametrize(("seeds", "correlation"), [(2, 0.0), (5, 0.9)])
def test_five_equal_variants_get_a_verdict_at_most_once_in_twenty(seeds, correlation):
    chance = np.random.default_rng(seeds)
    wrong = 0
    for first, *others in draw(chance, seeds, [1] * 5, correlation):
        estimates = [estimate_difference(by_seed(other), by_seed(first)) for other in others]
        p_values = [compute_p_value(estimate) for estimate in estimates]
        wrong += min(corrected for corrected, _ in correct_p_values(p_values)) <= ERROR_RATE
    assert wrong / DRAWS < 0.06


def test_pairs_show_what_means_of_correlated_seeds_hide():
    """A difference of one standard deviation, five seeds, correlated by 0.9."""
    shown = {0: 0, 100: 0}
    for ours, theirs in draw(np.random.default_rng(0), 5, [1, 1], 0.9):
        for first_seed in shown:
            shifted = by_seed(figure + 1 for figure in ours)
            estimate = estimate_difference(shifted, by_seed(theirs, first_seed))
            shown[first_seed] += compute_p_value(estimate) <= ERROR_RATE
    assert shown[0] / DRAWS > 0.9
    assert shown[100] / DRAWS < 0.3


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


def test_seeds_needed_give_the_power_that_they_promise():
    rate = ERROR_RATE / 3
    seeds = count_seeds_needed(Estimate(0.0, (0.01**2,), (3,)), 0.01, rate)
    shown = {seeds - 2: 0, seeds: 0}
    for count in shown:
        for figures in np.random.default_rng(0).normal(0.01, 0.01, (DRAWS, count)).tolist():
            estimate = estimate_difference(by_seed(figures), by_seed([0.0] * count))
            shown[count] += compute_p_value(estimate) <= rate
    assert shown[seeds] / DRAWS == pytest.approx(0.82, abs=0.03)
    assert shown[seeds - 2] / DRAWS < 0.8
    assert count_seeds_needed(Estimate(0.0, (1.0,), (3,)), 0.01, rate) is None
