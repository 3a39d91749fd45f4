"""Reads GGUF: the files of llama.cpp, Ollama and LM Studio, and those that `gguf` wrote.

The package gguf finds the tensors in the file and dequantizes them. A file states little of the
model's shape beside its sizes; the rest follows from its architecture and from which tensors there
are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmini import files
from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, describe_lookup_error, describe_os_error, shorten
from gptmini.extras.interop.architectures import (
    convert_tensors,
    make_unsupported_error,
    match_tensors,
    validate_settings,
)
from gptmini.extras.interop.gguf import METADATA_KEYS, gguf_name, import_gguf, separate_halves
from gptmini.extras.interop.gguf_tokenizer import read_tokenizer
from gptmini.extras.interop.huggingface import check_no_lfs_pointer
from gptmini.model.layers import scale_frequencies
from gptmini.runs.tensors import NamedTensors
from gptmini.tokenizer.tokenizers import Tokenizer

# Other values change what a model computes. A factor without a type is linear scaling.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0, 0.0),
    "rope.scale_linear": (1.0, 0.0),
}
# What a model of llama.cpp leaves out of its metadata if it has this value.
DEFAULT_ROPE_THETA = 10_000.0
# Llama 3.1 and 3.2 come with their frequencies already scaled, by one of these.
LLAMA3_SCALINGS = ([8.0, 1.0, 4.0, 8192.0], [32.0, 1.0, 4.0, 8192.0])
ROPE_FACTORS_TENSOR = "rope_freqs.weight"
ROWS_AT_A_TIME = 1024  # of a tensor that is dequantized
MAX_ARRAY_VALUES = 2_000_000  # of all arrays; those of a vocabulary of 260,000 have 800,000
# The settings that a file does not state: they follow from its architecture.
ARCHITECTURES = {
    "gpt2": {"norm": "layernorm", "activation": "gelu", "position": "learned"},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"},
    "qwen2": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"},
    "qwen3": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"},
    "starcoder2": {"norm": "layernorm", "activation": "gelu", "position": "rope"},
}


def read_gguf(
    path: Path, context_length: int | None = None
) -> tuple[ModelConfig, NamedTensors, Tokenizer]:
    """Read the settings, the weights by our names and the tokenizer of a GGUF file.

    Weights in float32, float16 and bfloat16 stay in these; quantized ones become float32. They are
    read when they are asked for, one after the other. The context is the model's, at most 2048, or
    `context_length`. Raises CheckpointError or DataError, which name the file and key, for whatever
    gptmini cannot represent.
    """
    gguf = import_gguf("GGUF files")
    with _explain_damage(path):
        check_no_lfs_pointer(path)
        files.open_regular(path).close()  # refuses pipes and devices
        reader = _open_reader(gguf, path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        reader.fields.clear()  # several objects for each token of the vocabulary
        stored = {tensor.name: tensor for tensor in reader.tensors}
        architecture = _find_architecture(metadata, path)
        config = _read_settings(metadata, stored, path, context_length)
        weights = _convert_weights(config, architecture, stored, path)
        tokenizer = read_tokenizer(metadata, path)
    return config, weights, tokenizer


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {describe_os_error(error)}") from None
    # The package checks little, so that a damaged file may fail anywhere.
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        problem = shorten(describe_lookup_error(error), 120)
        raise CheckpointError(
            f"{path}: damaged, or not a GGUF file ({problem}); download it again"
        ) from None


def _open_reader(gguf: Any, path: Path) -> Any:
    """Parse the header of a file; ValueError where its arrays would fill the memory."""
    array = gguf.GGUFValueType.ARRAY

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """The package's reader, which makes an object of each value, even past the file's end."""

        n_values = 0

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == array:
                self.n_values += int(self._get(orig_offs + 4, np.uint64)[0])
                if self._get(orig_offs, np.uint32)[0] == array:
                    raise ValueError("an array of arrays")
                if self.n_values > MAX_ARRAY_VALUES:
                    raise ValueError(f"arrays of over {MAX_ARRAY_VALUES:,} values")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(path)


# -- settings --------------------------------------------------------------------------------------


def _find_architecture(metadata: dict[str, Any], path: Path) -> str:
    """Return the architecture's name; CheckpointError for one that gptmini does not have."""
    name = str(metadata["general.architecture"])
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{path}: general.architecture: {shorten(name)} is not supported; use one of {known}"
        )
    for key, supported in SUPPORTED_VALUES.items():
        value = metadata.get(f"{name}.{key}", supported[0])
        if value not in supported:
            raise make_unsupported_error(path, f"{name}.{key}", value)
    return name


