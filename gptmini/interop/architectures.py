"""The architectures of Hugging Face that gptmini has: settings and tensor names, both ways."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.config.load import Origins, iter_settings, validate
from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, ConfigError
from gptmini.model.gpt import GPT

Tensors = dict[str, Tensor]

# The parts of tensor names, ours: theirs. A part that is missing has the same name in both.
_LLAMA = {
    **{"embed": "model.embed_tokens", "blocks": "model.layers", "attn": "self_attn"},
    **{"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    **{"final_norm": "model.norm", "head": "lm_head"},
}
_GPT2 = {
    **{"embed": "transformer.wte", "positions": "transformer.wpe", "blocks": "transformer.h"},
    **{"attn_norm": "ln_1", "mlp_norm": "ln_2", "up_proj": "c_fc"},
    **{"o_proj": "c_proj", "down_proj": "c_proj"},
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "c_attn"),  # one matrix
    **{"final_norm": "transformer.ln_f", "head": "lm_head"},
}
HF_NAMES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "starcoder2": _LLAMA | {"up_proj": "c_fc", "down_proj": "c_proj"},
    "gpt2": _GPT2,
}
HF_CLASSES = {
    **{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"},
    **{"starcoder2": "Starcoder2ForCausalLM", "gpt2": "GPT2LMHeadModel"},
}

# Settings, ours: theirs.
_COMMON_HF_KEYS = {
    **{"vocab_size": "vocab_size", "tie_embeddings": "tie_word_embeddings"},
    **{"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "d_model": "hidden_size"},
    **{"d_ff": "intermediate_size", "context_length": "max_position_embeddings"},
    "norm_eps": "rms_norm_eps",
}
HF_KEYS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _COMMON_HF_KEYS),
    "starcoder2": _COMMON_HF_KEYS | {"norm_eps": "norm_epsilon"},
    "gpt2": _COMMON_HF_KEYS
    | {"n_layer": "n_layer", "n_head": "n_head", "d_model": "n_embd", "d_ff": "n_inner"}
    | {"context_length": "n_positions", "norm_eps": "layer_norm_epsilon"},
}
_GATED_ACTIVATIONS, _PLAIN_ACTIVATIONS = ("silu",), ("gelu_pytorch_tanh", "gelu_new", "relu2")
_ACTIVATIONS = dict(
    zip(_GATED_ACTIVATIONS + _PLAIN_ACTIVATIONS, ("swiglu", "gelu", "gelu", "relu2"), strict=True)
)
# What their settings must be, as we have nothing else; the first is their default.
_SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    **{kind: {"hidden_act": _GATED_ACTIVATIONS} for kind in ("llama", "mistral", "qwen2", "qwen3")},
    "starcoder2": {"hidden_act": _PLAIN_ACTIVATIONS},
    "gpt2": {
        "activation_function": ("gelu_new", *_PLAIN_ACTIVATIONS),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}
_SUPPORTED_VALUES_OF_ALL = dict.fromkeys(("quantization_config", "auto_map"), (None,))
_ROPE_SCALING_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)

# What settings must be for an architecture to have them, after `folding.fold`.
_BASE = {"position": ("rope",), "norm": ("rmsnorm",), "activation": ("swiglu",)}
_OTHER = {"norm": ("layernorm",), "activation": ("gelu", "relu2"), "attention.qk_norm": (False,)}
_NO_WINDOW = {"attention.window": (None,)}
REQUIRED_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3": _BASE | {"attention.qk_norm": (True,), "bias": (False,)},
    "llama": _BASE | {"attention.qk_norm": (False,)} | _NO_WINDOW,
    "mistral": _BASE
    | {"attention.qk_norm": (False,), "attention.full_every": (None,)}
    | {"bias": (False,), "attention.qkv_bias": (None, False)},
    "starcoder2": {"position": ("rope",)} | _OTHER | {"attention.full_every": (None,)},
    "gpt2": {"position": ("learned",)} | _OTHER | _NO_WINDOW,
}


def choose_architecture(config: ModelConfig) -> str:
    """The architecture of a folded configuration; ConfigError names the settings in the way."""
    misfits = {kind: list(_find_misfits(kind, config)) for kind in REQUIRED_SETTINGS}
    kind = min(misfits, key=lambda kind: len(misfits[kind]))
    if misfits[kind]:
        where = f"in {kind}, the nearest architecture; set it so and train again"
        raise ConfigError(*(f"{line} {where}" for line in misfits[kind]))
    return kind


def _find_misfits(kind: str, config: ModelConfig) -> Iterator[str]:
    values = dict(iter_settings(config.model_dump()))
    for key, allowed in REQUIRED_SETTINGS[kind].items():
        if values[key] not in allowed:
            shown = " or ".join(str(value) for value in allowed)
            yield f"model.{key}: {values[key]}, but must be {shown}"
    if kind in ("starcoder2", "gpt2") and config.head_dim * config.n_head != config.d_model:
        yield f"model.head_dim: {config.head_dim}, but must be d_model / n_head"


def hf_name(kind: str, name: str) -> str:
    """The name of a tensor there."""
    return ".".join(HF_NAMES[kind].get(part, part) for part in name.split("."))


def from_hf(kind: str, name: str, tensor: Tensor) -> Tensor:
    """Our tensor, from theirs that has it. GPT-2 has q, k and v in one, and transposes matrices."""
    if kind != "gpt2" or not name.startswith("blocks."):
        return tensor
    tensor = tensor.mT if tensor.ndim == 2 else tensor
    part = name.split(".")[-2]
    merged = part in ("q_proj", "k_proj", "v_proj")
    return tensor.chunk(3)["qkv".index(part[0])] if merged else tensor


def to_hf(kind: str, config: ModelConfig, weights: Tensors) -> Tensors:
    """Their tensors, from ours; the reverse of `taken`."""
    merged: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        merged.setdefault(hf_name(kind, name), []).append(tensor)
    if config.attention.qkv_bias and not config.bias:  # theirs always has one more
        for layer in range(config.n_layer):
            name = hf_name(kind, f"blocks.{layer}.attn.o_proj.bias")
            merged[name] = [torch.zeros(config.d_model)]
    hf_weights = {}
    for name, tensors in merged.items():
        tensor = torch.cat(tensors)
        transposed = kind == "gpt2" and tensor.ndim == 2 and ".h." in name
        hf_weights[name] = (tensor.mT if transposed else tensor).contiguous()
    return hf_weights


def create_meta_tensors(config: ModelConfig) -> Tensors:
    """The tensors of a model by name, without memory."""
    with torch.device("meta"):
        return GPT(config).state_dict()


def to_hf_config(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The content of config.json for a folded configuration."""
    values = config.model_dump()
    hf_config: dict[str, Any] = {key: values[name] for name, key in HF_KEYS[kind].items()}
    hf_config |= {"architectures": [HF_CLASSES[kind]], "model_type": kind}
    hf_config |= {"dtype": "float32", "torch_dtype": "float32"}  # the older name and the newer
    if kind == "gpt2":
        activation = {"relu2": "relu2", "gelu": "gelu_new"}[config.activation]
        return hf_config | {"activation_function": activation}
    hf_config["num_key_value_heads"] = config.n_kv_head
    # transformers 5 reads rope_parameters, 4 the other two.
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            **dict(zip(_ROPE_SCALING_KEYS, config.rope_scaling, strict=True)),
        }
        rope[_ROPE_SCALING_KEYS[-1]] = int(rope[_ROPE_SCALING_KEYS[-1]])
    hf_config |= {"rope_theta": config.rope_theta, "rope_parameters": rope}
    hf_config["rope_scaling"] = rope if config.rope_scaling is not None else None
    window = config.attention.window
    if kind == "starcoder2":
        activation = {"relu2": "relu2", "gelu": "gelu_pytorch_tanh"}[config.activation]
        return hf_config | {"hidden_act": activation, "use_bias": True, "sliding_window": window}
    hf_config |= {"hidden_act": "silu", "head_dim": config.head_dim, "mlp_bias": config.bias}
    hf_config["attention_bias"] = bool(config.bias or config.attention.qkv_bias)
    if kind == "mistral":
        hf_config["sliding_window"] = window
    if kind == "qwen3":
        windows = [config.get_window(layer) for layer in range(config.n_layer)]
        names = ["full_attention" if each is None else "sliding_attention" for each in windows]
        hf_config |= {"use_sliding_window": window is not None, "sliding_window": window}
        hf_config |= {"max_window_layers": 0 if window else config.n_layer, "layer_types": names}
    return hf_config


