"""Rewrite the figures and tables that pages quote from the results: python scripts/bench quote

A figure has a comment behind it that names its key: `1.4 x<!-- llama: 1 x 32, 64 new: bfloat16 /
bf16 -->`. It is the last number before the comment, and keeps its number of decimals. A table is
all that stands between `<!-- table NAME -->` and `<!-- end -->`; `about` is a paragraph on machine,
commit and date. Keys that do not exist are named with their file and line.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from bench.results import RESULTS, ROOT, Results

COMMENT = re.compile(r"<!-- ([^>]*?) -->")
NUMBER = re.compile(r"(?:(?<=[\s|(])[-+])?(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?")
TABLE = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def list_pages() -> list[Path]:
    """List the pages whose figures are from the results."""
    patterns = ("README*.md", "docs/*.md", "configs/README.md", "configs/**/*.yaml")
    pages = sorted(chain.from_iterable(ROOT.glob(pattern) for pattern in patterns))
    return [*pages, ROOT / "scripts" / "RESULTS.md"]


def rewrite(text: str, results: Results) -> tuple[str, list[tuple[int, str]]]:
    """Bring the figures and tables of a page up to date; also the lines and names of unknown keys.

    What has an unknown key stays what it is.
    """
    unknown = []

    def draw(block: re.Match[str]) -> str:
        try:
            return f"{block[1]}{results.draw(block[2])}\n{block[3]}"
        except KeyError:
            line = block.string.count("\n", 0, block.start()) + 1
            unknown.append((line, f"table {block[2]}"))
            return block[0]

    lines = []
    for line, words in enumerate(text.split("\n"), 1):
        parts = []
        end = 0
        for comment in COMMENT.finditer(words):
            before = words[end : comment.start()]
            end = comment.end()
            if comment[1].count(": ") >= 2:
                try:
                    before = replace_last_number(before, results.find(comment[1]))
                except (KeyError, ValueError):
                    unknown.append((line, comment[1]))
            parts.append(before + comment[0])
        lines.append("".join(parts) + words[end:])
    return TABLE.sub(draw, "\n".join(lines)), sorted(unknown)


def replace_last_number(text: str, value: float) -> str:
    """Write a value in place of the last number of a text; ValueError if one of them is none."""
    numbers = list(NUMBER.finditer(text))
    if not numbers or math.isnan(value):
        raise ValueError("no number")
    number = numbers[-1]
    decimals = len(number[0].partition(".")[2])
    comma = "" if re.search(r"\d{4}", number[0].partition(".")[0]) else ","
    sign = "+" if number[0][0] == "+" else ""
    return f"{text[: number.start()]}{value:{sign}{comma}.{decimals}f}{text[number.end() :]}"


def rewrite_pages(pages: list[Path], results: Results) -> Iterator[str]:
    """Rewrite pages; yield a line for each key that does not exist."""
    for page in pages:
        text = page.read_text("utf-8")
        new, unknown = rewrite(text, results)
        if new != text:
            page.write_text(new, "utf-8")
        for line, key in unknown:
            yield f"{page}:{line}: {key}: not in the results, or no number before it"


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench quote",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("pages", type=Path, nargs="*", help="default: all that quote")
    options = parser.parse_args(words)
    if not options.results.exists():
        sys.exit(f"{options.results} is not there; python scripts/bench all writes it")
    problems = list(rewrite_pages(options.pages or list_pages(), Results.read(options.results)))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    sys.exit(1 if problems else 0)
