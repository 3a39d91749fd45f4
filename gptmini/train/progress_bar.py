"""Shows how far a training has come: a bar on a terminal, lines elsewhere."""

import time
from typing import Any

from tqdm import tqdm

from gptmini.console import format_duration, is_interactive, say, say_excerpt

MIN_TIMED_STEPS = 3  # before the time left is estimated: the first is slow
SECONDS_BETWEEN_LINES = 10  # elsewhere than on a terminal


class TrainingProgressBar:
    """Show the progress of training: a bar on a terminal, otherwise lines.

    Both say: step  80/600  13%  loss 1.8152  lr 2.0e-03  22,346 tok/s  1:35 left
    """

    def __init__(self, step: int, steps: int) -> None:
        self._step = step
        self._steps = steps
        self._first_step = step  # of this command
        self._started = time.perf_counter()
        self._next_line = self._started
        self._loss = ""
        self._rates = ""  # learning rate and speed, as last logged
        self._meaning = ", lower is better"  # of bits per byte, said once
        self._on_terminal = is_interactive()
        self._bar = tqdm(
            total=steps,
            initial=step,
            bar_format="{desc} |{bar}|",
            dynamic_ncols=True,
            leave=False,
            disable=not self._on_terminal,
        )

    def advance(self, loss: float, steps: int) -> None:
        """Count one of `steps`, which may change to fit the minutes, and show its loss."""
        self._steps = steps
        self._bar.total = steps
        self._loss = f"  loss {loss:.4f}"
        self._step += 1
        self._bar.set_description_str(self._format_line(), refresh=False)
        self._bar.update()

    def show(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of this step.

        On a terminal, too, those of an evaluation get a line; below it, the sample begins.
        """
        if "train_loss" in metrics:
            speed = f"{metrics['tokens_per_second']:,.0f} tok/s"
            self._rates = f"  lr {metrics['lr']:.1e}  {speed}"
            self._bar.set_description_str(self._format_line())
            now = time.perf_counter()
            is_due = now >= self._next_line or self._step >= self._steps
            if is_due and not self._on_terminal:
                say(self._format_line())
                self._next_line = now + SECONDS_BETWEEN_LINES
        if "val_loss" in metrics:
            bits = f"{metrics['val_bpb']:.3f} bits per byte{self._meaning}"
            say(f"{self._format_position()}  val {metrics['val_loss']:.4f}  {bits}")
            self._meaning = ""
            say_excerpt(metrics["sample"])

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _format_position(self) -> str:
        steps = str(self._steps)
        return f"step {self._step:{len(steps)}}/{steps} {self._step / self._steps:4.0%}"

    def _format_line(self) -> str:
        line = self._format_position() + self._loss + self._rates
        completed = self._step - self._first_step
        if completed < MIN_TIMED_STEPS or self._step >= self._steps:
            return line
        seconds_per_step = (time.perf_counter() - self._started) / completed
        seconds_left = seconds_per_step * (self._steps - self._step)
        return f"{line}  {format_duration(seconds_left)} left"
