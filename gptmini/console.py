"""Terminal output: lines on stderr, texts on stdout, progress bars."""

import os
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

_speakers = [True]


def silence() -> None:
    """Print no more lines and bars: of several processes that train together, one speaks."""
    _speakers.clear()


def on_terminal() -> bool:
    """Whether a person watches stderr."""
    return sys.stderr.isatty() and bool(_speakers)


def say(line: str) -> None:
    """Print a line on stderr, above a progress bar if one is shown."""
    if _speakers:
        tqdm.write(line, file=sys.stderr)


def warn(line: str) -> None:
    say(f"warning: {line}")


def say_fact(line: str) -> None:
    """Print a line of a header, such as `  model     2.6 M parameters`; a terminal wraps it."""
    if not on_terminal():
        say(line)
        return
    width = max(40, shutil.get_terminal_size().columns - 1)
    indent = " " * 12
    say(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))


def amount(number: float, noun: str) -> str:
    """`1 step`, `1,200 steps`, `0.5 minutes`."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {noun}{'s' * (number != 1)}"


def stream_to_stdout(texts: Iterable[str], raw: bool = False) -> bool:
    """Write texts to stdout as they come; control characters reach a terminal only if `raw`.

    Returns False if the reader closed the pipe, as `| head` does; that is not an error.
    """
    escape = sys.stdout.isatty() and not raw
    try:
        for text in texts:
            sys.stdout.write(shown(text) if escape else text)
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def shown(text: str) -> str:
    """The text with control characters escaped, so that a terminal does not obey them."""
    return "".join(
        c if unicodedata.category(c) != "Cc" or c in "\n\t" else ascii(c)[1:-1]
        for c in text.replace("\r", "")
    )


class TrainingProgress:
    """Training progress: a bar on a terminal, otherwise lines.

    Both say: step  80/600  13%  loss 1.8152  lr 2.0e-03  22,346 tok/s  1:35 left
    """

    def __init__(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps
        self._said = steps  # the number of steps that was printed last
        self._made = 0  # steps by this command
        self._started = time.perf_counter()
        self._loss = ""
        self._facts = ""  # learning rate and speed, as last logged
        self._terminal = on_terminal()
        self._bar = tqdm(
            total=steps,
            initial=step,
            bar_format="{desc} |{bar}|",
            dynamic_ncols=True,
            leave=False,
            disable=not self._terminal,
        )

    def plan(self, steps: int, minutes: float) -> None:
        """Change the number of steps, to fit the minutes; a change of more than 2 % gets a line."""
        self._steps = self._bar.total = steps
        if abs(steps - self._said) > 0.02 * self._said:
            self._said = steps
            say(f"  now {amount(steps, 'step')}, to fit {amount(minutes, 'minute')}")

    def advance(self, loss: float) -> None:
        self._loss = f"  loss {loss:.4f}"
        self._step += 1
        self._made += 1
        self._bar.set_description_str(self._line(), refresh=False)
        self._bar.update()

    def back_to(self, step: int) -> None:
        """Return to an earlier step; the steps after it are repeated."""
        self._step = self._bar.n = step

    def show(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of this step; those of an evaluation get a line on a terminal too."""
        if "train_loss" in metrics:
            speed = f"{metrics['tokens_per_second']:,.0f} tok/s"
            self._facts = f"  lr {metrics['lr']:.1e}  {speed}"
            self._bar.set_description_str(self._line())
            if not self._terminal:
                say(self._line())
        if "val_loss" in metrics:
            bits = f"{metrics['val_bpb']:.3f} bits/byte"
            say(f"{self._position()}  val {metrics['val_loss']:.4f}  {bits}")

    def close(self) -> None:
        self._bar.close()

    def _position(self) -> str:
        steps = str(self._steps)
        return f"step {self._step:{len(steps)}}/{steps} {self._step / self._steps:4.0%}"

    def _line(self) -> str:
        line = self._position() + self._loss + self._facts
        if self._made == 0 or self._step >= self._steps:
            return line
        per_step = (time.perf_counter() - self._started) / self._made
        return f"{line}  {duration(per_step * (self._steps - self._step))} left"


def duration(seconds: float) -> str:
    """1:35, or 12h31m from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar over `total` bytes on a terminal; yields a function that counts more of them.

    Work that took over a second ends with a line that states its speed.
    """
    started = time.perf_counter()
    done = 0
    hidden = not on_terminal()
    with tqdm(
        desc=what, total=total, unit="B", unit_scale=True, leave=False, disable=hidden
    ) as bar:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count)

        yield advance
    seconds = time.perf_counter() - started
    if seconds > 1:
        say(f"{what}: {done / 1e6:,.1f} MB in {seconds:.1f} s, {done / 1e6 / seconds:.1f} MB/s")


@contextmanager
def counted(unit: str, total: int, done: int) -> Iterator[Callable[[int], object]]:
    """A bar over `total` things, `done` of them already; yields a function that counts more."""
    with tqdm(total=total, initial=done, unit=unit, disable=not on_terminal()) as bar:
        yield bar.update


def watched(things: Iterable[T], what: str, total: int) -> Iterable[T]:
    """The same things, with a bar on a terminal if they take more than a second."""
    hidden = not on_terminal()
    return tqdm(things, desc=what, total=total, delay=1, leave=False, disable=hidden)


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
