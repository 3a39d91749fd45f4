"""Writes, verifies and reads the tensor files of a checkpoint, whole or in shards.

One process writes `model.safetensors`. Of several that share the weights, process 2 of 4 writes
`model-00002-of-00004.safetensors` with its rows of every tensor, and the manifest tells where they
belong. Any number of processes reads either, each the rows that it needs.

The HuggingFaceStorageWriter of torch.distributed.checkpoint writes a safetensors file per rank too,
but no manifest or checksum for them; its reader believes whatever files lie in the folder, and both
plan with pickled messages between ranks. The promises of a run (no pickle, a manifest written last,
the SHA-256 of every file, the old checkpoint whole wherever a save is killed) need this layout.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptmini import files
from gptmini.errors import CheckpointError, describe_os_error

Tensors = dict[str, Tensor]
NamedTensors = Iterable[tuple[str, Tensor]]
Manifest = dict[str, Any]
DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.int64}  # of what is written here
# What damaged names, numbers and shapes make Python and torch raise.
DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
OS_ERROR = re.compile(r"os error ([0-9]+)")
SHARD_NAME = re.compile(r"(model|optimizer)-([0-9]{5})-of-([0-9]{5})\.safetensors")


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a tensor, the first of them at `start`; a scalar has no rows and is whole.

    `shape` is that of the whole tensor.
    """

    rows: Tensor
    start: int
    shape: tuple[int, ...]


def _slice_all_rows(count: int) -> slice:
    return slice(0, count)


def _keep_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return rows


@dataclass(frozen=True)
class ShardSpec:
    """Names the rows to read of each tensor: of n rows those in `slice_rows(n)`.

    `to_tensor(rows, shape)` gets the shape of the whole tensor. By default, all rows are read.
    """

    slice_rows: Callable[[int], slice] = _slice_all_rows
    to_tensor: Callable[[Tensor, tuple[int, ...]], Tensor] = _keep_rows


UNSHARDED = ShardSpec()


def describe_file(data: bytes) -> dict[str, Any]:
    """Return the entry of a file in the manifest."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_tensors(
    path: Path, tensors: Tensors, metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write and sync a safetensors file, and return its entry in the manifest."""
    try:
        safetensors.torch.save_file(_prepare_to_save(tensors), path, metadata)
    except SafetensorError as error:
        # The library wraps what the system says, of a full disk for example.
        number = OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    digest = files.sync_and_hash(path)
    return {"bytes": path.stat().st_size, "sha256": digest}


def _prepare_to_save(tensors: Tensors) -> Tensors:
    """Return tensors as the library takes them: on the CPU, dense, and none shares its memory."""
    prepared = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        prepared[name] = dense.clone() if storage in storages else dense
        storages.add(storage)
    return prepared


def write_shard(
    folder: Path, kind: str, number: int, count: int, slices: dict[str, RowSlice]
) -> Manifest:
    """Write the file of one of `count` processes, from 1; returns its entry in the manifest."""
    name = f"{kind}-{number:05d}-of-{count:05d}.safetensors"
    layout = {}
    for key, row_slice in slices.items():
        layout[key] = {
            "start": row_slice.start,
            "rows": list(row_slice.rows.shape[:1]),  # empty for a scalar
            "shape": row_slice.shape,
        }
    rows = {key: row_slice.rows for key, row_slice in slices.items()}
    return {name: write_tensors(folder / name, rows) | {"tensors": layout}}


