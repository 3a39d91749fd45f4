"""Holds measured runs, grouped into variants, as plain data: tables and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import mean, stdev
from typing import Any

from gptmini import console
from gptmini.extras.compare.statistics import Difference, conclude, estimate_difference
from gptmini.extras.compare.tune import find_best_rate

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunMeasurement:
    """The figures of a trained run.

    Losses are those of its best checkpoint, on the held-out part `split`, or less where it is not
    `whole`, in windows of `seq_len` tokens that lie side by side. `history` has tokens seen,
    seconds and bits per byte at each evaluation during training. `rules` has, for runs on the
    built-in stories, the share of each rule's places that are right.
    """

    path: str
    split: str
    whole: bool
    seq_len: int
    seed: int
    step: int
    loss: float
    loss_half_width: float | None
    bits_per_byte: float
    bits_per_byte_half_width: float | None
    accuracy: float
    tokens_per_second: float | None
    seconds: float
    history: list[tuple[int, float, float]]
    rules: dict[str, float] = field(default_factory=dict)


@dataclass
class Variant:
    """Runs that differ only by seed, and what they have in common.

    `by_rate` has the multiples of the planned learning rates that the first seed tried, and what
    they brought: bits per byte of the validation part, infinite where training diverged.
    """

    name: str
    runs: list[RunMeasurement]
    parameters: int
    cache_bytes: int  # at full context
    by_rate: list[tuple[float, float]] = field(default_factory=list)

    def list_figures(self, key: str) -> list[float]:
        """Return one figure of every run that has it."""
        values = [getattr(run, key) for run in self.runs]
        return [value for value in values if value is not None]


def build_histories(variants: list[Variant]) -> tuple[str, dict[str, list[Points]]]:
    """Return a label of the x axis and, by variant, the bits per byte of its runs along it.

    The axis is tokens seen if all runs saw the same number, else minutes.
    """
    last_tokens = {run.history[-1][0] for each in variants for run in each.runs if run.history}
    by_tokens = len(last_tokens) == 1
    label = "tokens seen (millions)" if by_tokens else "minutes of training"
    column = 0 if by_tokens else 1
    unit = 1e6 if by_tokens else 60.0
    curves = {
        variant.name: [
            [(line[column] / unit, line[2]) for line in run.history] for run in variant.runs
        ]
        for variant in variants
    }
    return label, curves


def compute_deviation(values: Sequence[float]) -> float | None:
    """Compute the standard deviation; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def compare_with_first(variants: list[Variant]) -> list[Difference]:
    """Compare the bits per byte of each variant but the first with those of the first."""
    first, *others = [{run.seed: run.bits_per_byte for run in variant.runs} for variant in variants]
    return conclude([estimate_difference(other, first) for other in others])


def to_json(variants: list[Variant]) -> dict[str, Any]:
    """Return every figure as JSON data; each variant but the first is compared with the first."""
    differences = [None, *compare_with_first(variants)]
    entries = []
    for variant, to_first in zip(variants, differences, strict=True):
        bits = variant.list_figures("bits_per_byte")
        entry = asdict(variant)
        entry["by_rate"] = [
            (rate, each if isfinite(each) else None) for rate, each in variant.by_rate
        ]
        entry["bits_per_byte"] = mean(bits)
        entry["bits_per_byte_spread"] = compute_deviation(bits)
        entry["to_first"] = None
        if to_first is not None:
            entry["to_first"] = asdict(to_first) | {"verdict": to_first.verdict}
        entries.append(entry)
    return {"variants": entries}


def build_rows(variants: list[Variant]) -> list[list[str]]:
    """Return the main figures under a row of headings."""
    rows = [["variant", "params", "bits/byte", "KV bytes", "train tok/s"]]
    for variant in variants:
        bits = _format_mean(variant.list_figures("bits_per_byte"), ".4f")
        speed = _format_mean(variant.list_figures("tokens_per_second"), ",.0f")
        cache = f"{variant.cache_bytes:,}"
        rows.append([variant.name, f"{variant.parameters:,}", bits, cache, speed])
    return rows


def _format_mean(values: list[float], form: str) -> str:
    """Format the mean, with the standard deviation if there are several values."""
    if not values:
        return ""
    deviation = compute_deviation(values)
    spread = "" if deviation is None else f" ± {deviation:{form}}"
    return f"{mean(values):{form}}{spread}"


