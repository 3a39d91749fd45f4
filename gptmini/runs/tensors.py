"""Writes, verifies and reads the tensor files of a checkpoint.

Training writes `model.safetensors`. Weights that are converted while they are written are in
several files, such as `model-00002-of-00004.safetensors`.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gptmini import files
from gptmini.errors import CheckpointError, describe_os_error

Tensors = dict[str, Tensor]
NamedTensors = Iterable[tuple[str, Tensor]]
Manifest = dict[str, Any]
OS_ERROR = re.compile(r"os error ([0-9]+)")


def describe_file(data: bytes) -> dict[str, Any]:
    """Return the entry of a file in the manifest."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_tensors(
    path: Path, tensors: Tensors, metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write and sync a safetensors file, and return its entry in the manifest."""
    path.touch()
    rights = path.stat().st_mode  # those of the umask; the library's temporary file has 0600
    try:
        safetensors.torch.save_file(_prepare_to_save(tensors), path, metadata)
    except SafetensorError as error:
        # The library wraps what the system says, of a full disk for example.
        number = OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    if path.stat().st_mode != rights:
        path.chmod(rights)
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


def name_model_files(count: int) -> list[str]:
    """Return the names of the `count` files that weights are written in."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def list_model_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of the weights; CheckpointError if the manifest lacks any."""
    found = sorted(name for name in manifest if name.startswith("model"))
    if not found or found != name_model_files(len(found)):
        raise CheckpointError(f"{folder}: damaged (manifest.json does not name all of the model)")
    return found


def compute_model_digest(folder: Path, manifest: Manifest) -> str:
    """Return the SHA-256 of the file of weights; of several, that of their SHA-256s.

    CheckpointError if the manifest lacks any.
    """
    try:
        hashes = [str(manifest[name]["sha256"]) for name in list_model_files(folder, manifest)]
    except KeyError:
        raise CheckpointError(
            f"{folder}: damaged (manifest.json lacks a checksum of the model)"
        ) from None
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def read_tensors(folder: Path, names: list[str], manifest: Manifest) -> Tensors:
    """Read the tensors in some files of a checkpoint; CheckpointError if one is damaged."""
    tensors: Tensors = {}
    for path in (folder / name for name in names):
        check_file(path, manifest)
        try:
            with path.open("rb") as opened:
                # By its number, as the library takes no name that is not UTF-8.
                place = str(path) if files.IS_WINDOWS else f"/dev/fd/{opened.fileno()}"
                with safe_open(place, "pt") as file:
                    # Copied: the library's own are the file itself, which may be deleted or cut.
                    tensors |= {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None
    return tensors


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; CheckpointError if there is none."""
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None


def check_file(path: Path, manifest: Manifest, reads: bool = True) -> None:
    """CheckpointError if a file has not the size or, if it is read, the bytes of the manifest."""
    try:
        expected = manifest[path.name]["bytes"]
        found = path.stat().st_size
        if found != expected:
            raise ValueError(f"{found} bytes instead of {expected}")
        if not reads:
            return
        with files.open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        if digest != manifest[path.name]["sha256"]:
            raise ValueError("its contents do not match the manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({describe_os_error(error)})") from None


def find_infinite(tensors: Tensors, model: nn.Module) -> str:
    """Return the name of the first parameter of a model with a NaN or an infinity, or "".

    `tensors` are those of its `state_dict`; a buffer, such as an additive mask, may be infinite.
    Both stay in a sum, which is faster than to ask for each number (scripts/LOG.md: How quickly can
    tensors be checked for NaN?). Only weights near float32's largest number could exceed it
    together.
    """
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not tensors[name].float().sum().isfinite():  # float8 has no sum
            return name
    return ""


def check_weights(tensors: Tensors, model: nn.Module, where: Path) -> None:
    """CheckpointError unless the tensors have a model's names and shapes, and are finite."""
    check_shapes(tensors, model.state_dict(), where)
    if spoiled := find_infinite(tensors, model):
        raise CheckpointError(
            f"{where}: {spoiled} has numbers that are not finite; train the run again"
        )


def check_shapes(tensors: Tensors, expected: Tensors, where: Path) -> None:
    """CheckpointError unless the tensors have the names and shapes that are expected."""
    lines = [
        f"{where}: tensor {name}: {_format_shape(tensors, name)} in the checkpoint, "
        f"{_format_shape(expected, name)} in the model; use the configuration it was trained with"
        for name in sorted(tensors.keys() | expected.keys())
        if _format_shape(tensors, name) != _format_shape(expected, name)
    ]
    if lines:
        raise CheckpointError(*lines)


def _format_shape(tensors: Tensors, name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"
