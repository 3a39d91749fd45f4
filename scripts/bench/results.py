"""Tables of what a bench measures, the file that keeps them drawn, and the pages that show them.

A table has a list of values in each cell, one for each round or seed. What is shown of it is their
median. Columns are shown on their own or as `A / B`, the median of the ratios of equal rounds.
`peer` is the best of several columns in its row: drawn as a column it is named.

Pages have tables between `<!-- table NAME -->` and `<!-- end -->`; `about` is a paragraph on
machine, commit and date, `compared` our place beside others.
"""

import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results.json"
SHAKESPEARE = ROOT / "data" / "tinyshakespeare.txt"
# How much a bench does: `trial` only shows that it runs, `full` takes a night for all of them.
Extent = Literal["trial", "quick", "full"]
Runs = list[float]
PAGES = (ROOT / "README.md", ROOT / "scripts" / "RESULTS.md")
MARKED = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
# The table and row (None: all of them) in which something is compared: what, beside what (None: the
# best peer of the row), and the ratio.
COMPARED: dict[tuple[str, str | None], list[tuple[str, str | None, str]]] = {
    ("train", "seconds to 1.8982"): [
        ("time to the final loss of nanoGPT's CPU recipe", None, "peer / gptmini")
    ],
    ("train", "seconds a step, 6 x 6 x 384, 64 x 256 tokens, compiled"): [
        ("a training step, 6 layers of width 384", None, "peer / gptmini")
    ],
    ("llama", "1 x 32, 64 new"): [
        ("a Llama of GPT-2's size continues one prompt, bfloat16", "llama.cpp", "bfloat16 / bf16"),
        ("the same, int8", "llama.cpp", "int8 / q8_0"),
        ("the same, float32", "llama.cpp", "float32 / f32"),
    ],
    ("llama", "32 x 32, 16 new"): [
        ("the same Llama continues 32 prompts, bfloat16", "llama.cpp", "bfloat16 / bf16"),
        ("the same", None, "bfloat16 / peer"),
    ],
    ("llama", "1 x 512, 1 new"): [
        ("the same Llama reads a prompt of 512 tokens, bfloat16", "llama.cpp", "bfloat16 / bf16"),
        ("the same", None, "bfloat16 / peer"),
    ],
    ("generate first token", None): [
        ("reading prompts, float32", "transformers float32", "transformers float32 / float32")
    ],
    ("generate memory", "124M"): [("memory when GPT-2 generates", None, "peer / bfloat16")],
    ("serve", "8 x 512"): [
        ("eight clients with prompts of 512, tokens/s", "llama.cpp", "gptmini / llama.cpp")
    ],
    ("serve between tokens", "8 x 512, p95"): [
        ("their wait for the next token, 95th percentile", "llama.cpp", "llama.cpp / gptmini")
    ],
    ("first quality", "gptmini train"): [
        ("bits per byte of new stories after `gptmini train`", "PPMd", "PPMd / bits per byte")
    ],
    ("learning", "numpy, once, 3x128"): [
        ("bits per byte of unseen code, after a minute", "nanochat's recipe", "nanochat / gptmini"),
        ("the same", "PPMd", "PPMd / gptmini"),
        ("the same", "PPMd, learning as it is measured", "PPMd-reading-on / gptmini"),
    ],
}


@dataclass
class Table:
    """A table of a bench: the runs of each row and column.

    `shown` are the columns as they are drawn, expressions among them, and `digits` how many
    significant digits a value has then. Among `peers`, other projects' columns, `best` chooses.
    """

    name: str
    unit: str
    shown: list[str]
    digits: int = 3
    peers: tuple[str, ...] = ()
    best: Callable[..., Any] = min
    rows: dict[str, dict[str, Runs]] = field(default_factory=dict)

    def append(self, row: str, column: str, value: float) -> None:
        self.rows.setdefault(row, {}).setdefault(column, []).append(value)

    def find_peer(self, row: str) -> str:
        """Find the best peer of a row by the median of its runs."""
        columns = self.rows[row]
        measured = [peer for peer in self.peers if peer in columns]
        return self.best(measured, key=lambda peer: statistics.median(columns[peer]))

    def compute(self, row: str, expression: str) -> Runs:
        """Return a column or a ratio of columns, run by run; KeyError names what is not."""
        columns = self.rows[row]
        if self.peers:
            columns = columns | {"peer": columns[self.find_peer(row)]}
        above, _, below = expression.partition(" / ")
        if not below:
            return columns[above]
        return [a / b for a, b in zip(columns[above], columns[below], strict=True)]

    def draw(self) -> list[str]:
        """Draw the table in Markdown, line by line."""
        headings = [self.unit, *self.shown]
        lines = [headings, ["---"] * len(headings)]
        for row in self.rows:
            lines.append([row, *(self._draw_cell(row, column) for column in self.shown)])
        return [f"| {' | '.join(line)} |" for line in lines]

    def _draw_cell(self, row: str, expression: str) -> str:
        if expression == "peer":
            return self.find_peer(row)
        try:
            runs = self.compute(row, expression)
        except KeyError:
            return ""
        middle = statistics.median(runs)
        if " / " not in expression:
            return format_value(middle, self.digits)
        ratio, *ends = (
            f"{value:.2f}" if value < 10 else f"{value:.1f}"
            for value in (middle, min(runs), max(runs))
        )
        return f"{ratio} x" + (f" ({' to '.join(ends)})" if len(runs) > 1 else "")


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
        if name == "compared":
            return self._compare()
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
            except KeyError as missing:
                print(f"the table {block[2]} stays as it is, without {missing}")
                return block[0]

        return MARKED.sub(draw, text)

    def _compare(self) -> str:
        """Draw the medians of ratios, each beside what it is compared with."""
        facts = self.facts
        machine = facts["machine"]
        caption = (
            f"Measured on {facts['date']} at commit {facts['commit']} on {machine['cores']} cores "
            f"({machine['processor']}). Above 1 x, gptmini is ahead; below, the other is:"
        )
        lines = [*textwrap.wrap(caption, 120), "", "| | compared with | ratio |", "|---|---|---|"]
        # A native build has a version of its own, the wheel that of its package.
        kind = "built natively" if "llama.cpp" in facts["versions"] else "the wheel, built for AVX2"
        for (table, row), comparisons in COMPARED.items():
            headings, _, *rows = (line[2:-2].split(" | ") for line in self.tables[table])
            found = [dict(zip(headings, cells, strict=True)) for cells in rows]
            found = [cells for cells in found if row in {None, cells[headings[0]]}]
            for what, beside, ratio in comparisons:
                factors = [float(cells[ratio].split()[0]) for cells in found]
                ends = sorted({min(factors), max(factors)})
                other = beside or found[0]["peer"]
                other += f", {kind}" if beside == "llama.cpp" else ""
                shown = " to ".join(f"{factor:.2g}" for factor in ends)
                lines.append(f"| {what} | {other} | {shown} x |")
        return "\n".join(lines)

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
