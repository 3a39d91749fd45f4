"""The tensor files of a checkpoint, whole or in shards: written, verified, read.

One process writes `model.safetensors`. Of several that share the weights, process 2 of 4 writes
`model-00002-of-00004.safetensors` with its rows of every tensor, and the manifest tells where they
belong. Any number of processes reads either, each the rows that it needs.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gptmini import files
from gptmini.errors import CheckpointError, describe_os_error

Tensors = dict[str, Tensor]
Manifest = dict[str, Any]
SHARD_NAME = re.compile(r"(model|optimizer)-([0-9]{5})-of-([0-9]{5})\.safetensors")


@dataclass(frozen=True)
class RowSlice:
    """Rows of a tensor of some shape, the first of them at `start`; of a number, all of it."""

    rows: Tensor
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardSpec:
    """What to read of a tensor: of n rows those in `rows(n)`, as `tensor(rows, shape)` has them."""

    slice_rows: Callable[[int], slice] = lambda count: slice(0, count)
    to_tensor: Callable[[Tensor, tuple[int, ...]], Tensor] = lambda rows, shape: rows


UNSHARDED = ShardSpec()


def serialize(tensors: Tensors) -> bytes:
    return safetensors.torch.save(tensors)


def describe_file(data: bytes) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_shard(
    folder: Path, kind: str, number: int, count: int, slices: dict[str, RowSlice]
) -> Manifest:
    """Write the file of one of `count` processes, from 1; returns what the manifest says of it."""
    name = f"{kind}-{number:05d}-of-{count:05d}.safetensors"
    data = serialize({key: piece.rows.contiguous() for key, piece in slices.items()})
    files.write_and_sync(folder / name, data)
    layout = {
        key: {"start": piece.start, "rows": list(piece.rows.shape[:1]), "shape": piece.shape}
        for key, piece in slices.items()
    }
    return {name: describe_file(data) | {"tensors": layout}}


def list_files(kind: str, folder: Path, manifest: Manifest) -> list[str]:
    """The files of the model or the optimizer; CheckpointError if the manifest lacks any."""
    if (whole := f"{kind}.safetensors") in manifest:
        return [whole]
    matches = [match for match in map(SHARD_NAME.fullmatch, manifest) if match and match[1] == kind]
    count = int(matches[0][3]) if matches else 1
    found = sorted(match[0] for match in matches)
    if found != [f"{kind}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]:
        raise CheckpointError(f"{folder}: damaged (manifest.json does not name all of the {kind})")
    return found


def compute_digest(kind: str, folder: Path, manifest: Manifest) -> str:
    """The SHA-256 of the file; of several, that of their SHA-256s."""
    hashes = [str(manifest[name]["sha256"]) for name in list_files(kind, folder, manifest)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def read_tensors(
    folder: Path, kind: str, manifest: Manifest, spec: ShardSpec = UNSHARDED
) -> Tensors:
    """The tensors of the model or the optimizer; opens only the files with rows of the part.

    CheckpointError for a file that is damaged, and for rows that no file has.
    """
    found: dict[str, list[RowSlice]] = {}
    for name in list_files(kind, folder, manifest):
        try:
            for key, piece in _read_slices(folder / name, manifest, spec).items():
                found.setdefault(key, []).append(piece)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{folder / name}: damaged ({error!r} in its layout)") from None
    return {key: _join_slices(f"{folder}: {key}", pieces, spec) for key, pieces in found.items()}


def _read_slices(path: Path, manifest: Manifest, spec: ShardSpec) -> dict[str, RowSlice]:
    """The rows that a file has of a part, perhaps none, by tensor."""
    layout = manifest[path.name].get("tensors")
    tensors = None if layout else _load_tensors(path, manifest)
    if tensors is not None:
        shapes = {key: tensor.shape for key, tensor in tensors.items()}
        layout = {key: {"start": 0, "rows": n[:1], "shape": n} for key, n in shapes.items()}
    pieces = {}
    for key, place in sorted(layout.items(), key=lambda item: not item[1]["shape"]):
        start, shape = int(place["start"]), tuple(map(int, place["shape"]))
        if not shape:  # a number, which every file has; none is opened for it
            if tensors is not None:
                pieces[key] = RowSlice(tensors[key].reshape(()), 0, shape)
            continue
        count, wanted = int(place["rows"][0]), spec.slice_rows(shape[0])
        first, last = max(wanted.start, start), min(wanted.stop, start + count)
        rows = torch.empty(0, *shape[1:])
        if first < last:
            tensors = _load_tensors(path, manifest) if tensors is None else tensors
            rows = tensors[key]
            if rows.shape != (count, *shape[1:]):
                raise ValueError(f"{key} has another shape")
            if last - first < count:  # a copy, as a view would keep the whole file in memory
                rows = rows[first - start : last - start].clone()
        pieces[key] = RowSlice(rows, first, shape)
    return pieces


def _join_slices(where: str, slices: list[RowSlice], spec: ShardSpec) -> Tensor:
    """The wanted rows of a tensor from its pieces."""
    shape = slices[0].shape
    if not shape:
        return slices[0].rows
    wanted = spec.slice_rows(shape[0])
    at, rows = wanted.start, []
    for piece in sorted((each for each in slices if len(each.rows)), key=lambda each: each.start):
        if piece.start != at or piece.shape != shape:
            break
        at += len(piece.rows)
        rows.append(piece.rows)
    if at != wanted.stop:
        raise CheckpointError(f"{where}: damaged (row {at} is missing)")
    whole = rows[0] if len(rows) == 1 else torch.cat([torch.empty(0, *shape[1:]), *rows])
    return spec.to_tensor(whole, shape)


def _load_tensors(path: Path, manifest: Manifest) -> Tensors:
    try:
        return safetensors.torch.load(read_verified(path, manifest))
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from None


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None


def read_verified(path: Path, manifest: Manifest) -> bytes:
    """The bytes of a file; CheckpointError if they do not match the manifest."""
    try:
        expected = manifest[path.name]
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{path.stat().st_size} bytes instead of {expected['bytes']}")
        data = files.read_regular(path)
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise ValueError("its contents do not match the manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None
    return data


def check_shapes(tensors: Tensors, expected: Tensors, where: Path) -> Tensors:
    """The same tensors, if their names and shapes are those expected; else CheckpointError."""
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