def from_hf_config(
    hf_config: dict[str, Any], where: Path, context_length: int | None
) -> ModelConfig:
    """The settings in config.json, with a context of at most 2048 positions if none is given.

    CheckpointError names the key of whatever gptmini does not have.
    """
    kind = str(hf_config.get("model_type"))
    if kind not in HF_KEYS:
        known = ", ".join(sorted(HF_KEYS))
        raise CheckpointError(f"{where}: model_type: {kind} is not supported; use one of {known}")
    for key, allowed in (_SUPPORTED_VALUES_OF_ALL | _SUPPORTED_VALUES[kind]).items():
        if hf_config.get(key, allowed[0]) not in allowed:
            raise _make_unsupported_error(where, key, hf_config[key])
    try:
        tree = _convert_settings(hf_config, kind, where)
        limit = tree["context_length"]
        tree["context_length"] = min(context_length or 2048, limit)
        origins: Origins = {("model",): str(where)}
        origins |= {("model", name): f"{where}: {key}" for name, key in HF_KEYS[kind].items()}
        config = validate({"model": tree}, origins).model
    except ConfigError as error:
        problem = str(error.lines[0]).partition(";")[0]
        raise CheckpointError(f"{problem}; choose another model") from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{where}: {problem}; restore the original file") from None
    if context_length is not None and context_length > limit:
        key = HF_KEYS[kind]["context_length"]
        raise ConfigError(f"--context-length {context_length}: {key} is {limit}; use at most that")
    return config