def _read_settings(
    metadata: dict[str, Any], stored: dict[str, Any], path: Path, context_length: int | None
) -> ModelConfig:
    """Return the settings, with a context of at most 2048 positions by default."""
    name = metadata["general.architecture"]
    n_head = metadata[f"{name}.attention.head_count"]
    defaults = {
        "rope_theta": DEFAULT_ROPE_THETA,
        "head_dim": metadata[f"{name}.embedding_length"] // n_head,
    }
    settings: dict[str, Any] = {
        setting: metadata.get(f"{name}.{key}", defaults.get(setting))
        for setting, key in METADATA_KEYS.items()
    }
    settings |= ARCHITECTURES[name]
    kind = "layer_norm_rms" if settings["norm"] == "rmsnorm" else "layer_norm"
    settings["norm_eps"] = metadata[f"{name}.attention.{kind}_epsilon"]
    settings["vocab_size"] = len(stored["token_embd.weight"].data)
    settings["tie_embeddings"] = "output.weight" not in stored
    settings["bias"] = any(_is_bias(tensor) and not _is_qkv(tensor) for tensor in stored)
    n_kv_head = metadata.get(f"{name}.attention.head_count_kv", n_head)
    if isinstance(n_kv_head, list):  # one for each layer
        if len(set(n_kv_head)) != 1:
            raise make_unsupported_error(path, f"{name}.attention.head_count_kv", n_kv_head)
        n_kv_head = n_kv_head[0]
    settings["attention"] = {
        "variant": {n_head: "mha", 1: "mqa"}.get(n_kv_head, "gqa"),
        "n_kv_head": n_kv_head,
        "qk_norm": "blk.0.attn_q_norm.weight" in stored,
        "qkv_bias": any(_is_bias(tensor) and _is_qkv(tensor) for tensor in stored) or None,
        "window": metadata.get(f"{name}.attention.sliding_window") or None,
    }
    n_rotated = metadata.get(f"{name}.rope.dimension_count", settings["head_dim"])
    if settings["position"] == "rope" and n_rotated != settings["head_dim"]:
        raise make_unsupported_error(path, f"{name}.rope.dimension_count", n_rotated)
    if ROPE_FACTORS_TENSOR in stored:
        factors = _read_tensor(stored[ROPE_FACTORS_TENSOR], path).float()  # (K/2,)
        settings["rope_scaling"] = _find_rope_scaling(factors, settings, path)
    keys = {setting: f"{name}.{key}" for setting, key in METADATA_KEYS.items()}
    return validate_settings(settings, keys, path, context_length)


def _find_rope_scaling(factors: Tensor, settings: dict[str, Any], path: Path) -> list[float]:
    """Return the scaling by which each frequency is divided by its factor, (K/2,)."""
    if factors.shape != (settings["head_dim"] // 2,):
        raise make_unsupported_error(path, ROPE_FACTORS_TENSOR, tuple(factors.shape))
    exponents = torch.arange(len(factors)) / len(factors)  # (K/2,)
    frequencies = settings["rope_theta"] ** -exponents
    for scaling in LLAMA3_SCALINGS:
        expected = frequencies / scale_frequencies(frequencies, scaling)
        if torch.allclose(factors, expected, rtol=1e-4):
            return scaling
    raise make_unsupported_error(path, ROPE_FACTORS_TENSOR, "another scaling than Llama 3.1's")


# -- tensors ---------------------------------------------------------------------------------------


def _is_bias(name: str) -> bool:
    return name.endswith(".bias")


def _is_qkv(name: str) -> bool:
    return name.split(".")[-2] in ("attn_q", "attn_k", "attn_v")


def _convert_weights(
    config: ModelConfig, architecture: str, stored: dict[str, Any], path: Path
) -> NamedTensors:
    """Return the name and the weights of each of our tensors, converted when it is asked for."""
    names = match_tensors(
        config,
        stored,
        lambda name: [gguf_name(name, architecture)],
        _is_bias,  # with us, all layers have one or none has
        lambda name: config.position == "rope" and name == ROPE_FACTORS_TENSOR,
        architecture,
        path,
    )

    def convert(name: str, their_name: str) -> Tensor:
        with _explain_damage(path):
            tensor = _read_tensor(stored[their_name], path)
            module = name.split(".")[-2]
            if architecture == "gpt2" and module in ("q_proj", "k_proj", "v_proj"):
                start = "qkv".index(module[0]) * (len(tensor) // 3)
                return tensor[start : start + len(tensor) // 3]
            return tensor

    weights = convert_tensors(config, names, convert, path)
    if architecture == "llama":
        heads = {"q_proj": config.n_head, "k_proj": config.n_kv_head}
        return (
            (name, separate_halves(tensor, n) if (n := heads.get(name.split(".")[-2])) else tensor)
            for name, tensor in weights
        )
    return weights


def _read_tensor(stored: Any, path: Path) -> Tensor:
    """Return a tensor of the file, dequantized unless it is in a type that torch has."""
    gguf = import_gguf("GGUF files")
    types = gguf.GGMLQuantizationType
    if stored.tensor_type in (types.F32, types.F16):
        return torch.from_numpy(stored.data.copy())
    if stored.tensor_type == types.BF16:
        return torch.from_numpy(stored.data.copy()).view(torch.bfloat16)
    try:
        return _dequantize(stored)
    except NotImplementedError:
        kind = stored.tensor_type.name
        raise make_unsupported_error(path, f"tensor {stored.name}", kind) from None


def _dequantize(stored: Any) -> Tensor:
    """Dequantize a tensor, some rows at a time, as the package holds what it returns twice."""
    quants = import_gguf("GGUF files").quants
    rows = stored.data.reshape(-1, stored.data.shape[-1])
    shape = [int(size) for size in reversed(stored.shape)]
    values = torch.empty(len(rows), shape[-1])
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        some = slice(start, start + ROWS_AT_A_TIME)
        values[some] = torch.from_numpy(quants.dequantize(rows[some], stored.tensor_type))
    return values.view(shape)
