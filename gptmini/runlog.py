"""What a run tells: metrics.jsonl for programs, a progress bar or plain lines for people."""

import json
import sys
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


class RunLog:
    """The metrics and the progress of a training run of `steps` steps that has made `step`."""

    def __init__(self, path: Path, step: int, steps: int) -> None:
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

    def advance(self) -> None:
        """One more step is made."""
        self._bar.update()

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a line of metrics and show it; every evaluation keeps a line on the terminal."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        shown = [
            form.format(metrics[key]) for key, form in METRICS_FORMAT.items() if key in metrics
        ]
        if not self._terminal or "val_loss" in metrics:
            say(f"step {metrics['step']}/{self._bar.total}: {', '.join(shown)}")
        if self._terminal and "train_loss" in metrics:
            self._bar.set_postfix_str(
                f"loss {metrics['train_loss']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
            )

    def close(self) -> None:
        """End the bar and the file."""
        self._bar.close()
        self._file.close()


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines after a step, which will be written again, and a line cut by a crash."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    files.replace(path, "".join(kept).encode())