def list_files(kind: str, folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of the model or the optimizer; CheckpointError if the manifest lacks any."""
    whole = f"{kind}.safetensors"
    if whole in manifest:
        return [whole]
    matches = [match for match in map(SHARD_NAME.fullmatch, manifest) if match and match[1] == kind]
    count = int(matches[0][3]) if matches else 1
    found = sorted(match[0] for match in matches)
    expected = [f"{kind}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    if found != expected:
        raise CheckpointError(f"{folder}: damaged (manifest.json does not name all of the {kind})")
    return found


def compute_digest(kind: str, folder: Path, manifest: Manifest) -> str:
    """Return the SHA-256 of the file; of several, that of their SHA-256s."""
    hashes = [str(manifest[name]["sha256"]) for name in list_files(kind, folder, manifest)]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def read_tensors(
    folder: Path, kind: str, manifest: Manifest, spec: ShardSpec = UNSHARDED
) -> Tensors:
    """Read the tensors of the model or the optimizer; opens only the files with rows of `spec`.

    CheckpointError for a file that is damaged, and for rows that no file has.
    """
    found: dict[str, list[RowSlice]] = {}
    for name in list_files(kind, folder, manifest):
        try:
            for key, row_slice in _read_slices(folder / name, manifest, spec).items():
                found.setdefault(key, []).append(row_slice)
        # The manifest itself has no checksum, so its layout may be anything.
        except DAMAGE as error:
            raise CheckpointError(f"{folder / name}: damaged ({error!r} in its layout)") from None
    return {key: _join_slices(f"{folder}: {key}", slices, spec) for key, slices in found.items()}


def _read_slices(path: Path, manifest: Manifest, spec: ShardSpec) -> dict[str, RowSlice]:
    """Read the rows of `spec` that a file has, perhaps none, by tensor.

    The manifest tells which rows of a shard are where, so a shard without any is never opened.
    """
    layout = manifest[path.name].get("tensors")
    tensors = None if layout else _load_tensors(path, manifest)
    if tensors is not None:
        layout = {}
        for key, tensor in tensors.items():
            layout[key] = {"start": 0, "rows": tensor.shape[:1], "shape": tensor.shape}
    slices = {}
    # Scalars last: every file has them, so they are read from those that are open anyway.
    for key, place in sorted(layout.items(), key=lambda item: not item[1]["shape"]):
        start = int(place["start"])
        shape = tuple(map(int, place["shape"]))
        if not shape:
            if tensors is not None:
                slices[key] = RowSlice(tensors[key].reshape(()), 0, shape)
            continue
        count = int(place["rows"][0])
        wanted = spec.slice_rows(shape[0])
        first = max(wanted.start, start)
        last = min(wanted.stop, start + count)
        rows = torch.empty(0, *shape[1:])
        if first < last:
            tensors = _load_tensors(path, manifest) if tensors is None else tensors
            rows = tensors[key]
            if rows.shape != (count, *shape[1:]):
                raise ValueError(f"{key} has another shape")
            if last - first < count:  # a copy, as a view would keep the whole file in memory
                rows = rows[first - start : last - start].clone()
        slices[key] = RowSlice(rows, first, shape)
    return slices


def _join_slices(where: str, slices: list[RowSlice], spec: ShardSpec) -> Tensor:
    """Return the wanted rows of a tensor from the slices that the files have of it."""
    shape = slices[0].shape
    if not shape:
        return slices[0].rows
    wanted = spec.slice_rows(shape[0])
    next_row = wanted.start
    rows = []
    filled = [row_slice for row_slice in slices if len(row_slice.rows)]
    for row_slice in sorted(filled, key=lambda row_slice: row_slice.start):
        if row_slice.start != next_row or row_slice.shape != shape:
            break
        next_row += len(row_slice.rows)
        rows.append(row_slice.rows)
    if next_row != wanted.stop:
        raise CheckpointError(f"{where}: damaged (row {next_row} is missing)")
    if len(rows) == 1:
        return spec.to_tensor(rows[0], shape)
    no_rows = torch.empty(0, *shape[1:])  # torch.cat takes no empty list
    return spec.to_tensor(torch.cat([no_rows, *rows]), shape)


def _load_tensors(path: Path, manifest: Manifest) -> Tensors:
    """Read a file; CheckpointError if it does not match the manifest."""
    check_file(path, manifest)
    try:
        with safe_open(path, "pt") as file:
            # Copied: the library's own tensors are the file itself, which may be deleted or cut.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if strange := {tensor.dtype for tensor in tensors.values()} - DTYPES:
            raise ValueError(f"numbers of type {strange.pop()}")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None
    return tensors


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; CheckpointError if there is none."""
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None


def check_size(path: Path, manifest: Manifest) -> None:
    """CheckpointError if a file is missing or has another size than the manifest says."""
    try:
        expected = manifest[path.name]["bytes"]
        found = path.stat().st_size
        if found != expected:
            raise ValueError(f"{found} bytes instead of {expected}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None


def check_file(path: Path, manifest: Manifest) -> None:
    """CheckpointError if a file does not have the bytes that the manifest says."""
    check_size(path, manifest)
    try:
        with files.open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        if digest != manifest[path.name]["sha256"]:
            raise ValueError("its contents do not match the manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None


def find_infinite(tensors: Tensors) -> str:
    """Return the name of the first tensor with a NaN or an infinity; empty if there is none.

    Both stay in a sum, which is faster than to ask for each number (scripts/LOG.md, 2026-11-25).
    Only weights near float32's largest number could exceed it together.
    """
    for name, tensor in tensors.items():
        if not tensor.sum().isfinite():
            return name
    return ""


def check_shapes(tensors: Tensors, expected: Tensors, where: Path) -> Tensors:
    """Return the tensors if their names and shapes are those expected; else CheckpointError."""
    lines = [
        f"{where}: tensor {name}: {_format_shape(tensors, name)} in the checkpoint, "
        f"{_format_shape(expected, name)} in the model; use the configuration it was trained with"
        for name in sorted(tensors.keys() | expected.keys())
        if _format_shape(tensors, name) != _format_shape(expected, name)
    ]
    if lines:
        raise CheckpointError(*lines)
    return tensors


def _format_shape(tensors: Tensors, name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"
