"""Estimates a difference between two variants from a few training runs, and how sure it is.

Runs of equal seed read the same text in the same order, so they are compared pair by pair (Student
1908). Runs of other seeds are compared by their means; their spreads may differ (Welch 1947).
Several comparisons are corrected together (Holm 1979). All of it assumes that the figures of a
variant are normally distributed over seeds. Loads no torch.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from gptmini.errors import make_missing_package_error

ERROR_RATE = 0.05  # of all verdicts of a comparison together, if no variant differs
POWER = 0.8  # how often the seeds needed for a difference show it
MAX_SEEDS = 1000


@dataclass(frozen=True)
class Estimate:
    """An estimated difference of two means.

    `variances` and `counts` are those of the figures behind it: of the differences of pairs, or of
    each of the two sides. `variances` is empty where a side has a single run.
    """

    difference: float
    variances: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def standard_error(self) -> float:
        return math.sqrt(sum(self._list_squared_errors()))

    @property
    def freedom(self) -> float:
        """Degrees of freedom: n - 1 for n pairs, else by Welch's formula.

        Two runs that agree by accident would mislead the formula: beside more runs it would cover
        as little as 88 % where 95 are claimed. Their own single degree covers 96 or more.
        """
        if min(self.counts) == 2 < max(self.counts):
            return 1
        squared_errors = self._list_squared_errors()
        total = sum(squared_errors)
        if total == 0:
            return min(self.counts) - 1
        shares = [error / total for error in squared_errors]
        return 1 / sum(
            share**2 / (count - 1) for share, count in zip(shares, self.counts, strict=True)
        )

    def _list_squared_errors(self) -> list[float]:
        return [spread / count for spread, count in zip(self.variances, self.counts, strict=True)]


@dataclass(frozen=True)
class Difference:
    """An estimate among several, corrected for their number. Unknown figures are None.

    The interval is `difference` ± `half_width`. On its own it covers the true difference with the
    probability `confidence`, at least 95 %, and it excludes 0 exactly if `p_corrected` is at most
    5 %. With `seeds_needed`, a true difference of a given size would show 4 times in 5.
    """

    difference: float
    counts: tuple[int, ...]
    half_width: float | None = None
    confidence: float | None = None
    p: float | None = None
    p_corrected: float | None = None
    seeds_needed: int | None = None

    @property
    def verdict(self) -> str:
        """Say in a word what it means for a figure where less is better."""
        if self.p_corrected is None:
            return "one run: spread unknown"
        if self.p_corrected > ERROR_RATE:
            return "unresolved"
        return "worse" if self.difference > 0 else "better"


def estimate_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Estimate how far the mean of our figures, by seed, is from the mean of theirs.

    With two seeds or more in common, only those count, as pairs.
    """
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(pairs) > 1:
        return Estimate(fmean(pairs), (_compute_variance(pairs),), (len(pairs),))
    sides = [list(ours.values()), list(theirs.values())]
    counts = (len(ours), len(theirs))
    difference = fmean(sides[0]) - fmean(sides[1])
    if min(counts) < 2:
        return Estimate(difference, (), counts)
    return Estimate(difference, tuple(_compute_variance(side) for side in sides), counts)


def _compute_variance(figures: list[float]) -> float:
    return float(np.var(figures, ddof=1))


def compute_p_value(estimate: Estimate) -> float:
    """Compute how often a difference at least as large would show if there were none."""
    if estimate.standard_error == 0:
        return float(estimate.difference == 0)
    t = estimate.difference / estimate.standard_error
    return compute_t_tails(t, estimate.freedom)


def compute_half_width(estimate: Estimate, error_rate: float) -> float:
    """Compute the half-width of the interval that misses the true difference at this rate."""
    return find_t_quantile(error_rate, estimate.freedom) * estimate.standard_error


def correct_p_values(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Correct p-values for their number; returns each with the rate that its test is held to.

    By Holm's method, the smallest of n counts n times, the next n - 1 times, and so on, none for
    less than the one before it. If no variant differs, the chance of any verdict at all is then at
    most ERROR_RATE, however the estimates depend on each other.
    """
    n = len(p_values)
    adjusted = [(0.0, 0.0)] * n
    corrected = 0.0
    rate = ERROR_RATE
    for place, number in enumerate(sorted(range(n), key=p_values.__getitem__)):
        if corrected <= ERROR_RATE:  # from the first that is not rejected, the rate stays
            rate = ERROR_RATE / (n - place)
        corrected = max(corrected, min(1.0, p_values[number] * (n - place)))
        adjusted[number] = (corrected, rate)
    return adjusted


def conclude(estimates: Sequence[Estimate], notable: float) -> list[Difference]:
    """Correct estimates for their number, and count the seeds that a `notable` difference needs."""
    known = [estimate for estimate in estimates if estimate.variances]
    p_values = [compute_p_value(estimate) for estimate in known]
    corrections = zip(p_values, correct_p_values(p_values), strict=True)
    differences = []
    for estimate in estimates:
        if not estimate.variances:
            differences.append(Difference(estimate.difference, estimate.counts))
            continue
        p, (p_corrected, rate) = next(corrections)
        differences.append(
            Difference(
                estimate.difference,
                estimate.counts,
                half_width=compute_half_width(estimate, rate),
                confidence=1 - rate,
                p=p,
                p_corrected=p_corrected,
                seeds_needed=count_seeds_needed(estimate, notable, ERROR_RATE / len(known)),
            )
        )
    return differences


def count_seeds_needed(estimate: Estimate, notable: float, error_rate: float) -> int | None:
    """Count the seeds with which a true difference shows with POWER; None beyond MAX_SEEDS.

    It assumes that more seeds have the same variances, which a few seeds estimate roughly.
    """

    def suffices(seeds: int) -> bool:
        planned = Estimate(notable, estimate.variances, (seeds,) * len(estimate.counts))
        # Student's t in place of the noncentral t, which gives the same number within a seed.
        power_quantile = find_t_quantile(2 * (1 - POWER), planned.freedom)
        margin = power_quantile * planned.standard_error
        return compute_half_width(planned, error_rate) + margin <= notable

    seeds = bisect_left(range(MAX_SEEDS + 1), True, lo=2, key=suffices)
    return seeds if seeds <= MAX_SEEDS else None


# -- Student's distribution ------------------------------------------------------------------------


def find_t_quantile(error_rate: float, freedom: float) -> float:
    """Find what Student's |t| exceeds with the probability `error_rate`."""
    return float(-import_scipy().stdtrit(freedom, error_rate / 2))


def compute_t_tails(t: float, freedom: float) -> float:
    """Compute how often Student's |t| is at least this large; `freedom` need not be whole."""
    return float(2 * import_scipy().stdtr(freedom, -abs(t)))


def import_scipy() -> Any:
    """Import what spreads over several seeds need; MachineError if it is not installed."""
    try:
        from scipy import special  # noqa: PLC0415
    except ImportError:
        raise make_missing_package_error("compare", "scipy", "compare") from None
    return special
