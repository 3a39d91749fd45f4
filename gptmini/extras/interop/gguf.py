"""Writes GGUF, the file format of llama.cpp, Ollama and LM Studio.

llama.cpp itself reads these files in the tests. Users rarely have it at hand, so `export` compares
what `gguf_reader` finds in the file with the run, on their machine and with their weights.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini import files
from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError, make_missing_package_error
from gptmini.extras.interop import gguf_tokenizer
from gptmini.generate.run import Run
from gptmini.runs.tensors import Tensors
from gptmini.tokenizer.tokenizers import Tokenizer

WEIGHT_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
Q8_0_BLOCK_SIZE = 32  # weights that share a scale; rows must be a multiple of it
# Parts of tensor names, ours to theirs; an empty part is left out.
GGUF_NAMES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "blocks": "blk",
    "attn": "",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp": "",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}
# Our settings to keys of the metadata, which begin with the name of the architecture. Other
# settings follow from the architecture and from which tensors there are.
METADATA_KEYS = {
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "d_model": "embedding_length",
    "d_ff": "feed_forward_length",
    "context_length": "context_length",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}


def import_gguf(wanted_by: str = "--to gguf") -> Any:
    """Import the package gguf, by llama.cpp's authors; MachineError if it is not installed."""
    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError:
        raise make_missing_package_error(wanted_by, "gguf", "gguf") from None
    return gguf


def check_supported(config: ModelConfig, tokenizer: Tokenizer, weights: str) -> None:
    """Raise ConfigError for what llama.cpp does not have, MachineError without the package."""
    import_gguf()
    if weights not in WEIGHT_TYPES:
        raise ConfigError(f"--weights {weights}: unknown type; use {', '.join(WEIGHT_TYPES)}")
    problem = ""
    if config.attention.window is not None:
        problem = f"model.attention.window: {config.attention.window}, but must be none"
    elif config.activation == "relu2":
        problem = "model.activation: relu2, but must be gelu"
    elif config.rope_scaling is not None:
        problem = "model.rope_scaling: set, but must be none"
    if problem:
        raise ConfigError(f"{problem} in llama.cpp; use --to hf, or change this and train again")
    gguf_tokenizer.check_supported(tokenizer)


# -- tensors ---------------------------------------------------------------------------------------


def gguf_name(name: str, architecture: str) -> str:
    """Return the name of one of our tensors in GGUF."""
    parts = [GGUF_NAMES.get(part, part) for part in name.split(".")]
    if architecture == "gpt2":  # one matrix for q, k and v
        fused = ("attn_q", "attn_k", "attn_v")
        parts = ["attn_qkv" if part in fused else part for part in parts]
    return ".".join(part for part in parts if part)


def choose_type(name: str, tensor: Tensor, weights: str) -> Any:
    """Choose the type a tensor is stored in; vectors and positions stay in float32."""
    types = import_gguf().GGMLQuantizationType
    if tensor.ndim == 1 or name.startswith("position"):
        return types.F32
    if weights == "q8_0" and tensor.shape[1] % Q8_0_BLOCK_SIZE:
        return types.F16
    return types[WEIGHT_TYPES[weights]]


def round_to_type(weights: Tensors, to: str) -> Tensors:
    """Return the weights as they are after rounding to a type."""
    quants = import_gguf().quants
    rounded = {}
    for name, tensor in weights.items():
        stored_type = choose_type(name, tensor, to)
        stored = quants.quantize(tensor.numpy(), stored_type)
        rounded[name] = torch.from_numpy(quants.dequantize(stored, stored_type))
    return rounded


# llama.cpp's llama rotates neighbors (2i, 2i + 1) of a head; gptmini and transformers rotate
# dimensions (i, i + K/2), so the rows of q and k change places.


def interleave_halves(tensor: Tensor, n_head: int) -> Tensor:
    """Reorder the rows of q or k for llama.cpp's llama."""
    halves = tensor.unflatten(0, (n_head, 2, -1))  # (H, 2, K/2, ...)
    return halves.transpose(1, 2).flatten(0, 2).contiguous()  # (H K, ...)


def separate_halves(tensor: Tensor, n_head: int) -> Tensor:
    """Undo `interleave_halves`."""
    pairs = tensor.unflatten(0, (n_head, -1, 2))  # (H, K/2, 2, ...)
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()  # (H K, ...)


# -- writing ---------------------------------------------------------------------------------------


def write_gguf(
    path: Path, run: Run, architecture: str, config: ModelConfig, weights: Tensors, to: str
) -> None:
    """Write a folded model with its tokenizer; `to` is the type of its matrices."""
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, architecture, config)
    writer.add_name(run.path.name.encode(errors="replace").decode())  # it may be any bytes
    file_type = "ALL_F32" if to == "f32" else f"MOSTLY_{to.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    gguf_tokenizer.write_tokenizer(writer, run.tokenizer)
    parts: dict[str, list[Tensor]] = {}  # of GPT-2, q, k and v have one name
    for name, tensor in weights.items():
        module = name.split(".")[-2]
        rows = tensor
        if architecture == "llama" and module == "q_proj":
            rows = interleave_halves(tensor, config.n_head)
        if architecture == "llama" and module == "k_proj":
            rows = interleave_halves(tensor, config.n_kv_head)
        parts.setdefault(gguf_name(name, architecture), []).append(rows)
    for name, tensors in parts.items():
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        stored_type = choose_type(name, tensor, to)
        stored = gguf.quants.quantize(tensor.numpy(), stored_type)
        writer.add_tensor(name, stored, raw_dtype=stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files.sync_and_hash(path)  # before it gets its name


def _add_settings(writer: Any, architecture: str, config: ModelConfig) -> None:
    """Add the settings of the model to the metadata."""
    settings = config.model_dump()
    for name, key in METADATA_KEYS.items():
        add = writer.add_float32 if name == "rope_theta" else writer.add_uint32
        add(f"{architecture}.{key}", settings[name])
    norm = "layer_norm_rms" if config.norm == "rmsnorm" else "layer_norm"
    writer.add_float32(f"{architecture}.attention.{norm}_epsilon", config.norm_eps)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
