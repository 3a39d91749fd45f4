"""What people see: lines on stderr, texts on stdout, progress bars."""

import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm


def say(line: str) -> None:
    """A line for people, on stderr, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stderr)


def warn(line: str) -> None:
    """A warning on stderr."""
    say(f"warning: {line}")


def stream_to_stdout(texts: Iterable[str], raw: bool = False) -> bool:
    """Write texts to stdout as they come; a terminal gets no control characters unless `raw`.

    A closed pipe ends it quietly, and gives False: the reader has what it wanted, as in `| head`.
    """
    visible = sys.stdout.isatty() and not raw
    try:
        for text in texts:
            sys.stdout.write(shown(text) if visible else text)
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def shown(text: str) -> str:
    """The text with control characters written out, so that a terminal does not obey them."""
    return "".join(
        c if unicodedata.category(c) != "Cc" or c in "\n\t" else ascii(c)[1:-1]
        for c in text.replace("\r", "")
    )


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar over so many bytes on a terminal; if it took a second, a line with the speed.

    The block is given a function to be told how many more bytes are done.
    """
    started = time.perf_counter()
    terminal = sys.stderr.isatty()
    done = 0
    with tqdm(
        desc=what, total=total, unit="B", unit_scale=True, disable=not terminal, leave=False
    ) as bar:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            bar.update(more)

        yield advance
    seconds = time.perf_counter() - started
    if seconds > 1:
        say(f"{what}: {done / 1e6:,.1f} MB in {seconds:.1f} s, {done / 1e6 / seconds:.1f} MB/s")


@contextmanager
def counted(unit: str, total: int, done: int) -> Iterator[Callable[[int], object]]:
    """A bar over so many things, some of them done; the block tells it how many more are."""
    terminal = sys.stderr.isatty()
    with tqdm(total=total, initial=done, unit=unit, disable=not terminal) as bar:
        yield bar.update


def table(rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Rows of cells as aligned text, or as a Markdown table; the first row is the header.

    Columns of numbers are aligned to the right.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(3 * markdown, *map(len, column)) for column in columns]
    numeric = [all(cell[:1] in "+-0123456789" for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(aligned)} |" if markdown else "  ".join(aligned).rstrip()

    lines = [line(row) for row in rows]
    if markdown:
        marks = zip(widths, numeric, strict=True)
        lines.insert(1, line(["-" * (width - right) + ":" * right for width, right in marks]))
    return "\n".join(lines)
