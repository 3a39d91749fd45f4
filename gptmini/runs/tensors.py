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
from gptmini.errors import CheckpointError, os_reason

Tensors = dict[str, Tensor]
Manifest = dict[str, Any]
SHARD = re.compile(r"(model|optimizer)-([0-9]{5})-of-([0-9]{5})\.safetensors")


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor of some shape, the first of them at `start`; of a number, all of it."""

    rows: Tensor
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What to read of a tensor: of n rows those in `rows(n)`, as `tensor(rows, shape)` has them."""

    rows: Callable[[int], slice] = lambda count: slice(0, count)
    tensor: Callable[[Tensor, tuple[int, ...]], Tensor] = lambda rows, shape: rows


WHOLE = Part()


def encoded(tensors: Tensors) -> bytes:
    return safetensors.torch.save(tensors)


def described(data: bytes) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_shard(
    folder: Path, kind: str, number: int, count: int, pieces: dict[str, Piece]
) -> Manifest:
    """Write the file of one of `count` processes, from 1; returns what the manifest says of it."""
    name = f"{kind}-{number:05d}-of-{count:05d}.safetensors"
    data = encoded({key: piece.rows.contiguous() for key, piece in pieces.items()})
    files.write(folder / name, data)
    layout = {
        key: {"start": piece.start, "rows": list(piece.rows.shape[:1]), "shape": piece.shape}
        for key, piece in pieces.items()
    }
    return {name: described(data) | {"tensors": layout}}


def file_names(kind: str, folder: Path, manifest: Manifest) -> list[str]:
    """The files of the model or the optimizer; CheckpointError if the manifest lacks any."""
    if (whole := f"{kind}.safetensors") in manifest:
        return [whole]
    matches = [match for match in map(SHARD.fullmatch, manifest) if match and match[1] == kind]
    count = int(matches[0][3]) if matches else 1
    found = sorted(match[0] for match in matches)
    if found != [f"{kind}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]:
        raise CheckpointError(f"{folder}: damaged (manifest.json does not name all of the {kind})")
    return found


def digest(kind: str, folder: Path, manifest: Manifest) -> str:
    """The SHA-256 of the file; of several, that of their SHA-256s."""
    hashes = [str(manifest[name]["sha256"]) for name in file_names(kind, folder, manifest)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def read(folder: Path, kind: str, manifest: Manifest, part: Part = WHOLE) -> Tensors:
    """The tensors of the model or the optimizer; opens only the files with rows of the part.

    CheckpointError for a file that is damaged, and for rows that no file has.
    """
    found: dict[str, list[Piece]] = {}
    for name in file_names(kind, folder, manifest):
        try:
            for key, piece in _pieces(folder / name, manifest, part).items():
                found.setdefault(key, []).append(piece)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{folder / name}: damaged ({error!r} in its layout)") from None
    return {key: _joined(f"{folder}: {key}", pieces, part) for key, pieces in found.items()}


def _pieces(path: Path, manifest: Manifest, part: Part) -> dict[str, Piece]:
    """The rows that a file has of a part, perhaps none, by tensor."""
    layout = manifest[path.name].get("tensors")
    tensors = None if layout else _tensors(path, manifest)
    if tensors is not None:
        shapes = {key: tensor.shape for key, tensor in tensors.items()}
        layout = {key: {"start": 0, "rows": n[:1], "shape": n} for key, n in shapes.items()}
    pieces = {}
    for key, place in sorted(layout.items(), key=lambda item: not item[1]["shape"]):
        start, shape = int(place["start"]), tuple(map(int, place["shape"]))
        if not shape:  # a number, which every file has; none is opened for it
            if tensors is not None:
                pieces[key] = Piece(tensors[key].reshape(()), 0, shape)
            continue
        count, wanted = int(place["rows"][0]), part.rows(shape[0])
        first, last = max(wanted.start, start), min(wanted.stop, start + count)
        rows = torch.empty(0, *shape[1:])
        if first < last:
            tensors = _tensors(path, manifest) if tensors is None else tensors
            rows = tensors[key]
            if rows.shape != (count, *shape[1:]):
                raise ValueError(f"{key} has another shape")
            if last - first < count:  # a copy, as a view would keep the whole file in memory
                rows = rows[first - start : last - start].clone()
        pieces[key] = Piece(rows, first, shape)
    return pieces


def _joined(where: str, pieces: list[Piece], part: Part) -> Tensor:
    """The wanted rows of a tensor from its pieces."""
    shape = pieces[0].shape
    if not shape:
        return pieces[0].rows
    wanted = part.rows(shape[0])
    at, rows = wanted.start, []
    for piece in sorted((each for each in pieces if len(each.rows)), key=lambda each: each.start):
        if piece.start != at or piece.shape != shape:
            break
        at += len(piece.rows)
        rows.append(piece.rows)
    if at != wanted.stop:
        raise CheckpointError(f"{where}: damaged (row {at} is missing)")
    whole = rows[0] if len(rows) == 1 else torch.cat([torch.empty(0, *shape[1:]), *rows])
    return part.tensor(whole, shape)


def _tensors(path: Path, manifest: Manifest) -> Tensors:
    try:
        return safetensors.torch.load(read_verified(path, manifest))
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({os_reason(error)})") from None


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
        raise CheckpointError(f"{path}: damaged ({os_reason(error)})") from None
    return data


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
