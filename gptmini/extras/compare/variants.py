"""Holds measured runs, grouped into variants, as plain data: tables and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median, stdev
from typing import Any

from gptmini import console
from gptmini.extras.compare.statistics import MAX_SEEDS, Difference, conclude, estimate_difference
from gptmini.figures.plots import Points

NOTABLE_DIFFERENCE = 0.01  # bits per byte that the table says the number of seeds for
PARTS = {"validation": "the validation part", "test": "the test part", None: "the text given"}


@dataclass(frozen=True)
class RunMeasurement:
    """The figures of a trained run.

    Losses are those of its best checkpoint, in float32; memory is in bytes. `text` identifies the
    text that losses were measured on, `split` is the part of the run's own text that it is, or
    None; its windows of `seq_len` tokens are `stride` apart. `history` has tokens seen, seconds
    and bits per byte at each evaluation during training.
    """

    path: str
    text: str
    split: str | None
    seq_len: int
    stride: int
    seed: int
    step: int
    loss: float
    loss_half_width: float | None
    bits_per_byte: float
    bits_per_byte_half_width: float | None
    accuracy: float
    tokens_per_second: float | None
    seconds: float
    peak_memory: int | None
    history: list[tuple[int, float, float]]


@dataclass
class Variant:
    """Runs that differ only by seed, and what they have in common."""

    name: str
    runs: list[RunMeasurement]
    parameters: int
    context_length: int
    cache_bytes_per_token: int
    cache_bytes: int  # at full context
    # By context; one speed for each round of timing.
    decode_tokens_per_second: dict[int, list[float]] = field(default_factory=dict)

    def list_figures(self, key: str) -> list[float]:
        """Return one figure of every run that has it."""
        values = [getattr(run, key) for run in self.runs]
        return [value for value in values if value is not None]


def build_histories(variants: list[Variant]) -> tuple[str, dict[str, list[Points]]]:
    """Return a label of the x axis and, by variant, the bits per byte of its runs along it.

    The axis is tokens seen if all runs saw the same number, else minutes.
    """
    histories = [run.history for variant in variants for run in variant.runs if run.history]
    last_tokens = {history[-1][0] for history in histories}
    if len(last_tokens) == 1:
        label = "tokens seen (millions)"
        curves = {
            variant.name: [
                [(tokens / 1e6, bits) for tokens, _, bits in run.history] for run in variant.runs
            ]
            for variant in variants
        }
    else:
        label = "minutes of training"
        curves = {
            variant.name: [
                [(seconds / 60, bits) for _, seconds, bits in run.history] for run in variant.runs
            ]
            for variant in variants
        }
    return label, curves


def drop_steep_start(points: Points) -> Points:
    """Return a curve without its first quarter, which is steep and would flatten the rest."""
    return points[len(points) // 4 :]


def compute_deviation(values: Sequence[float]) -> float | None:
    """Compute the standard deviation; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def compare_with_first(variants: list[Variant]) -> list[Difference]:
    """Compare the bits per byte of each variant but the first with those of the first."""
    first, *others = [{run.seed: run.bits_per_byte for run in variant.runs} for variant in variants]
    estimates = [estimate_difference(other, first) for other in others]
    return conclude(estimates, NOTABLE_DIFFERENCE)


def to_json(variants: list[Variant]) -> dict[str, Any]:
    """Return every figure as JSON data; each variant but the first is compared with the first."""
    differences = [None, *compare_with_first(variants)]
    entries = []
    for variant, to_first in zip(variants, differences, strict=True):
        bits = variant.list_figures("bits_per_byte")
        entry = asdict(variant)
        entry["bits_per_byte"] = mean(bits)
        entry["bits_per_byte_spread"] = compute_deviation(bits)
        entry["to_first"] = None
        if to_first is not None:
            entry["to_first"] = asdict(to_first) | {"verdict": to_first.verdict}
        entries.append(entry)
    return {"notable_difference": NOTABLE_DIFFERENCE, "variants": entries}


def format_table(variants: list[Variant], full: bool = False) -> str:
    """Format the main figures for 80 columns, or all of them as a Markdown table."""
    return console.format_table(build_rows(variants, full), full)


