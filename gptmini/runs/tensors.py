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
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini import files
from gptmini.errors import CheckpointError, describe_os_error

Tensors = dict[str, Tensor]
NamedTensors = Iterable[tuple[str, Tensor]]
Manifest = dict[str, Any]
DTYPE_NAMES = {  # in a safetensors file
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
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
    """Write and sync a safetensors file, and return its entry in the manifest.

    Writing takes no memory but that of one tensor, where tensors are on an accelerator. The
    library's own `save` holds all of them twice; its `save_file` computes no digest, and hides
    what the system says of a full disk.
    """
    digest = hashlib.sha256()
    size = 0

    def iter_hashed() -> Iterator[memoryview]:
        nonlocal size
        for piece in _iter_pieces(tensors, metadata):
            digest.update(piece)
            size += len(piece)
            yield piece

    files.write_and_sync(path, iter_hashed())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _iter_pieces(tensors: Tensors, metadata: dict[str, str] | None) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: its header's length, its header, then the tensors.

    Wider numbers come first, so that each begins at a multiple of its own size.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor = tensors[name]
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().flatten()
        yield flat.view(torch.uint8).numpy().data


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
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
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
    """Read a file once; CheckpointError unless the very bytes that were read match the manifest.

    Each tensor is read into memory of its own. The library's own `load` holds all of them twice.
    """
    check_size(path, manifest)
    size = manifest[path.name]["bytes"]
    tensors = {}
    try:
        with files.open_regular(path) as file:
            assert isinstance(file, io.BufferedReader)
            start = file.read(8)
            header = file.read(min(int.from_bytes(start, "little"), size))
            digest = hashlib.sha256(start + header)
            for name, dtype, shape in _parse_header(header, size):
                tensor = torch.empty(shape, dtype=dtype)
                data = tensor.flatten().view(torch.uint8).numpy().data
                file.readinto(data)
                digest.update(data)
                tensors[name] = tensor
        if digest.hexdigest() != manifest[path.name]["sha256"]:
            raise ValueError("its contents do not match the manifest")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None
    return tensors


def _parse_header(header: bytes, size: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """List the tensors of a safetensors file of `size` bytes: name, type and shape.

    They lie one behind the other. A damaged header raises anything, or describes no more than
    `size` bytes.
    """
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    listed = []
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPES[entry["dtype"]]
        begin = end
        end += math.prod(entry["shape"]) * dtype.itemsize
        if entry["data_offsets"] != [begin, end] or end > size:
            raise ValueError(f"tensor {name} is not where it should be")
        listed.append((name, dtype, entry["shape"]))
    return listed


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


def read_verified(path: Path, manifest: Manifest) -> bytes:
    """Read the bytes of a file; CheckpointError if they do not match the manifest."""
    check_size(path, manifest)
    try:
        data = files.read_regular(path)
        if hashlib.sha256(data).hexdigest() != manifest[path.name]["sha256"]:
            raise ValueError("its contents do not match the manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None
    return data


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
