"""Tables of what a bench measures, the file that keeps them drawn, and the pages that show them.

A table has a list of values in each cell, one for each round or seed. What is shown of it is their
median. Columns are shown on their own or as an expression: `A / B` is the median of the ratios of
equal rounds, `A - B` of their differences.

Pages have tables between `<!-- table NAME -->` and `<!-- end -->`; `about` is a paragraph on
machine, commit and date, `compared` our place beside others, and `front` its first rows.
"""

import json
import math
import operator
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
}
PAGES = (ROOT / "README.md", ROOT / "scripts" / "RESULTS.md")
MARKED = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
# What is compared, beside what, and where it is: table, row, ratio. The front page has the first
# five.
COMPARED = (
    (
        "training to the loss at which nanoGPT's recipe for a CPU ends",
        "plain PyTorch, float32",
        ("train", "seconds to 1.8982", "plain PyTorch / gptmini"),
    ),
    (
        "a training step, 6 layers of width 384",
        "plain PyTorch, float32",
        (
            "train",
            "seconds a step, 6 x 6 x 384, 64 x 256 tokens, compiled",
            "plain PyTorch / gptmini",
        ),
    ),
    (
        "a Llama of GPT-2's size continues one prompt, bfloat16",
        "llama.cpp, built for AVX2",
        ("llama", "1 x 32, 64 new", "bfloat16 / bf16"),
    ),
    (
        "it continues 32 prompts",
        "transformers",
        ("llama", "32 x 32, 16 new", "bfloat16 / HF bfloat16"),
    ),
    (
        "it reads a prompt of 512 tokens",
        "transformers",
        ("llama", "1 x 512, 1 new", "bfloat16 / HF bfloat16"),
    ),
    (
        "it reads 32 prompts, float32",
        "transformers",
        ("generate first token", "124M mha, 32 x 32", "HF float32 / float32"),
    ),
    (
        "eight clients with prompts of 512, tokens/s",
        "llama.cpp, built for AVX2",
        ("serve", "8 x 512", "gptmini / llama.cpp"),
    ),
    (
        "memory when generating, bfloat16 (less is better)",
        "transformers, float32",
        ("generate memory", "124M", "bfloat16 / HF float32"),
    ),
)


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
            return [apply(*pair) for pair in zip(columns[left], columns[right], strict=True)]
        raise KeyError(expression)

    def draw(self) -> list[str]:
        """Draw the table in Markdown, line by line."""
        headings = [self.unit, *self.shown]
        lines = [headings, ["---"] * len(headings)]
        for row in self.rows:
            lines.append([row, *(self._draw_cell(row, column) for column in self.shown)])
        return [f"| {' | '.join(line)} |" for line in lines]

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
    """A results file: the machine, the commit, and the drawn tables of each bench."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.tables = {
            name: lines
            for bench in facts["benches"].values()
            for name, lines in bench["tables"].items()
        }

    @classmethod
    def read(cls, path: Path = RESULTS) -> "Results":
        return cls(json.loads(path.read_text("utf-8")))

    def draw(self, name: str) -> str:
        """Draw what a page has between the markers of this name; KeyError if it is not here."""
        if name == "about":
            return self._describe()
        if name == "front":
            return self._compare("how many times as fast gptmini is", COMPARED[:5])
        if name == "compared":
            return self._compare("factor", COMPARED)
        return "\n".join(self.tables[name])

    def write_pages(self) -> None:
        """Bring the tables of the pages up to date; those that were not measured stay."""
        for page in PAGES:
            page.write_text(self.rewrite(page.read_text("utf-8")), "utf-8")

    def rewrite(self, text: str) -> str:
        """Return the text of a page with the tables of these results."""

        def draw(block: re.Match[str]) -> str:
            try:
                return f"{block[1]}{self.draw(block[2])}\n{block[3]}"
            except KeyError:
                return block[0]

        return MARKED.sub(draw, text)

    def _compare(self, heading: str, rows: Iterable[tuple[str, str, tuple[str, str, str]]]) -> str:
        """Draw the medians of ratios, each beside what it is compared with."""
        machine = self.facts["machine"]
        lines = [f"| on {machine['cores']} cores, {machine['processor']} | beside | {heading} |"]
        lines.append("|---|---|---|")
        for what, beside, (table, row, ratio) in rows:
            lines.append(f"| {what} | {beside} | {self._read_factor(table, row, ratio):.2g} x |")
        return "\n".join(lines)

    def _read_factor(self, table: str, row: str, column: str) -> float:
        """Read the median of a ratio, such as `2.40 x (2.06 to 2.74)`, from its table."""
        headings, _, *rows = (line[2:-2].split(" | ") for line in self.tables[table])
        (cells,) = (cells for cells in rows if cells[0] == row)
        return float(cells[headings.index(column)].split()[0])

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
