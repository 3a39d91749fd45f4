"""Measured runs, grouped into variants, as plain data: statistics, tables and JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gptmini import console

# Half-widths of a 95 % interval in standard errors, for 1 to 10 degrees of freedom (Student 1908).
STUDENT_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

TABLE_LEGEND = "KV bytes and decode tok/s: at full context, one text"


@dataclass(frozen=True)
class RunMeasurement:
    """A trained run. Losses are those of its best checkpoint, in float32; memory is in bytes.

    `text` identifies the text they were measured on, `made_of` that text and the model. `history`
    has tokens seen, seconds and bits per byte at each evaluation during training.
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

    def figures(self, key: str) -> list[float]:
        """One figure of every run that has it."""
        return [value for run in self.runs if (value := getattr(run, key)) is not None]


class Difference(NamedTuple):
    """The difference of two means and the half-width of its 95 % interval, None if unknown."""

    gap: float
    half: float | None

    @property
    def within_spread(self) -> bool | None:
        """Whether the interval contains 0."""
        return None if self.half is None else abs(self.gap) <= self.half

    @property
    def verdict(self) -> str:
        """What it says about a figure of which less is better."""
        if self.half is None:
            return "spread unknown: one run each"
        return "within spread" if self.within_spread else "worse" if self.gap > 0 else "better"


def select_numbers(lines: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """The figures called `keys` from each line of metrics that has them all as finite numbers."""
    rows = [tuple(line.get(key) for key in keys) for line in lines]
    return [row for row in rows if all(isinstance(x, int | float) and abs(x) < 1e300 for x in row)]


def build_histories(
    variants: list[Variant],
) -> tuple[str, dict[str, list[list[tuple[float, float]]]]]:
    """What lies along the axis, and for each variant the bits per byte of its runs against that.

    It is tokens seen if all runs saw the same number, else minutes.
    """
    histories = [run.history for variant in variants for run in variant.runs if run.history]
    by_tokens = len({history[-1][0] for history in histories}) == 1
    curves = {
        variant.name: [
            [
                (tokens / 1e6 if by_tokens else seconds / 60, bits)
                for tokens, seconds, bits in run.history
            ]
            for run in variant.runs
        ]
        for variant in variants
    }
    return "tokens seen (millions)" if by_tokens else "minutes of training", curves


def standard_deviation(values: Sequence[float]) -> float | None:
    """Standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def compare_means(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The difference of two means, with Student's interval for a common variance (1908).

    The interval is unknown if there is only one value on each side.
    """
    gap = statistics.mean(ours) - statistics.mean(theirs)
    freedom = len(ours) + len(theirs) - 2
    if freedom == 0:
        return Difference(gap, None)
    squares = sum(statistics.pvariance(values) * len(values) for values in (ours, theirs))
    error = (squares / freedom * (1 / len(ours) + 1 / len(theirs))) ** 0.5
    return Difference(gap, STUDENT_T_95[min(freedom, len(STUDENT_T_95)) - 1] * error)


def to_json(variants: list[Variant]) -> dict[str, Any]:
    """Every figure as JSON data; each variant is compared with the first."""
    baseline = variants[0].figures("bits_per_byte")
    facts = []
    for variant in variants:
        bits = variant.figures("bits_per_byte")
        to_first = compare_means(bits, baseline)
        facts.append(
            asdict(variant)
            | {
                "bits_per_byte": statistics.mean(bits),
                "bits_per_byte_spread": standard_deviation(bits),
                "to_first": to_first.gap,
                "to_first_95": to_first.half,
                "within_spread": to_first.within_spread,
            }
        )
    return {"variants": facts}


def format_table(variants: list[Variant], full: bool = False) -> str:
    """The main figures for a terminal of 80 columns, or all of them as a Markdown table."""
    return console.format_table(build_rows(variants, full), full)


def build_rows(variants: list[Variant], full: bool) -> list[list[str]]:
    """The main figures, or all of them, under a head.

    The KV cache and the decoding speed are those at the full context.
    """
    figures = []
    for variant in variants:
        decoding = [f"{speed:,.0f}" for speed in variant.decode_tokens_per_second.values()]
        cells = {
            "variant": variant.name,
            "params": f"{variant.parameters:,}",
            "bits/byte": _format_mean(variant.figures("bits_per_byte"), ".4f"),
            "KV bytes": f"{variant.cache_bytes:,}",
            "decode tok/s": "".join(decoding[-1:]),
            "train tok/s": _format_mean(variant.figures("tokens_per_second"), ",.0f"),
        }
        if full:
            peaks = [peak / 2**20 for peak in variant.figures("peak_memory")]
            cells |= {
                "loss (nats/token)": _format_mean(variant.figures("loss"), ".4f"),
                "KV bytes per token": f"{variant.cache_bytes_per_token:,}",
                "decode tok/s at 1/4, 1/2 of context": ", ".join(decoding[:-1]),
                "peak MiB": _format_mean(peaks, ",.0f"),
            }
        figures.append(cells)
    return [list(figures[0]), *(list(cells.values()) for cells in figures)]


def _format_mean(values: list[float], form: str) -> str:
    """The mean, and the standard deviation if there are several values."""
    if not values:
        return ""
    mean, deviation = format(statistics.mean(values), form), standard_deviation(values)
    return mean if deviation is None else f"{mean} ± {deviation:{form}}"


def write_verdicts(variants: list[Variant]) -> list[str]:
    """A sentence per variant: its bits per byte against those of the first."""
    first, *others = variants
    lines = []
    if len({run.text for variant in variants for run in variant.runs}) > 1:
        lines.append("warning: measured on different texts; compare again with --data TEXT")
    for variant in others:
        to_first = compare_means(variant.figures("bits_per_byte"), first.figures("bits_per_byte"))
        line = f"{variant.name} vs {first.name}: {to_first.gap:+.4f}"
        if to_first.half is None:
            line += " bits/byte; one run each, so the spread is unknown; try --seeds 3"
        else:
            line += f" ± {to_first.half:.4f} bits/byte"
            line += f" (95 %, {len(variant.runs)}+{len(first.runs)} runs): {to_first.verdict}"
        lines.append(line)
    return lines
