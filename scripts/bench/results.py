"""Tables of raw runs: what a bench measures, the file that keeps it, and figures read from it.

A table has a list of values in each cell, one for each round or seed. What is shown of it is their
median. Columns are shown on their own or as an expression: `A / B` is the median of the ratios of
equal rounds, `A - B` of their differences, `A / 60` and `A * 100` of scaled values. A key names a
figure of the results, as pages quote it:

    TABLE: ROW: COLUMN or expression
    TABLE: ROW: lowest A / B         of all rounds; also `highest`
"""

import json
import math
import operator
import statistics
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results.json"
SHAKESPEARE = ROOT / "data" / "tinyshakespeare.txt"
# How much a bench does: `trial` only shows that it runs, `full` takes a night for all of them.
Extent = Literal["trial", "quick", "full"]
Runs = list[float]
OPERATORS: dict[str, Callable[[float, float], float]] = {
    " / ": operator.truediv,
    " - ": operator.sub,
    " * ": operator.mul,
}
PICKS: dict[str, Callable[[Runs], float]] = {"lowest ": min, "highest ": max}


@dataclass
class Table:
    """A table of a bench: the runs of each row and column.

    `shown` are the columns as they are drawn, expressions among them, and `digits` how many
    significant digits a value has then.
    """

    name: str
    unit: str
    shown: list[str]
    digits: int = 3
    rows: dict[str, dict[str, Runs]] = field(default_factory=dict)

    def append(self, row: str, column: str, value: float) -> None:
        assert ": " not in row + column  # it separates the parts of a key
        self.rows.setdefault(row, {}).setdefault(column, []).append(value)

    def compute(self, row: str, expression: str) -> Runs:
        """Return a column or an expression of columns, run by run; KeyError names what is not."""
        columns = self.rows[row]
        if expression in columns:
            return columns[expression]
        for sign, apply in OPERATORS.items():
            left, found, right = expression.partition(sign)
            if not found:
                continue
            values = columns[left]
            if right in columns:
                return [apply(*pair) for pair in zip(values, columns[right], strict=True)]
            if right.isdecimal():
                return [apply(value, int(right)) for value in values]
        raise KeyError(expression)

    def draw(self) -> str:
        """Draw the table in Markdown."""
        headings = [self.unit, *self.shown]
        lines = [headings, ["---"] * len(headings)]
        for row in self.rows:
            lines.append([row, *(self._draw_cell(row, column) for column in self.shown)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def dump(self) -> dict[str, Any]:
        """Return what a results file holds of it, under its name."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    def _draw_cell(self, row: str, expression: str) -> str:
        try:
            runs = self.compute(row, expression)
        except KeyError:
            return ""
        if expression in self.rows[row]:
            return format_value(statistics.median(runs), self.digits)
        if " / " in expression:
            middle, *ends = (
                f"{value:.2f}" if value < 10 else f"{value:.1f}" for value in compute_span(runs)
            )
            middle += " x"
        else:
            middle, *ends = (f"{value:+.3f}" for value in compute_span(runs))
        return middle if len(runs) == 1 else f"{middle} ({' to '.join(ends)})"


def compute_span(runs: Runs) -> tuple[float, float, float]:
    """Return the median of runs, the lowest and the highest."""
    return statistics.median(runs), min(runs), max(runs)


def format_value(value: float, digits: int) -> str:
    if math.isnan(value):
        return "never"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole)}f}"


def check_text(path: Path) -> Path:
    """Return the path of Tiny Shakespeare, or say where to get it."""
    if not path.exists():
        sys.exit(f"{path} is not there; run gptmini data fetch tinyshakespeare")
    return path


class Results:
    """A results file: the machine, the commit, and the tables of each bench."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.tables = {
            name: Table(name, **parts)
            for bench in facts["benches"].values()
            for name, parts in bench["tables"].items()
        }

    @classmethod
    def read(cls, path: Path = RESULTS) -> "Results":
        return cls(json.loads(path.read_text("utf-8")))

    def find(self, key: str) -> float:
        """Return the figure that a key names; KeyError if there is none."""
        name, row, expression = key.split(": ")
        pick: Callable[[Runs], float] = statistics.median
        for word, other in PICKS.items():
            if expression.startswith(word):
                expression, pick = expression.removeprefix(word), other
        return pick(self.tables[name].compute(row, expression))

    def draw(self, name: str) -> str:
        """Draw a table; `about` is a paragraph on the machine, the commit and the date."""
        return self._describe() if name == "about" else self.tables[name].draw()

    def _describe(self) -> str:
        """Describe where and when all of this was measured."""
        facts = self.facts
        machine = facts["machine"]
        versions = ", ".join(map(" ".join, facts["versions"].items()))
        full = [name for name, bench in facts["benches"].items() if bench["extent"] == "full"]
        about = (
            f"Measured with gptmini at commit {facts['commit']} on {facts['date']}, with "
            f"{machine['threads']} threads on {machine['cores']} cores ({machine['processor']}, "
            f"{machine['memory GiB']} GiB of memory, {machine['system']}): {versions}."
        )
        if full:
            about += f" Measured by `--full`: {', '.join(full)}."
        return textwrap.fill(about, 120)