def _make_unsupported_error(where: Path, key: str, value: object) -> CheckpointError:
    return CheckpointError(f"{where}: {key}: {value!r} is not supported; choose another model")


def _convert_settings(hf_config: dict[str, Any], kind: str, where: Path) -> dict[str, Any]:
    """The section `model` in plain data."""
    tied = kind in ("gpt2", "starcoder2")
    full: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "rms_norm_eps": 1e-6}
    full |= {"tie_word_embeddings": tied, **hf_config}  # what is left out has these defaults
    if kind == "gpt2":
        full["n_inner"] = hf_config.get("n_inner") or 4 * hf_config["n_embd"]
    tree: dict[str, Any] = {name: full[key] for name, key in HF_KEYS[kind].items()}
    key, allowed = next(iter(_SUPPORTED_VALUES[kind].items()))
    tree["activation"] = _ACTIVATIONS[hf_config.get(key, allowed[0])]
    if kind == "gpt2":
        return tree | {"position": "learned", "bias": True, "attention": {"qk_norm": False}}
    heads, kv_heads = tree["n_head"], hf_config.get("num_key_value_heads") or tree["n_head"]
    default = 128 if kind == "qwen3" else None
    tree["head_dim"] = hf_config.get("head_dim", default) or tree["d_model"] // heads
    variant = {heads: "mha", 1: "mqa"}.get(kv_heads, "gqa")
    attention = {"variant": variant, "n_kv_head": kv_heads, "qk_norm": kind == "qwen3"}
    attention |= _convert_window(hf_config, kind, where)
    rope = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or rope
    tree["rope_theta"] = float(rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0)))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "llama3":
        tree["rope_scaling"] = [float(scaling[key]) for key in _ROPE_SCALING_KEYS]
    elif rope_type != "default":
        raise _make_unsupported_error(where, "rope_scaling", scaling)
    if scaling.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1)) != 1:
        raise _make_unsupported_error(where, "partial_rotary_factor", "not 1")
    if kind == "starcoder2":
        return tree | {"bias": True, "attention": attention}
    tree["bias"] = bool(hf_config.get("mlp_bias", False)) and kind == "llama"
    attention["qkv_bias"] = (
        kind == "qwen2" or hf_config.get("attention_bias") or tree["bias"] or None
    )
    return tree | {"norm": "rmsnorm", "attention": attention}


def _convert_window(hf_config: dict[str, Any], kind: str, where: Path) -> dict[str, Any]:
    """Their windows as ours: in every layer, or in all but every n-th."""
    window = hf_config.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind == "llama" or window is None:
        return {}
    if kind in ("qwen2", "qwen3"):
        layers = range(hf_config["num_hidden_layers"])
        if not hf_config.get("use_sliding_window"):
            return {}
        first = hf_config.get("max_window_layers", 28)
        names = ["full_attention" if n < first else "sliding_attention" for n in layers]
        full = [name == "full_attention" for name in hf_config.get("layer_types") or names]
        if all(full):
            return {}
        for every in layers:
            if full == [(n + 1) % (every + 1) == 0 for n in layers]:
                return {"window": window, "full_every": every + 1}
        if any(full):
            raise _make_unsupported_error(
                where, "layer_types", hf_config.get("layer_types") or names
            )
    return {"window": window}
