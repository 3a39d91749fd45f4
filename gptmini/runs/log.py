"""What a run tells: metrics.jsonl for programs, a progress bar or plain lines for people."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gptmini import files
from gptmini.console import say

METRICS_FORMAT = {
    "train_loss": "loss {:.4f}",
    "val_loss": "val {:.4f}",
    "val_bpb": "{:.4f} bits/byte",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


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
