"""Terminal output: lines on stderr, texts on stdout, progress bars."""

import errno
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.cells import cell_len
from tqdm import tqdm

from gptmini.files import IS_WINDOWS

T = TypeVar("T")
DIM = "\x1b[2m"
UNMARK = "\x1b[0m"
MAX_EXCERPT_WIDTH = 70
# But for tabs and line ends; also separators of lines, and marks that turn the direction of text.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

_silent = False


def silence() -> None:
    """Print no more lines and bars: of several processes that train together, one speaks."""
    global _silent  # noqa: PLW0603 - one stderr per process
    _silent = True


def quote(word: object) -> str:
    """Quote a word of a command that is printed, for the user's shell."""
    text = str(word)
    if not IS_WINDOWS:
        return shlex.quote(text)
    is_safe = re.fullmatch(r"[\w\\/:.+-]+", text)
    return text if is_safe else f'"{text}"'  # which no name there has


def is_interactive() -> bool:
    """Check whether a person watches stderr."""
    return sys.stderr.isatty() and not _silent


def say(line: str) -> None:
    """Print a line on stderr, above a progress bar if one is shown.

    It may quote foreign text, such as the name of a file: it stays one line, and a terminal does
    not obey it.
    """
    if not _silent:
        tqdm.write(escape_line(line), file=sys.stderr)


def warn(line: str) -> None:
    """Print a warning on stderr."""
    say(f"warning: {line}")


def say_excerpt(text: str) -> None:
    """Print the beginning of a text as one dim line on a terminal; elsewhere, print nothing."""
    if not is_interactive():
        return
    width = min(MAX_EXCERPT_WIDTH, shutil.get_terminal_size().columns - 4)
    line = escape_control_characters(text.replace("\n", "↵").replace("\t", " "))[:width]
    while line and cell_len(line) > width:
        line = line[:-1]
    shown = f"{DIM}{line}{UNMARK}" if shows_colours(sys.stderr) else line
    tqdm.write(f"  {shown}", file=sys.stderr)


def format_count(number: float, noun: str) -> str:
    """Format a number of things: `1 step`, `1,200 steps`, `0.5 minutes`."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    plural = "" if number == 1 else "s"
    return f"{digits} {noun}{plural}"


def stream_to_stdout(texts: Iterable[str]) -> bool:
    """Write texts to stdout as they arrive; control characters do not reach a terminal.

    Returns False if the reader closed the pipe, as `| head` does; that is not an error.
    """
    escape = sys.stdout.isatty()
    try:
        for text in texts:
            sys.stdout.write(escape_control_characters(text) if escape else text)
            sys.stdout.flush()
    except OSError as error:
        if not is_closed_pipe(error):
            raise
        discard_stdout()
        return False
    return True


def shows_colours(stream: TextIO) -> bool:
    """Check whether a stream is a terminal on which colours are welcome (https://no-color.org)."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return not IS_WINDOWS or "WT_SESSION" in os.environ  # its old console shows the codes


def is_closed_pipe(error: BaseException | None) -> bool:
    """Check whether an error says that nobody reads the output any more.

    Windows reports that as an invalid argument, of no file.
    """
    if isinstance(error, BrokenPipeError):
        return True
    if not IS_WINDOWS or not isinstance(error, OSError):
        return False
    return error.errno == errno.EINVAL and error.filename is None


def discard_stdout() -> None:
    """Send stdout nowhere: Python flushes it once more at exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def escape_control_characters(text: str) -> str:
    """Escape control characters, so that a terminal does not obey them."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r", ""))


def escape_line(text: str) -> str:
    """Escape a text that must stay on one line, such as the name of a file."""
    return escape_control_characters(text).replace("\n", "\\n").replace("\t", "\\t")


def format_bytes(size: float) -> str:
    """Format a number of bytes: 466 kB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"


def format_duration(seconds: float) -> str:
    """Format a duration: 1:35, or 12h31m from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}h{minutes % 60:02}m"


@contextmanager
def show_byte_progress(description: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar over `total` bytes on a terminal; yields a function that counts more of them."""
    hidden = not is_interactive()
    with tqdm(
        desc=description, total=total, unit="B", unit_scale=True, leave=False, disable=hidden
    ) as bar:
        yield bar.update


class HiddenBar(tqdm):  # type: ignore[type-arg]
    """A bar that shows nothing, for a library that shows its own where nothing is to be seen."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(disable=True)


@contextmanager
def show_elapsed(description: str) -> Iterator[None]:
    """Show on a terminal how long work has taken, after a second, where no bar can show how far.

    Also a decorator for functions that do such work.
    """
    if not is_interactive():
        yield
        return
    ended = threading.Event()
    clock = threading.Thread(target=_show_seconds, args=(description, ended), daemon=True)
    clock.start()
    try:
        yield
    finally:
        ended.set()
        clock.join()


def _show_seconds(description: str, ended: threading.Event) -> None:
    """Count the seconds until work ends, on a line that is then removed."""
    if ended.wait(1):
        return
    # Given to tqdm, which shows nothing where a terminal does not tell its size.
    width, height = shutil.get_terminal_size()
    bar = tqdm(
        desc=description,
        initial=1,
        bar_format="{desc} ... {n} s",
        leave=False,
        ncols=width,
        nrows=height,
    )
    with bar:
        while not ended.wait(1):
            bar.update()


def iter_with_progress(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """Iterate over items, with a bar on a terminal if they take more than a second."""
    hidden = not is_interactive()
    return tqdm(items, desc=description, total=total, delay=1, leave=False, disable=hidden)


def pad(text: str, width: int, to_right: bool = False) -> str:
    """Fill a text with spaces to a width on a terminal."""
    spaces = " " * (width - cell_len(text))
    return spaces + text if to_right else text + spaces


def format_table(rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Format rows of cells as aligned text, or as a Markdown table; the first row is the header.

    Columns of numbers are aligned to the right. Cells may be foreign names.
    """
    rows = [[escape_line(cell) for cell in row] for row in rows]
    columns = list(zip(*rows, strict=True))
    min_width = 3 if markdown else 0
    widths = [max(min_width, *map(cell_len, column)) for column in columns]
    numeric = [all(cell[:1] in "+-0123456789" for cell in column[1:]) for column in columns]

    def format_row(cells: Sequence[str]) -> str:
        aligned = [
            pad(cell, width, to_right=is_numeric)
            for cell, width, is_numeric in zip(cells, widths, numeric, strict=True)
        ]
        if markdown:
            return f"| {' | '.join(aligned)} |"
        return "  ".join(aligned).rstrip()

    lines = [format_row(row) for row in rows]
    if markdown:
        marks = [
            "-" * (width - 1) + ":" if is_numeric else "-" * width
            for width, is_numeric in zip(widths, numeric, strict=True)
        ]
        lines.insert(1, format_row(marks))
    return "\n".join(lines)
