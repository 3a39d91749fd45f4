"""Intervals and verdicts over seeds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtr

from gptmini.extras.compare.statistics import (
    ERROR_RATE,
    conclude,
    correct_p_values,
    estimate_difference,
)


def test_only_seeds_that_both_have_are_paired():
    ours, theirs = {1: 2.5, 2: 2.6, 3: 9.0}, {2: 2.0, 1: 2.1, 7: 0.0}
    (paired,) = conclude([estimate_difference(ours, theirs)])
    assert paired.counts == (2,)
    assert paired.difference == pytest.approx(0.5)
    assert paired.half_width == pytest.approx(12.706 * 0.1, rel=1e-3)
    _, counts, _ = estimate_difference(ours, {2: 2.0, 7: 2.1})  # a single one in common
    assert counts == (3, 2)
    _, counts, test = estimate_difference(ours, {1: 2.0})
    assert (counts, test) == ((3, 1), None)


def test_means_of_other_seeds_may_have_other_spreads():
    (found,) = conclude([estimate_difference({1: 2.5, 2: 2.6, 3: 2.7}, {4: 2.0, 5: 2.4})])
    assert found.difference == pytest.approx(0.4)
    ours, theirs = 0.01 / 3, 0.08 / 2  # squared errors of the two means
    freedom = (ours + theirs) ** 2 / (ours**2 / 2 + theirs**2)  # by Welch's formula
    assert found.p == pytest.approx(2 * stdtr(freedom, -0.4 / math.sqrt(ours + theirs)))


def test_holm_corrects_as_in_his_example():
    """As R's p.adjust does; the rates are those that each is tested at, up to the first to fail."""
    adjusted = correct_p_values([0.01, 0.04, 0.03, 0.005])
    assert [corrected for corrected, _ in adjusted] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [rate for _, rate in adjusted] == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert correct_p_values([]) == []


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(0.001, 1), st.integers(2, 12)), min_size=1, max_size=6
    )
)
def test_an_interval_excludes_zero_exactly_if_there_is_a_verdict(drawn):
    estimates = []
    for mean, spread, count in drawn:
        ours = {seed: mean + spread * (-1) ** seed for seed in range(count)}
        estimates.append(estimate_difference(ours, dict.fromkeys(ours, 0.0)))
    for found in conclude(estimates):
        assert found.confidence >= 1 - ERROR_RATE
        if abs(found.p_corrected - ERROR_RATE) > 1e-9:  # not on the border
            excludes_zero = abs(found.difference) > found.half_width
            assert excludes_zero == (found.verdict != "unresolved")


def test_unknown_spreads_get_no_verdict_and_do_not_count():
    one = estimate_difference({1: 2.5}, {1: 2.0})
    three = estimate_difference({1: 2.5, 2: 2.6, 3: 2.7}, {1: 2.0, 2: 2.2, 3: 2.1})
    unknown, known = conclude([one, three])
    assert unknown.verdict == "one run: spread unknown"
    assert (unknown.half_width, unknown.p) == (None, None)
    assert known == conclude([three])[0]
    assert known.confidence == 0.95


def test_equal_runs_differ_by_nothing():
    (same,) = conclude([estimate_difference({1: 2.0, 2: 2.1}, {1: 2.0, 2: 2.1})])
    assert (same.verdict, same.p, same.half_width) == ("unresolved", 1, 0)