def format_comparison(variants: list[Variant], as_markdown: bool = False) -> str:
    """Format the table, the differences and what they mean, for 80 columns or as Markdown."""
    tables = [(build_rows(variants), describe_table(variants))]
    if any(run.rules for variant in variants for run in variant.runs):
        note = "rules: % of the words that a rule of the stories determines are right"
        tables.append((build_rule_rows(variants), [note]))
    if variants[0].by_rate:
        note = "x: times the planned rates; bits/byte of one seed, validation part"
        tables.append((build_rate_rows(variants), [note]))
    if len(variants) > 1:
        tables.append((build_difference_rows(variants), describe_differences(variants)))
    tables[-1][1].extend(list_warnings(variants))
    bullet = "\n- " if as_markdown else "\n"
    return "\n\n".join(
        f"{console.format_table(rows, as_markdown)}\n{bullet}{bullet.join(notes)}"
        for rows, notes in tables
    )


def describe_table(variants: list[Variant]) -> list[str]:
    """Say, in short lines, what the figures of the table are."""
    runs = [run for variant in variants for run in variant.runs]
    extent = "" if all(run.whole for run in runs) else "some of "
    lines = [
        f"bits/byte: of each run's best checkpoint, on {extent}the {runs[0].split} part",
        "KV bytes: at full context, one text",
    ]
    if any(len(variant.runs) > 1 for variant in variants):
        lines.append("±: standard deviation over seeds")
    return lines


def build_rule_rows(variants: list[Variant]) -> list[list[str]]:
    """Return how often each rule of the stories is followed, in %, under a row of headings."""
    runs = [run for variant in variants for run in variant.runs]
    names = list(dict.fromkeys(name for run in runs for name in run.rules))
    rows = [["rules", *names]]
    for variant in variants:
        shares = [[run.rules[name] for run in variant.runs if name in run.rules] for name in names]
        cells = [f"{100 * mean(each):.0f}" if each else "" for each in shares]
        rows.append([variant.name, *cells])
    return rows


def build_rate_rows(variants: list[Variant]) -> list[list[str]]:
    """Return what each multiple of the planned learning rates brought, under a row of headings."""
    rates = sorted({rate for variant in variants for rate, _ in variant.by_rate})
    rows = [["rates", *(f"{rate:g}x" for rate in rates), "best", "brought"]]
    for variant in variants:
        tried = dict(variant.by_rate)
        best = find_best_rate(tried)
        cells = [f"{tried[rate]:.4f}" if rate in tried else "" for rate in rates]
        brought = f"{tried[best] - tried[1.0]:+.4f}" if isfinite(tried[1.0]) else ""
        rows.append([variant.name, *cells, f"{best:g}x", brought])
    return rows


def list_warnings(variants: list[Variant]) -> list[str]:
    """Say what speaks against the comparison."""
    warnings = []
    if variants[0].by_rate and variants[0].runs[0].split == "validation":
        warnings.append("warning: the rates were chosen on this very part; set data.test to 0.1")
    steps = max(run.step for variant in variants for run in variant.runs)
    if 0 < steps < 100:  # an imported run has made none
        warnings.append(
            f"warning: all were best by step {steps}; longer training may order them otherwise"
        )
    lengths = sorted({run.seq_len for variant in variants for run in variant.runs})
    if len(lengths) > 1:
        windows = ", ".join(map(str, lengths))
        warnings.append(f"warning: windows of {windows} tokens; longer ones have more context")
    return warnings


def build_difference_rows(variants: list[Variant]) -> list[list[str]]:
    """Return how each variant differs from the first, under a row of headings."""
    first, *others = variants
    rows = [[f"vs {first.name}", "bits/byte", "± 95 %", "p", "runs", "verdict"]]
    for variant, found in zip(others, compare_with_first(variants), strict=True):
        row = [variant.name, f"{found.difference:+.4f}"]
        if found.half_width is None or found.p_corrected is None:
            row += ["", ""]
        else:
            row += [f"{found.half_width:.4f}", f"{found.p_corrected:.3f}"]
        counts = "+".join(map(str, found.counts))
        row += [counts if "+" in counts else f"{counts} pairs", found.verdict]
        rows.append(row)
    return rows


def describe_differences(variants: list[Variant]) -> list[str]:
    """Say, in short lines, what the figures of the differences are."""
    lines = []
    n_known = sum(found.p is not None for found in compare_with_first(variants))
    if n_known:
        corrected = f", corrected for {n_known} comparisons" if n_known > 1 else ""
        lines.append(f"± 95 % and p: over seeds{corrected}; pairs: of equal seed")
    if min(len(variant.runs) for variant in variants) < 3:
        lines.append("with fewer than 3 seeds a verdict may be luck, and unresolved is not equal")
    return lines
