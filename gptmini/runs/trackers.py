"""Metrics to TensorBoard and Weights & Biases as well, if `train.log_to` says so.

Both are extras. What fails in them is told once and never ends a training.
"""

import secrets
from pathlib import Path
from typing import Any, Protocol

from gptmini import files
from gptmini.config.settings import Config
from gptmini.errors import MachineError
from gptmini.console import say


class Tracker(Protocol):
    """Where metrics go."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Take the metrics of a step."""

    def close(self) -> None:
        """Take no more."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run; what follows `step` is made again."""

    def __init__(self, run: Path, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, metrics: dict[str, Any]) -> None:
        """Numbers as scalars, the sample as text."""
        for key, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, metrics["step"])
            elif key != "step":
                self._writer.add_scalar(key, value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `gptmini`, which goes on under the name kept in `wandb.id`."""

    def __init__(self, run: Path, config: Config, step: int) -> None:
        import wandb  # noqa: PLC0415 - an extra

        name = run / "wandb.id"
        if not name.exists():
            files.replace(name, secrets.token_hex(4).encode())
        self._run = wandb.init(
            project="gptmini",
            name=run.name,
            id=name.read_text(),
            resume="allow",
            dir=str(run),
            config=config.model_dump(),
        )

    def write(self, metrics: dict[str, Any]) -> None:
        """All of them."""
        self._run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


KINDS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


class Trackers:
    """Those that a configuration asks for; MachineError for one that is not installed."""

    def __init__(self, run: Path, config: Config, step: int) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name in config.train.log_to:
            try:
                self._trackers[name] = KINDS[name](run, config, step)
            except ImportError:
                raise MachineError(
                    f"train.log_to: {name} is not installed; pip install 'gptmini[{name}]', or "
                    f"leave it out"
                ) from None
            except Exception as error:  # of its own, as not being logged in
                raise MachineError(
                    f"train.log_to: {name}: {error}; mend it or leave it out"
                ) from None

    def write(self, metrics: dict[str, Any]) -> None:
        """Give the metrics of a step to each."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(metrics)
            except Exception as error:  # whatever it is, the training is worth more
                say(f"{name}: {error!r}; going on without it")
                del self._trackers[name]

    def close(self) -> None:
        """End them all."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                say(f"{name}: {error!r}")
