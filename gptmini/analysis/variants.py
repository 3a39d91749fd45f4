"""Holds measured runs, grouped into variants, as plain data: statistics, tables and JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gptmini import console

# Half-widths of a 95 % interval in standard errors, for 1 to 10 degrees of freedom (Student 1908).
STUDENT_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

TABLE_LEGEND = "KV bytes and decode tok/s: at full context, one text"
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunMeasurement:
    """The figures of a trained run.

    Losses are those of its best checkpoint, in float32; memory is in bytes. `text` identifies the
    text that losses were measured on, `made_of` that text and the model. `history` has tokens seen,
    seconds and bits per byte at each evaluation during training.
    """

    path: str
    made_of: str
    text: str
    seed: int
    step: int
    loss: float
    loss_error: float | None
    bits_per_byte: float
    bits_per_byte_error: float | None
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
    decode_tokens_per_second: dict[int, float] = field(default_factory=dict)  # by context

    def list_figures(self, key: str) -> list[float]:
        """Return one figure of every run that has it."""
        values = [getattr(run, key) for run in self.runs]
        return [value for value in values if value is not None]


class Difference(NamedTuple):
    """The difference of two means and the half-width of its 95 % interval, None if unknown."""

    mean: float
    half_width: float | None

    @property
    def within_spread(self) -> bool | None:
        """Whether the interval contains 0."""
        return None if self.half_width is None else abs(self.mean) <= self.half_width

    @property
    def verdict(self) -> str:
        """Say in words what it means for a figure of which less is better."""
        if self.half_width is None:
            return "spread unknown: one run each"
        if self.within_spread:
            return "within spread"
        return "worse" if self.mean > 0 else "better"


def select_numbers(lines: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """Return the figures `keys` of each line of metrics that has them all as finite numbers."""
    rows = [tuple(line.get(key) for key in keys) for line in lines]
    return [row for row in rows if all(_is_finite_number(value) for value in row)]


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


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
    return statistics.stdev(values) if len(values) > 1 else None


def compare_means(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Compare two means, with Student's interval for a common variance (1908).

    The interval is unknown if there is only one value on each side.
    """
    difference = statistics.mean(ours) - statistics.mean(theirs)
    degrees_of_freedom = len(ours) + len(theirs) - 2
    if degrees_of_freedom == 0:
        return Difference(difference, None)
    sum_of_squares = sum(statistics.pvariance(values) * len(values) for values in (ours, theirs))
    variance = sum_of_squares / degrees_of_freedom
    standard_error = (variance * (1 / len(ours) + 1 / len(theirs))) ** 0.5
    # Beyond 10 degrees of freedom the interval is a little too wide.
    place = min(degrees_of_freedom, len(STUDENT_T_95)) - 1
    return Difference(difference, STUDENT_T_95[place] * standard_error)


def to_json(variants: list[Variant]) -> dict[str, Any]:
    """Return every figure as JSON data; each variant is compared with the first."""
    baseline = variants[0].list_figures("bits_per_byte")
    entries = []
    for variant in variants:
        bits = variant.list_figures("bits_per_byte")
        to_first = compare_means(bits, baseline)
        entry = asdict(variant)
        entry["bits_per_byte"] = statistics.mean(bits)
        entry["bits_per_byte_spread"] = compute_deviation(bits)
        entry["to_first"] = to_first.mean
        entry["to_first_95"] = to_first.half_width
        entry["within_spread"] = to_first.within_spread
        entries.append(entry)
    return {"variants": entries}


def format_table(variants: list[Variant], full: bool = False) -> str:
    """Format the main figures for 80 columns, or all of them as a Markdown table."""
    return console.format_table(build_rows(variants, full), full)


def build_rows(variants: list[Variant], full: bool) -> list[list[str]]:
    """Return the main figures, or all of them, under a row of headings.

    The KV cache and the decoding speed are those at the full context.
    """
    rows = []
    for variant in variants:
        speeds = [f"{speed:,.0f}" for speed in variant.decode_tokens_per_second.values()]
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
    if not values:
        return ""
    mean = statistics.mean(values)
    deviation = compute_deviation(values)
    return f"{mean:{form}}" if deviation is None else f"{mean:{form}} ± {deviation:{form}}"


def write_verdicts(variants: list[Variant]) -> list[str]:
    """Write a sentence per variant: its bits per byte against those of the first."""
    first, *others = variants
    lines = []
    texts = {run.text for variant in variants for run in variant.runs}
    if len(texts) > 1:
        lines.append("warning: measured on different texts; compare again with --data TEXT")
    baseline = first.list_figures("bits_per_byte")
    for variant in others:
        to_first = compare_means(variant.list_figures("bits_per_byte"), baseline)
        line = f"{variant.name} vs {first.name}: {to_first.mean:+.4f}"
        if to_first.half_width is None:
            line += " bits/byte; one run each, so the spread is unknown; try --seeds 3"
        else:
            line += f" ± {to_first.half_width:.4f} bits/byte"
            line += f" (95 %, {len(variant.runs)}+{len(first.runs)} runs): {to_first.verdict}"
        lines.append(line)
    return lines
