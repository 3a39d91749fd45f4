"""Estimates a difference between two variants from a few training runs, and how sure it is.

Runs of equal seed read the same text in the same order, so they are compared pair by pair (Student
1908). Runs of other seeds are compared by their means; their spreads may differ (Welch 1947).
Several comparisons are corrected together (Holm 1979). All of it assumes that the figures of a
variant are normally distributed over seeds. Loads no torch.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from gptmini.errors import make_missing_package_error

ERROR_RATE = 0.05  # of all verdicts of a comparison together, if no variant differs

# The difference of two means, the numbers of pairs or of runs on each side, and scipy's t test.
Estimate = tuple[float, tuple[int, ...], Any]


@dataclass(frozen=True)
class Difference:
    """An estimate among several, corrected for their number. Unknown figures are None.

    The interval is `difference` ± `half_width`. On its own it covers the true difference with the
    probability `confidence`, at least 95 %, and it excludes 0 exactly if `p_corrected` is at most
    5 %.
    """

    difference: float
    counts: tuple[int, ...]
    half_width: float | None = None
    confidence: float | None = None
    p: float | None = None
    p_corrected: float | None = None

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

    With two seeds or more in common, only those count, as pairs. With a single run on a side, the
    test is None.
    """
    common = [seed for seed in ours if seed in theirs]
    sides = [list(ours.values()), list(theirs.values())]
    counts = (len(ours), len(theirs))
    test = None
    # scipy warns where figures are nearly equal, as runs of two names for one variant are.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        if len(common) > 1:
            pairs = [ours[seed] - theirs[seed] for seed in common]
            return fmean(pairs), (len(pairs),), import_scipy().ttest_1samp(pairs, 0)
        if min(counts) > 1:
            test = import_scipy().ttest_ind(*sides, equal_var=False)
    return fmean(sides[0]) - fmean(sides[1]), counts, test


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


def conclude(estimates: Sequence[Estimate]) -> list[Difference]:
    """Correct estimates for their number."""
    # Variants with equal figures have no spread, and scipy says NaN: they differ by nothing.
    p_values = [
        float(np.nan_to_num(test.pvalue, nan=1.0)) for _, _, test in estimates if test is not None
    ]
    corrections = zip(p_values, correct_p_values(p_values), strict=True)
    differences = []
    for difference, counts, test in estimates:
        if test is None:
            differences.append(Difference(difference, counts))
            continue
        p, (p_corrected, rate) = next(corrections)
        high = test.confidence_interval(1 - rate).high
        differences.append(
            Difference(
                difference,
                counts,
                half_width=float(high - difference),
                confidence=1 - rate,
                p=p,
                p_corrected=p_corrected,
            )
        )
    return differences


def import_scipy() -> Any:
    """Import what spreads over several seeds need; MachineError if it is not installed."""
    try:
        from scipy import stats  # noqa: PLC0415
    except ImportError:
        raise make_missing_package_error("compare", "scipy", "compare") from None
    return stats
