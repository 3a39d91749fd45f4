"""What a run tells: metrics.jsonl for programs, a progress bar or plain lines for people."""

import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gptmini import files

METRICS_FORMAT = {
    "train_loss": "loss {:.4f}",
    "val_loss": "val {:.4f}",
    "val_bpb": "{:.4f} bits/byte",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def say(line: str) -> None:
    """A line for people, on stderr, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stderr)


def deliver(texts: Iterable[str], raw: bool = False) -> bool:
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


class RunLog:
    """The metrics and the progress of a training run of `steps` steps that has made `step`.

    `also` is given each line of metrics too.
    """

    def __init__(
        self, path: Path, step: int, steps: int, also: Callable[[dict[str, Any]], object]
    ) -> None:
        self._path, self._also = path, also
        _keep_until(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps,
            initial=step,
            unit="step",
            disable=not self._terminal,
            dynamic_ncols=True,
            leave=False,
        )

    def plan(self, steps: int) -> None:
        """The run will have another number of steps."""
        self._bar.total = steps

    def advance(self) -> None:
        """One more step is made."""
        self._bar.update()

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a line of metrics and show it; every evaluation keeps a line on the terminal."""
        try:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self._path)  # a full disk names no file
            raise
        self._also(metrics)
        shown = [
            form.format(metrics[key]) for key, form in METRICS_FORMAT.items() if key in metrics
        ]
        if not self._terminal or "val_loss" in metrics:
            say(f"step {metrics['step']}/{self._bar.total}: {', '.join(shown)}")
        if self._terminal and "train_loss" in metrics:
            self._bar.set_postfix_str(
                f"loss {metrics['train_loss']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
            )

    def back_to(self, step: int) -> None:
        """Forget what was told of later steps, which will be made again."""
        self._file.close()
        _keep_until(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")
        self._bar.n = step

    def sync(self) -> None:
        """Make what was told last through a power cut, as a checkpoint does."""
        files.sync(self._file.fileno())

    def close(self) -> None:
        """End the bar and the file."""
        self._bar.close()
        self._file.close()


def metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of metrics; one that a crash has cut is passed over."""
    if not path.exists():
        return
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            found = json.loads(line)
            int(found["step"])
        except (ValueError, KeyError, TypeError):
            continue
        yield found


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines after a step, which will be written again, and a line cut by a crash."""
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in metrics(path) if line["step"] <= step]
        files.replace(path, "".join(kept).encode())
