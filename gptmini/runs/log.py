"""Writes the metrics of a run: metrics.jsonl, and the trackers that `train.log_to` names.

Each line also has `wall_time`: when it was written, in seconds since 1970.

The file is the record; a resumed run cuts it back to the step that it continues from. Trackers are
optional packages. Once training runs, one that fails is dropped with a warning.
"""

import importlib.util
import json
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gptmini import files
from gptmini.config.settings import Config
from gptmini.console import format_count, quote, say, warn
from gptmini.errors import MachineError, make_missing_package_error

Metrics = dict[str, Any]
Tracker = tuple[Callable[[Metrics], object], Callable[[], object]]  # write, close


class RunLog:
    """Appends metrics to the files of a run that continues after `step`.

    MachineError for a tracker that is not installed or does not start.
    """

    def __init__(self, run: Path, config: Config, step: int) -> None:
        self._path = run / "metrics.jsonl"
        check_installed(config.train.log_to)
        self._trackers = {
            name: _open_tracker(name, run, config, step) for name in config.train.log_to
        }
        self._open_after(step)

    def _open_after(self, step: int) -> None:
        """Open the file to append, without the lines of later steps and a line cut by a crash.

        The steps after a checkpoint are made once more, and would be logged twice. A base is
        evaluated once more, too, if no step was saved.
        """
        last = step if step > 0 else -1
        if self._path.exists():
            kept = [line for line in read_metrics(self._path) if line["step"] <= last]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            files.atomic_write_bytes(self._path, text.encode())
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, line: Metrics) -> None:
        """Append a line and the time of day, and pass it to the trackers, which have their own."""
        stamped = line | {"wall_time": round(time.time(), 3)}  # TensorBoard's name for it
        with files.name_in_errors(self._path):
            self._file.write(json.dumps(stamped) + "\n")
            self._file.flush()
        for name, (write, _) in list(self._trackers.items()):
            try:
                write(line)
            except Exception as error:  # of any kind: a tracker must not stop the run
                warn(f"train.log_to: {name} failed ({error!r}); continuing without it")
                del self._trackers[name]

    def sync(self) -> None:
        """Make the lines written so far survive a power cut, as a checkpoint does."""
        files.sync(self._file.fileno())

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for name, (_, close) in self._trackers.items():
            try:
                close()
            except Exception as error:
                warn(f"train.log_to: {name} failed while closing ({error!r})")


def read_metrics(path: Path) -> list[Metrics]:
    """Read the lines of a metrics file; warns of those that training did not write, and skips them.

    The last one may be cut, by a crash or because it is being written.
    """
    if not path.exists():
        return []
    *texts, _ = files.read_regular(path).split(b"\n")
    lines = [line for line in map(_parse_line, texts) if line is not None]
    skipped = len(texts) - len(lines)
    if skipped:
        warn(f"{path}: skipped {format_count(skipped, 'line')} not written by training")
    return lines


def _parse_line(text: bytes) -> Metrics | None:
    """Return a line of metrics; None for what a power cut may leave of one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(line, dict) and line.keys() >= {"step", "tokens", "seconds"}
    return line if is_whole else None


def select_numbers(lines: list[Metrics], *keys: str) -> list[tuple[Any, ...]]:
    """Return the figures `keys` of each line of metrics that has them all."""
    return [tuple(line[key] for key in keys) for line in lines if line.keys() >= set(keys)]


def check_installed(names: Iterable[str]) -> None:
    """Raise MachineError for a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise make_missing_package_error("train.log_to", name, name)


def _open_tracker(name: str, run: Path, config: Config, step: int) -> Tracker:
    """Open a tracker by its name; MachineError if it does not start."""
    try:
        return TRACKERS[name](run, config, step)
    except Exception as error:  # its own, such as not being logged in
        reason = " ".join(str(error).split()).rstrip(".")  # often with advice of its own
        raise MachineError(
            f"train.log_to: {name}: {reason}; or remove {name} from train.log_to"
        ) from None


def open_tensorboard(run: Path, config: Config, step: int) -> Tracker:
    """Write event files to `tensorboard/` in the run; events after `step` are purged."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

    writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
    command = f"tensorboard --logdir {quote(run.parent)}"
    say(f"  tracking  {run / 'tensorboard'}; see it with: {command}")

    def write(line: Metrics) -> None:
        for key, value in line.items():
            if isinstance(value, str):  # the sample
                writer.add_text(key, value, line["step"])
            elif key != "step":
                writer.add_scalar(key, value, line["step"])
        writer.flush()

    return write, writer.close


def open_wandb(run: Path, config: Config, step: int) -> Tracker:
    """Start a run in the project `gptmini`, or resume it by the id stored in `wandb.id`."""
    import wandb as package  # noqa: PLC0415 - an extra

    id_file = run / "wandb.id"
    if not id_file.exists():
        files.atomic_write_bytes(id_file, secrets.token_hex(4).encode())
    tracked = package.init(
        project="gptmini",
        name=run.name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(run),
        config=config.model_dump(),
    )

    online = tracked.url or "offline; upload it with wandb sync"
    say(f"  tracking  {run / 'wandb'}: {online}")

    def write(line: Metrics) -> None:
        tracked.log(line, step=line["step"])

    return write, tracked.finish


TRACKERS = {"tensorboard": open_tensorboard, "wandb": open_wandb}