def build_rows(variants: list[Variant], full: bool) -> list[list[str]]:
    """Return the main figures, or all of them, under a row of headings.

    The KV cache and the decoding speed are those at the full context.
    """
    rows = []
    for variant in variants:
        speeds = [
            _format_center(median(rounds), rounds, ",.0f")
            for rounds in variant.decode_tokens_per_second.values()
        ]
        cells = {
            "variant": variant.name,
            "params": f"{variant.parameters:,}",
            "bits/byte": _format_mean(variant.list_figures("bits_per_byte"), ".4f"),
            "KV bytes": f"{variant.cache_bytes:,}",
            "decode tok/s": speeds[-1] if speeds else "",
            "train tok/s": _format_mean(variant.list_figures("tokens_per_second"), ",.0f"),
        }
        if full:
            peak_mib = [peak / 2**20 for peak in variant.list_figures("peak_memory")]
            cells["loss (nats/token)"] = _format_mean(variant.list_figures("loss"), ".4f")
            cells["KV bytes per token"] = f"{variant.cache_bytes_per_token:,}"
            cells["decode tok/s at 1/4, 1/2 of context"] = ", ".join(speeds[:-1])
            cells["peak MiB"] = _format_mean(peak_mib, ",.0f")
        rows.append(cells)
    headings = list(rows[0])
    return [headings, *(list(cells.values()) for cells in rows)]


def _format_mean(values: list[float], form: str) -> str:
    """Format the mean, with the standard deviation if there are several values."""
    return _format_center(mean(values), values, form) if values else ""


def _format_center(center: float, values: list[float], form: str) -> str:
    """Format the center of some values, with their standard deviation if there are several."""
    deviation = compute_deviation(values)
    return f"{center:{form}}" if deviation is None else f"{center:{form}} ± {deviation:{form}}"


def format_comparison(variants: list[Variant], full: bool = False) -> str:
    """Format the table, the differences and what they mean, for 80 columns or as Markdown."""
    bullet = "- " if full else ""
    lines = [format_table(variants, full), ""]
    lines += [bullet + line for line in describe_table(variants)]
    if len(variants) > 1:
        lines += ["", console.format_table(build_difference_rows(variants), full), ""]
        lines += [bullet + line for line in describe_differences(variants)]
    lines += [bullet + line for line in list_warnings(variants)]
    return "\n".join(lines) + "\n"


def describe_table(variants: list[Variant]) -> list[str]:
    """Say, in short lines, what the figures of the table are."""
    runs = [run for variant in variants for run in variant.runs]
    overlap = any(run.stride < run.seq_len for run in runs)
    windows = ", in windows that overlap by half" if overlap else ""
    return [
        f"bits/byte: on {PARTS[runs[0].split]}{windows}",
        "KV bytes and decode tok/s: at full context, one text",
        "±: standard deviation over seeds; of decode tok/s, over rounds of timing",
    ]


def list_warnings(variants: list[Variant]) -> list[str]:
    """Say what speaks against the comparison."""
    texts = {run.text for variant in variants for run in variant.runs}
    if len(texts) > 1:
        return ["warning: measured on different texts; compare again with --data TEXT"]
    return []


def build_difference_rows(variants: list[Variant]) -> list[list[str]]:
    """Return how each variant differs from the first, under a row of headings."""
    first, *others = variants
    headings = [
        f"vs {first.name}",
        "bits/byte",
        "± 95 %",
        "p",
        "runs",
        f"seeds for {NOTABLE_DIFFERENCE}",
        "verdict",
    ]
    rows = [headings]
    for variant, found in zip(others, compare_with_first(variants), strict=True):
        row = [variant.name, f"{found.difference:+.4f}"]
        if found.half_width is None or found.p_corrected is None:
            row += ["", ""]
        else:
            row += [f"{found.half_width:.4f}", f"{found.p_corrected:.3f}"]
        row += [_format_counts(found.counts), _format_seeds_needed(found), found.verdict]
        rows.append(row)
    return rows


def _format_counts(counts: tuple[int, ...]) -> str:
    if len(counts) == 1:
        return f"{counts[0]} pairs"
    return "+".join(map(str, counts))


def _format_seeds_needed(found: Difference) -> str:
    if found.half_width is None:
        return ""
    return f"{MAX_SEEDS:,}+" if found.seeds_needed is None else f"{found.seeds_needed:,}"


def describe_differences(variants: list[Variant]) -> list[str]:
    """Say, in short lines, what the figures of the differences are."""
    lines = []
    n_known = sum(found.p is not None for found in compare_with_first(variants))
    if n_known:
        corrected = f", corrected for {n_known} comparisons" if n_known > 1 else ""
        lines += [
            f"± 95 % and p: over seeds{corrected}; pairs: of equal seed",
            f"seeds for {NOTABLE_DIFFERENCE}: per variant, to show such a difference 4 times in 5",
        ]
    if n_known < len(variants) - 1:
        lines.append("one run says nothing of the spread over seeds; give several")
    return lines
