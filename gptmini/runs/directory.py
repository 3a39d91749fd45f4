"""A run directory: everything a run is, and checkpoints that are whole or not there.

    config.yaml        every setting
    tokenizer.json     all that encoding needs
    metrics.jsonl      one object a line
    best.json          the step and the loss of the best evaluation
    checkpoints/step-00000500/
        model.safetensors  optimizer.safetensors  state.json
        manifest.json      size and SHA-256 of the three, written last

A checkpoint is written into a directory of another name, synced and renamed. Nothing in it is used
before its bytes agree with the manifest, and no file can run code.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from gptmini.config import load
from gptmini import files
from gptmini.text import tokenizer
from gptmini.config import yamlfile
from gptmini.config.settings import Config
from gptmini.errors import CheckpointError, MachineError
from gptmini.text.tokenizer import Tokenizer

FORMAT = 3
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
NAME = re.compile(r"step-([0-9]{8})")
Tensors = dict[str, Tensor]


@dataclass
class Checkpoint:
    """One moment of a run; `state` is JSON data with the step, the best evaluation and the like."""

    state: dict[str, Any]
    model: Tensors
    optimizer: Tensors

    @property
    def step(self) -> int:
        """Updates made."""
        return int(self.state["step"])


class RunDirectory:
    """The files of one run. `warn` is told what is damaged and passed over."""

    def __init__(self, path: Path, warn: Callable[[str], None] = lambda line: None) -> None:
        self.path, self.warn = path, warn
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.config_file = path / "config.yaml"
        self.tokenizer_file = path / "tokenizer.json"

    @property
    def begun(self) -> bool:
        """Whether a run lives here; its configuration is the first thing that is lasting."""
        return self.config_file.exists()

    def begin(self, config: Config, text_tokenizer: Tokenizer) -> None:
        """Write down what stays the same through the run."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        files.sync_directory(self.path.parent)
        files.replace(self.tokenizer_file, text_tokenizer.to_json().encode())
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Write every setting."""
        files.replace(self.config_file, yamlfile.dump(config.model_dump()).encode())

    def config(self) -> Config:
        """The settings of the run; CheckpointError where there is none."""
        if not self.begun:
            raise CheckpointError(f"{self.path}: no run here; make one with gptmini train")
        data, lines = yamlfile.read_file(self.config_file)
        origins = {key: f"{self.config_file}:{line}" for key, line in lines.items()}
        return load.validate(data, origins)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run."""
        return tokenizer.read(self.tokenizer_file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; MachineError if another process is. A dead process holds no lock."""
        try:
            import fcntl  # noqa: PLC0415 - not on Windows
        except ImportError:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise MachineError(
                    f"{self.path}: {file.read(200).strip() or 'another process'} is training this "
                    f"run; wait for it, or name another directory with --out"
                ) from None
            except OSError:
                pass  # a file system without locks
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield

    # -- saving ------------------------------------------------------------------------------------

    def check_space(self, needed: int) -> None:
        """MachineError if the disk has not so many bytes for a checkpoint."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise MachineError(
                f"{self.path}: a checkpoint needs {needed:,} bytes, {free:,} are free; make room, "
                f"or name another directory with --out"
            )

    def save(self, checkpoint: Checkpoint, keep: int = 2) -> None:
        """Write a checkpoint and let go of all but the newest whole ones, so many, and the best.

        MachineError if it cannot be written; those that are there stay whole.
        """
        contents = {
            "model.safetensors": safetensors.torch.save(checkpoint.model),
            "optimizer.safetensors": safetensors.torch.save(checkpoint.optimizer),
            "state.json": json.dumps({"format": FORMAT, **checkpoint.state}, indent=1).encode(),
        }
        manifest = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in contents.items()
        }
        contents["manifest.json"] = json.dumps(manifest, indent=1).encode()
        try:
            self._write(checkpoint.step, contents)
            self.write_best(checkpoint.state["best"])
            self._retain(checkpoint.state["best"], keep)
        except OSError as error:
            shutil.rmtree(self.checkpoints / ".tmp", ignore_errors=True)
            needed = sum(map(len, contents.values()))
            free = shutil.disk_usage(self.path).free if self.path.exists() else 0
            raise MachineError(
                f"{self.checkpoints}: step {checkpoint.step} could not be saved "
                f"({(error.strerror or str(error)).lower()}); it needs {needed:,} bytes, {free:,} "
                f"are free; the same command goes on from the checkpoint before"
            ) from None

    def _write(self, step: int, contents: dict[str, bytes]) -> None:
        final = self.checkpoints / f"step-{step:08d}"
        temporary = self.checkpoints / ".tmp"
        files.remove_tree(temporary)
        temporary.mkdir()  # a run that was moved away meanwhile is not begun anew here
        for name, data in contents.items():
            files.write(temporary / name, data)
        files.sync_directory(temporary)
        files.remove_tree(final)  # only a damaged one can be there
        files.rename(temporary, final)

    def write_best(self, best: dict[str, Any] | None) -> None:
        """Say which step was the best, so far as any was evaluated."""
        if best is not None:
            files.replace(self.path / "best.json", json.dumps(best).encode())

    def _retain(self, best: dict[str, Any] | None, keep: int) -> None:
        whole = 1  # the newest, which was just written
        for step in self.steps()[1:]:
            if whole < keep:
                whole += self._is_whole(step)
            elif best is None or step != best["step"]:
                files.remove_tree(self.checkpoints / f"step-{step:08d}")

    def _is_whole(self, step: int) -> bool:
        folder = self.checkpoints / f"step-{step:08d}"
        try:
            manifest = _json(folder / "manifest.json")
            return all(_checked(folder / name, manifest) for name in FILES)
        except CheckpointError:
            return False

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after a step, which are damaged, so that none counts as kept."""
        for newer in self.steps():
            if newer > step:
                damaged = self.checkpoints / f"step-{newer:08d}.damaged"
                files.remove_tree(damaged)
                files.rename(self.checkpoints / f"step-{newer:08d}", damaged)

    # -- loading -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        names = (entry.name for entry in self.checkpoints.glob("step-*"))
        matches = (NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None if there never was one.

        Raises CheckpointError when there are some and every one is damaged.
        """
        return self._first_whole(self.steps(), with_optimizer=True)

    def best(self) -> Checkpoint:
        """The best checkpoint, without the optimizer; else the newest that is whole."""
        try:
            return self._best()
        except CheckpointError:  # a run that is training may have let go of what was being read
            return self._best()

    def _best(self) -> Checkpoint:
        steps = self.steps()
        try:
            best = json.loads((self.path / "best.json").read_bytes())["step"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            best = None
        if best in steps:
            steps.remove(best)
            steps.insert(0, best)
        checkpoint = self._first_whole(steps, with_optimizer=False)
        if checkpoint is None:
            raise CheckpointError(f"{self.path}: no checkpoint yet; go on with gptmini train")
        return checkpoint

    def _first_whole(self, steps: list[int], with_optimizer: bool) -> Checkpoint | None:
        damages: list[str] = []
        for step in steps:
            try:
                checkpoint = self._load(step, with_optimizer)
            except CheckpointError as damage:
                damages += damage.lines
                continue
            for line in damages:
                self.warn(line)
            return checkpoint
        if damages:
            raise CheckpointError(*damages, f"{self.path}: no whole checkpoint; restore one")
        return None

    def _load(self, step: int, with_optimizer: bool) -> Checkpoint:
        folder = self.checkpoints / f"step-{step:08d}"
        manifest = _json(folder / "manifest.json")
        _checked(folder / "state.json", manifest)
        state = _json(folder / "state.json")
        found = (state.get("format"), state.get("step"))
        if found != (FORMAT, step):
            raise CheckpointError(
                f"{folder}: holds format {found[0]} and step {found[1]}, not format {FORMAT} and "
                f"its own step; passed over"
            )
        return Checkpoint(
            state,
            _tensors(folder / "model.safetensors", manifest),
            _tensors(folder / "optimizer.safetensors", manifest) if with_optimizer else {},
        )


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
        return data
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); passed over") from None


def _checked(path: Path, manifest: Any) -> bytes:
    """The bytes of a file that agree with the manifest; CheckpointError if they do not."""
    try:
        expected = manifest[path.name]
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{path.stat().st_size} bytes of {expected['bytes']}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise ValueError("its SHA-256 does not agree with the manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); passed over") from None
    return data


def _tensors(path: Path, manifest: Any) -> Tensors:
    try:
        return safetensors.torch.load(_checked(path, manifest))
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: no safetensors ({error}); passed over") from None


def fitting(found: Tensors, expected: dict[str, Tensor], where: Path) -> Tensors:
    """The tensors found, if names and shapes are those expected; else CheckpointError."""
    lines = [
        f"{where}: tensor {name}: {_shape(found, name)} in the checkpoint, "
        f"{_shape(expected, name)} in the model; it belongs to another configuration"
        for name in sorted(found.keys() | expected.keys())
        if _shape(found, name) != _shape(expected, name)
    ]
    if lines:
        raise CheckpointError(*lines)
    return found


def _shape(tensors: dict[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"
