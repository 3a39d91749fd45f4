"""Statistics of measured variants, and how they are reported."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.analysis import variants
from gptmini.analysis.variants import STUDENT_T_95, compare_means
from tests.analysis.samples import variant


def beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by the sum of small steps."""
    places = (np.arange(200_000) + 0.5) / 200_000
    density = places ** (a - 1) * (1 - places) ** (b - 1)
    return density[places < x].sum() / density.sum()


@pytest.mark.parametrize("freedom", range(1, len(STUDENT_T_95) + 1))
def test_the_quantiles_are_those_of_students_t(freedom):
    """For Student's t, P(|t| > q) = I(n/2, 1/2) at n / (n + q²)."""
    quantile = STUDENT_T_95[freedom - 1]
    inside = 1 - beta(0.5, freedom / 2, quantile**2 / (freedom + quantile**2))
    assert inside == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize(("ours", "theirs"), [(3, 3), (2, 5), (1, 4)])
def test_intervals_cover_no_difference_nineteen_times_in_twenty(ours, theirs):
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(4000):
        gap, half = compare_means(chance.normal(size=ours), chance.normal(size=theirs))
        covered += abs(gap) <= half
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.floats(-5, 5))
def test_a_shift_changes_the_difference_but_not_its_interval(values, shift):
    gap, half = compare_means([value + shift for value in values], values)
    assert gap == pytest.approx(shift, abs=1e-9)
    same, again = compare_means(values, values)
    assert same == 0
    if len(values) == 1:
        assert half is None
    else:
        assert half == pytest.approx(again, abs=1e-6)


def test_variants_are_compared_with_the_first():
    first, second = variants.to_json([variant("a", 2.0, 2.1, 2.2), variant("b", 2.5, 2.6, 2.7)])[
        "variants"
    ]
    assert first["bits_per_byte"] == pytest.approx(2.1)
    assert first["bits_per_byte_spread"] == pytest.approx(0.1)
    assert second["to_first"] == pytest.approx(0.5)
    assert second["to_first_95"] == pytest.approx(2.78 * 0.1 * math.sqrt(2 / 3))
    assert second["within_spread"] is False
    assert first["within_spread"] is True


def test_verdicts_distinguish_a_difference_from_the_spread():
    close = [variant("a", 2.0, 2.1, 2.2), variant("b", 2.02, 2.12, 2.22)]
    assert variants.write_verdicts(close) == [
        "b vs a: +0.0200 ± 0.2270 bits/byte (95 %, 3+3 runs): within spread"
    ]
    (worse,) = variants.write_verdicts([variant("a", 2.0, 2.1, 2.2), variant("b", 3.0, 3.1, 3.2)])
    assert worse.endswith(": worse")
    (better,) = variants.write_verdicts([variant("a", 2.0, 2.1, 2.2), variant("b", 1.0, 1.1, 1.2)])
    assert better.endswith(": better")
    (unknown,) = variants.write_verdicts([variant("a", 2.0), variant("b", 3.0)])
    assert unknown.endswith("one run each, so the spread is unknown; try --seeds 3")


def test_runs_measured_on_different_texts_get_a_warning():
    one, two = variant("a", 2.0), variant("b", 2.0)
    assert len(variants.write_verdicts([one, two])) == 1
    two.runs[0] = replace(two.runs[0], text="another")
    assert "measured on different texts" in variants.write_verdicts([one, two])[0]


def test_the_short_table_fits_80_columns_and_the_full_one_has_every_figure():
    many = [variant(name, 1.7001, 1.7002, 1.7003) for name in ("mha", "gqa:2", "window:64")]
    for each in many:
        each.parameters = 124_439_808
    lines = variants.format_table(many).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[1:] == "124,439,808 1.7002 ± 0.0001 32,768 700 10,000 ± 0".split()
    full = variants.format_table(many, full=True).splitlines()
    assert len({len(line) for line in full}) == 1
    cells = [cell.strip() for cell in full[2].strip("|").split("|")]
    assert cells[7:] == ["512", "900, 800", "256 ± 0"]


def test_figures_that_are_missing_leave_their_cells_empty():
    bare = variant("a", 2.0)
    bare.runs[0] = replace(bare.runs[0], tokens_per_second=None, peak_memory=None)
    bare.decode_tokens_per_second = {}
    assert variants.format_table([bare]).splitlines()[1].split() == [
        "a",
        "1,000",
        "2.0000",
        "32,768",
    ]
    assert variants.format_table([bare], full=True).splitlines()[2].endswith(" |")
