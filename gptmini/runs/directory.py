"""Keeps everything about one run in a directory, with checkpoints that are whole or absent.

    config.yaml        every setting
    request.yaml       those that were asked for; imported runs have none
    tokenizer.json     all that encoding needs
    metrics.jsonl      one JSON object per line
    best.json          step and loss of the best evaluation
    losses-*.json      losses of held-out text (train/kept_losses.py)
    checkpoints/step-00000500/
        model.safetensors  optimizer.safetensors  state.json
        manifest.json      size and SHA-256 of the three, written last

The weights may be in several files (see tensors.py).

A checkpoint is written under a temporary name, synced, then renamed. Nothing in it is used before
its bytes match the manifest, and loading it cannot run code.

Beside these lie `lock`, which the process that trains the run holds, and what a killed process
left: .tmp-*, checkpoints/.tmp and .trash-*, which never count; step-*.damaged are checkpoints that
were set aside. While nothing trains the run, all of them may be deleted.
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gptmini import files
from gptmini.config import load, yamlfile
from gptmini.config.settings import Config
from gptmini.console import warn
from gptmini.errors import CheckpointError, ConfigError, DataError, MachineError, describe_os_error
from gptmini.runs import tensors
from gptmini.runs.tensors import (
    Manifest,
    Tensors,
    check_file,
    list_model_files,
    read_checkpoint_json,
    read_tensors,
)
from gptmini.tokenizer.tokenizers import Tokenizer

CHECKPOINT_FORMAT_VERSION = 3
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


@dataclass
class Checkpoint:
    """A run after one of its steps; `state` is JSON data: step, best evaluation, counters.

    `sha256` is the digest of the file that the weights were read from; of several files, the digest
    of their digests.
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
        self.metrics_file = path / "metrics.jsonl"
        self.config_file = path / "config.yaml"
        self.request_file = path / "request.yaml"
        self.tokenizer_file = path / "tokenizer.json"

    @property
    def exists(self) -> bool:
        """Return whether a run is here: its configuration is the last file that `create` writes."""
        return files.is_run(self.path)

    def create(
        self, config: Config, text_tokenizer: Tokenizer, request: Config | None = None
    ) -> None:
        """Write the files that stay the same throughout the run.

        `request` is the configuration by which a run is to be trained, before planning completed
        it.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        files.sync_directory(self.path.parent)
        files.atomic_write_bytes(self.tokenizer_file, text_tokenizer.to_json().encode())
        self.write_config(config, request)

    def write_config(self, config: Config, request: Config | None = None) -> None:
        """Write the configuration, and what was requested of it if that is given.

        ConfigError if it could not be read back; then nothing is written.
        """
        texts = {}
        if request is not None:  # first, as a run exists once it has a configuration
            texts[self.request_file] = yamlfile.dump(request.model_dump(exclude_unset=True))
        texts[self.config_file] = yamlfile.dump(config.model_dump())
        for path, text in texts.items():
            if len(text.encode()) > yamlfile.MAX_BYTES:
                raise ConfigError(
                    f"{path}: would be larger than 4 MiB; name the folder of the files in data.path"
                )
            load.validate(yamlfile.parse(text, str(path)), {})
        for path, text in texts.items():
            files.atomic_write_bytes(path, text.encode())

    def load_config(self) -> Config:
        """Load the run's configuration; CheckpointError if there is no run."""
        if not self.exists:
            raise CheckpointError(f"{self.path}: no run here; create one with gptmini train")
        data, lines = yamlfile.read_file(self.config_file)
        # Runs of earlier versions name two settings that no longer exist.
        data.pop("teacher", None)
        if isinstance(data.get("train"), dict):
            data["train"].pop("on_divergence", None)
        origins = {key: f"{self.config_file}:{line}" for key, line in lines.items()}
        return load.validate(data, origins)

    def load_request(self) -> Config:
        """Load the configuration by which the run was begun; ConfigError if it has none."""
        return load.load_config(load.find_request(self.path), [])

    def load_tokenizer(self, checkpoint: Checkpoint | None = None) -> Tokenizer:
        """Load the run's tokenizer; DataError if it is not that of the checkpoint."""
        from gptmini.tokenizer.load import load_tokenizer  # noqa: PLC0415 - training needs no files

        tokenizer = load_tokenizer(self.tokenizer_file)
        if checkpoint is not None and checkpoint.state["tokenizer"] != tokenizer.fingerprint:
            raise DataError(
                f"{self.tokenizer_file}: not the tokenizer of this run, but a {tokenizer.kind} "
                f"tokenizer with {tokenizer.vocab_size:,} tokens; restore the original file"
            )
        return tokenizer

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer, or raise MachineError; a killed process locks nobody out.

        Nothing in the run may be a link: a downloaded run would write elsewhere through it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in sorted(self.path.iterdir()):
            if entry.is_symlink():
                raise MachineError(f"{entry}: a link, which training could follow; delete it")
        path = self.path / "lock"
        if path.exists() and not path.is_file():
            raise MachineError(f"{path}: not a regular file; delete it")
        with path.open("a+") as file:
            if not files.try_lock(file.fileno()):
                file.seek(0)
                raise MachineError(
                    f"{self.path}: {file.read(200).strip() or 'another process'} is training this "
                    f"run; wait for it, or choose another directory with --out"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield

    def is_locked(self) -> bool:
        """Tell whether a process is training this run; False where that cannot be known."""
        try:
            with files.open_regular(self.path / "lock") as file:
                return not files.try_lock(file.fileno())
        except OSError:  # never trained
            return False

    # -- saving ------------------------------------------------------------------------------------

    def check_space(self, needed: int) -> None:
        """Raise MachineError if a checkpoint of `needed` bytes does not fit on the disk."""
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
        self.save_in_parts(checkpoint.state, [checkpoint.model], 1, checkpoint.optimizer, keep)

    def save_in_parts(
        self,
        state: dict[str, Any],
        parts: Iterable[Tensors],
        count: int,
        optimizer: Tensors,
        keep: int = 2,
    ) -> None:
        """Save a checkpoint whose weights come in `count` parts, a file for each.

        The order is the promise: a folder has its name only once everything in it is synced, and an
        old checkpoint is deleted only once the new one has its name. A kill in between leaves a
        temporary folder, which the next save removes.
        """
        step = int(state["step"])
        by_file = zip(tensors.name_model_files(count), parts, strict=True)
        folder = self.checkpoints / ".tmp"
        try:
            self.checkpoints.mkdir(exist_ok=True)  # without parents: fails if the run has moved
            files.remove_tree(folder)  # of a process that was killed
            folder.mkdir()
            manifest: Manifest = {}
            for name, contents in chain(by_file, [("optimizer.safetensors", optimizer)]):
                manifest[name] = tensors.write_tensors(folder / name, contents)
            state_json = _dump({"format": CHECKPOINT_FORMAT_VERSION, **state})
            manifest["state.json"] = tensors.describe_file(state_json)
            files.write_and_sync(folder / "state.json", [state_json])
            files.write_and_sync(folder / "manifest.json", [_dump(manifest)])
            files.sync_directory(folder)
            files.remove_tree(self._get_folder(step))  # if one is there, it is damaged
            files.rename(folder, self._get_folder(step))
            self.write_best(state["best"])
            self.prune(state["best"], keep)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(self.path).free if self.path.exists() else 0
            raise MachineError(
                f"{self.checkpoints}: could not save step {step} ({describe_os_error(error)}), "
                f"{free:,} bytes free; see that the run is there and has room, and train again"
            ) from None

    def write_best(self, best: dict[str, Any] | None) -> None:
        """Write step and loss of the best evaluation, if there is one."""
        if best is not None:
            files.atomic_write_bytes(self.path / "best.json", json.dumps(best).encode())

    def prune(self, best: dict[str, Any] | None, keep: int) -> None:
        """Delete all checkpoints but the best and the newest `keep` intact ones.

        Damaged ones do not count, or they would push out the good ones before them. The newest was
        just written or read, so it is not read again.
        """
        intact = 1
        for step in self.list_steps()[1:]:
            if intact < keep:
                intact += self._is_intact(step)
            elif best is None or step != best["step"]:
                files.remove_tree(self._get_folder(step))

    def read_newest_state(self) -> dict[str, Any]:
        """Return what the newest checkpoint says of the run; empty without one."""
        step = max(self.list_steps(), default=0)
        try:
            return read_checkpoint_json(self._get_folder(step) / "state.json")
        except CheckpointError:
            return {}

    def tidy_after(self, step: int, best: dict[str, Any] | None, keep: int) -> None:
        """Leave what was there once a step was saved, from which training resumes.

        Later checkpoints are damaged, and get a name that `prune` ignores. A kill may have come
        between writing a checkpoint and deleting the old ones.
        """
        for newer in self.list_steps():
            if newer > step:
                damaged = self.checkpoints / f"step-{newer:08d}.damaged"
                files.remove_tree(damaged)
                files.rename(self._get_folder(newer), damaged)
        self.write_best(best)
        self.prune(best, keep)

    # -- loading -----------------------------------------------------------------------------------

    def list_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        names = (entry.name for entry in self.checkpoints.glob("step-*"))
        matches = (CHECKPOINT_NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def load_newest(self) -> Checkpoint | None:
        """Load the newest intact checkpoint; None if there never was one.

        CheckpointError if there are checkpoints and all are damaged.
        """
        return self._load_first_intact(self.list_steps(), with_optimizer=True)

    def load_best(self, with_model: bool = True) -> Checkpoint:
        """Load the best checkpoint, else the newest intact one, without the optimizer's state.

        Without the model, its files are not read: of damage to them only a wrong size is noticed.
        """
        listed = self.list_steps()
        try:
            best = read_checkpoint_json(self.path / "best.json").get("step")
        except CheckpointError:
            best = None
        best_first = sorted(listed, key=lambda step: step != best)
        try:
            checkpoint = self._load_first_intact(best_first, with_model=with_model)
        except CheckpointError:
            if self.list_steps() == listed:
                raise
            return self.load_best(with_model)  # a running training has deleted what was listed
        if checkpoint is None:
            raise CheckpointError(f"{self.path}: no checkpoint yet; continue with gptmini train")
        return checkpoint

    def _load_first_intact(self, steps: list[int], **parts: bool) -> Checkpoint | None:
        """Load the first checkpoint that is intact, and warn of the damage in those before it."""
        damages: list[str] = []
        for step in steps:
            try:
                checkpoint = self.load_checkpoint(step, **parts)
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
        folder = self._get_folder(step)
        try:
            manifest = read_checkpoint_json(folder / "manifest.json")
            weights = list_model_files(folder, manifest)
            for name in ["state.json", *weights, "optimizer.safetensors"]:
                check_file(folder / name, manifest)
            return True
        except CheckpointError:
            return False

    def load_checkpoint(
        self, step: int, with_optimizer: bool = False, with_model: bool = True
    ) -> Checkpoint:
        """Load the checkpoint of a step; CheckpointError if damaged."""
        folder = self._get_folder(step)
        manifest = read_checkpoint_json(folder / "manifest.json")
        check_file(folder / "state.json", manifest)
        state = read_checkpoint_json(folder / "state.json")
        if state.get("format") != CHECKPOINT_FORMAT_VERSION or state.get("step") != step:
            raise CheckpointError(
                f"{folder}: state.json has format {state.get('format')} and step "
                f"{state.get('step')} instead of format {CHECKPOINT_FORMAT_VERSION} and step {step}"
            )
        weights = list_model_files(folder, manifest)
        for name in weights:
            check_file(folder / name, manifest, reads=False)
        digest = tensors.compute_model_digest(folder, manifest)
        model = read_tensors(folder, weights if with_model else [], manifest)
        moment_files = ["optimizer.safetensors"] if with_optimizer else []
        moments = read_tensors(folder, moment_files, manifest)
        return Checkpoint(state, model, moments, digest)

    def _get_folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"


def _dump(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1).encode()
