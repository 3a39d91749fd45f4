"""A run directory: everything about one run, with checkpoints that are complete or absent.

    config.yaml        every setting
    tokenizer.json     all that encoding needs
    metrics.jsonl      one JSON object per line
    best.json          step and loss of the best evaluation
    checkpoints/step-00000500/
        model.safetensors  optimizer.safetensors  state.json
        manifest.json      size and SHA-256 of the three, written last

A checkpoint is written under a temporary name, synced, then renamed. Nothing in it is used before
its bytes match the manifest, and loading it cannot run code.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from gptmini import files
from gptmini.config import load, yamlfile
from gptmini.config.settings import Config
from gptmini.console import warn
from gptmini.errors import CheckpointError, DataError, MachineError, os_reason
from gptmini.text import tokenizer
from gptmini.text.tokenizer import Tokenizer

FORMAT = 3
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
NAME = re.compile(r"step-([0-9]{8})")
Tensors = dict[str, Tensor]


@dataclass
class Checkpoint:
    """A run after one of its steps; `state` is JSON data: step, best evaluation, counters.

    `sha256` is that of the file the weights were read from.
    """

    state: dict[str, Any]
    model: Tensors
    optimizer: Tensors
    sha256: str = ""

    @property
    def step(self) -> int:
        return int(self.state["step"])


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.config_file = path / "config.yaml"
        self.tokenizer_file = path / "tokenizer.json"

    @property
    def exists(self) -> bool:
        """Whether there is a run here: its configuration is the last file that `create` writes."""
        return self.config_file.exists()

    def create(self, config: Config, text_tokenizer: Tokenizer) -> None:
        """Write the files that stay the same throughout the run."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        files.sync_directory(self.path.parent)
        files.replace(self.tokenizer_file, text_tokenizer.to_json().encode())
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        files.replace(self.config_file, yamlfile.dump(config.model_dump()).encode())

    def config(self) -> Config:
        """The run's configuration; CheckpointError if there is no run."""
        if not self.exists:
            raise CheckpointError(f"{self.path}: no run here; create one with gptmini train")
        data, lines = yamlfile.read_file(self.config_file)
        origins = {key: f"{self.config_file}:{line}" for key, line in lines.items()}
        return load.validate(data, origins)

    def tokenizer(self, checkpoint: Checkpoint | None = None) -> Tokenizer:
        """The run's tokenizer; DataError if it is not that of the checkpoint."""
        own = tokenizer.read(self.tokenizer_file)
        if checkpoint is not None and checkpoint.state["tokenizer"] != own.fingerprint:
            raise DataError(
                f"{self.tokenizer_file}: not the tokenizer of this run, but a {own.kind} "
                f"tokenizer with {own.vocab_size:,} tokens; restore the original file"
            )
        return own

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer, or raise MachineError. The lock ends with the process."""
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
                    f"run; wait for it, or choose another directory with --out"
                ) from None
            except OSError:
                pass  # this file system has no locks
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield

    # -- saving ------------------------------------------------------------------------------------

    def check_space(self, needed: int) -> None:
        """MachineError if a checkpoint of `needed` bytes does not fit on the disk."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise MachineError(
                f"{self.path}: a checkpoint needs {needed:,} bytes, {free:,} are free; make room, "
                f"or choose another directory with --out"
            )

    def save(self, checkpoint: Checkpoint, keep: int = 2) -> None:
        """Write a checkpoint, then delete all but the best and the newest `keep` intact ones.

        MachineError if it cannot be written; existing checkpoints stay intact.
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
            self.prune(checkpoint.state["best"], keep)
        except OSError as error:
            shutil.rmtree(self.checkpoints / ".tmp", ignore_errors=True)
            needed = sum(map(len, contents.values()))
            free = shutil.disk_usage(self.path).free if self.path.exists() else 0
            raise MachineError(
                f"{self.checkpoints}: could not save step {checkpoint.step} "
                f"({os_reason(error)}): {needed:,} bytes needed, {free:,} "
                f"free; run the same command again to resume from the last checkpoint"
            ) from None

    def _write(self, step: int, contents: dict[str, bytes]) -> None:
        final = self._folder(step)
        temporary = self.checkpoints / ".tmp"
        files.remove_tree(temporary)
        temporary.mkdir()  # without parents: if the run has been moved away, fail
        for name, data in contents.items():
            files.write(temporary / name, data)
        files.sync_directory(temporary)
        files.remove_tree(final)  # if one is there, it is damaged
        files.rename(temporary, final)

    def write_best(self, best: dict[str, Any] | None) -> None:
        if best is not None:
            files.replace(self.path / "best.json", json.dumps(best).encode())

    def prune(self, best: dict[str, Any] | None, keep: int) -> None:
        """Delete all checkpoints but the best and the newest `keep` intact ones.

        The newest was just written or read, so it is not read again.
        """
        intact = 1
        for step in self.steps()[1:]:
            if intact < keep:
                intact += self._is_intact(step)
            elif best is None or step != best["step"]:
                files.remove_tree(self._folder(step))

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after a step, which are damaged, so that `keep` ignores them."""
        for newer in self.steps():
            if newer > step:
                damaged = self.checkpoints / f"step-{newer:08d}.damaged"
                files.remove_tree(damaged)
                files.rename(self._folder(newer), damaged)

    # -- loading -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        names = (entry.name for entry in self.checkpoints.glob("step-*"))
        matches = (NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if there never was one.

        CheckpointError if there are checkpoints and all are damaged.
        """
        return self._first_intact(self.steps(), with_optimizer=True)

    def best(self) -> Checkpoint:
        """The best checkpoint, else the newest intact one, without the optimizer's state."""
        try:
            checkpoint = self._first_intact(self._best_first(), with_optimizer=False)
        except CheckpointError:  # a running training may have deleted it while it was read
            checkpoint = self._first_intact(self._best_first(), with_optimizer=False)
        if checkpoint is None:
            raise CheckpointError(f"{self.path}: no checkpoint yet; continue with gptmini train")
        return checkpoint

    def _best_first(self) -> list[int]:
        try:
            best = _read_json(self.path / "best.json").get("step")
        except CheckpointError:
            best = None
        return sorted(self.steps(), key=lambda step: step != best)

    def _first_intact(self, steps: list[int], with_optimizer: bool) -> Checkpoint | None:
        damages: list[str] = []
        for step in steps:
            try:
                checkpoint = self.load(step, with_optimizer)
            except CheckpointError as damage:
                damages += damage.lines
                continue
            for line in damages:
                warn(f"{line}; using step {step}")
            return checkpoint
        if damages:
            raise CheckpointError(
                *damages, f"{self.path}: every checkpoint is damaged; restore one from a backup"
            )
        return None

    def _is_intact(self, step: int) -> bool:
        folder = self._folder(step)
        try:
            manifest = _read_json(folder / "manifest.json")
            return all(_read_verified(folder / name, manifest) for name in FILES)
        except CheckpointError:
            return False

    def load(self, step: int, with_optimizer: bool = False) -> Checkpoint:
        """The checkpoint of a step; CheckpointError if it is damaged."""
        folder = self._folder(step)
        manifest = _read_json(folder / "manifest.json")
        _read_verified(folder / "state.json", manifest)
        state = _read_json(folder / "state.json")
        if (state.get("format"), state.get("step")) != (FORMAT, step):
            raise CheckpointError(
                f"{folder}: state.json has format {state.get('format')} and step "
                f"{state.get('step')} instead of format {FORMAT} and step {step}"
            )
        return Checkpoint(
            state,
            _read_tensors(folder / "model.safetensors", manifest),
            _read_tensors(folder / "optimizer.safetensors", manifest) if with_optimizer else {},
            manifest["model.safetensors"]["sha256"],
        )

    def _folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"


def newest_run(runs: Path) -> Path | None:
    """The run in a folder that was trained last: the one with the newest checkpoint of a step.

    Runs that were only begun or converted come last.
    """
    return max((file.parent for file in runs.glob("*/config.yaml")), key=_trained, default=None)


def _trained(run: Path) -> tuple[float, float]:
    """When a run was last trained, 0 if never, and when its configuration was written."""
    directory = RunDirectory(run)
    step = max(directory.steps(), default=0)
    manifest = directory.checkpoints / f"step-{step:08d}" / "manifest.json"
    try:
        trained = manifest.stat().st_mtime if step else 0.0
        return trained, directory.config_file.stat().st_mtime
    except OSError:  # a running training may have deleted it
        return 0.0, 0.0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({os_reason(error)})") from None


def _read_verified(path: Path, manifest: dict[str, Any]) -> bytes:
    """The bytes of a file; CheckpointError if they do not match the manifest."""
    try:
        expected = manifest[path.name]
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{path.stat().st_size} bytes instead of {expected['bytes']}")
        data = files.read_regular(path)
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise ValueError("its contents do not match the manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({os_reason(error)})") from None
    return data


def _read_tensors(path: Path, manifest: dict[str, Any]) -> Tensors:
    try:
        return safetensors.torch.load(_read_verified(path, manifest))
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from None


def fitting(tensors: Tensors, expected: Tensors, where: Path) -> Tensors:
    """The same tensors, if their names and shapes are those expected; else CheckpointError."""
    lines = [
        f"{where}: tensor {name}: {_shape(tensors, name)} in the checkpoint, "
        f"{_shape(expected, name)} in the model; use the configuration it was trained with"
        for name in sorted(tensors.keys() | expected.keys())
        if _shape(tensors, name) != _shape(expected, name)
    ]
    if lines:
        raise CheckpointError(*lines)
    return tensors


def _shape(tensors: Tensors, name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"
