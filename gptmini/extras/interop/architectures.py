"""The architectures of Hugging Face that gptmini supports: settings and tensor names, both ways.

ARCHITECTURES has one entry for each. To add one, add an entry, and to `to_hf_config` and
`_convert_settings` the keys of its config.json that follow no table. A test compares each entry
with transformers (tests/extras/interop).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.config.load import Origins, iter_settings, validate
from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, ConfigError, describe_lookup_error, shorten
from gptmini.model.gpt import create_undrawn
from gptmini.runs.tensors import NamedTensors, Tensors

DEFAULT_CONTEXT_LENGTH = 2048  # of an import: longer ones cost memory that few texts need
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Linear scaling divides every frequency by the factor. Llama 3.1's scaling does so for those
# with at most low_freq_factor periods in the original context, and none has as many as this.
ALL_FREQUENCIES = (1e8, 1e9)

# Keys of config.json that are read, beside those of ARCHITECTURES.
_READ_KEYS = (
    "model_type num_key_value_heads head_dim attention_bias mlp_bias use_bias tie_word_embeddings "
    "sliding_window use_sliding_window max_window_layers layer_types rope_theta rope_scaling "
    "rope_parameters partial_rotary_factor bos_token_id eos_token_id"
)
# Keys that change no logits of a trained model: names, types, training, other tasks, generation.
_IGNORED_KEYS = (
    "architectures transformers_version dtype torch_dtype tokenizer_class model_max_length "
    "pad_token_id unk_token_id sep_token_id decoder_start_token_id is_llama_config use_cache "
    "transformers.js_config attn_implementation pretraining_tp original_max_position_embeddings "
    "attention_dropout attn_pdrop embd_pdrop embedding_dropout hidden_dropout resid_pdrop "
    "residual_dropout layer_norm_epsilon initializer_range gradient_checkpointing "
    "reorder_and_upcast_attn n_ctx mlp_type norm_type chunk_size_feed_forward return_dict "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params "
    "classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj do_sample temperature top_k top_p min_p typical_p "
    "repetition_penalty length_penalty diversity_penalty max_length min_length max_new_tokens "
    "num_beams num_beam_groups num_return_sequences no_repeat_ngram_size early_stopping"
)

_LLAMA_TENSORS = {
    "embed": "model.embed_tokens",
    "blocks": "model.layers",
    "attn": "self_attn",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_PHI3_TENSORS = _LLAMA_TENSORS | {
    "q_proj": "qkv_proj",  # q, k and v are one matrix, and so are gate and up
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_GPT2_TENSORS = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks": "transformer.h",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "q_proj": "c_attn",  # q, k and v are one matrix
    "k_proj": "c_attn",
    "v_proj": "c_attn",
    "o_proj": "c_proj",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}

_LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_GPT2_KEYS = _LLAMA_KEYS | {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "context_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_LLAMA_SETTINGS: dict[str, tuple[Any, ...]] = {
    "position": ("rope",),
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "attention.qk_norm": (False,),
}
_PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of Hugging Face: its names for things, and what it can represent.

    Names are Llama's where an architecture has none of its own.
    """

    hf_class: str
    """The class in transformers."""
    required_settings: dict[str, tuple[Any, ...]] | None
    """Values that a folded configuration must have to be exported; None: only imported."""
    tensor_names: dict[str, str] = field(default_factory=lambda: _LLAMA_TENSORS)
    """Parts of tensor names, ours to theirs. A part that is missing is the same in both."""
    config_keys: dict[str, str] = field(default_factory=lambda: _LLAMA_KEYS)
    """Our settings to keys of config.json."""
    activation_key: str = "hidden_act"
    """The key of config.json that names the activation."""
    activations: dict[str, str] = field(
        default_factory=lambda: {"silu": "swiglu", "swish": "swiglu"}
    )
    """Activations, theirs to ours. The first is the default."""
    supported_values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that keys of config.json must have to be imported; the first is the default."""


ARCHITECTURES = {
    "qwen2": Architecture("Qwen2ForCausalLM", required_settings=None),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        required_settings=_LLAMA_SETTINGS | {"attention.qk_norm": (True,), "bias": (False,)},
    ),
    "llama": Architecture(
        "LlamaForCausalLM", required_settings=_LLAMA_SETTINGS | {"attention.window": (None,)}
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        required_settings=_LLAMA_SETTINGS
        | {"attention.full_every": (None,), "bias": (False,), "attention.qkv_bias": (None, False)},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        required_settings=None,
        tensor_names=_PHI3_TENSORS,
        # The code of their own that these models name is in transformers since.
        supported_values={"auto_map": (None, _PHI3_CODE)},
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        tensor_names=_LLAMA_TENSORS | {"up_proj": "c_fc", "down_proj": "c_proj"},
        config_keys=_LLAMA_KEYS | {"norm_eps": "norm_epsilon"},
        activations={"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "relu2": "relu2"},
        required_settings={
            "position": ("rope",),
            "norm": ("layernorm",),
            "activation": ("gelu", "relu2"),
            "attention.qk_norm": (False,),
            "attention.full_every": (None,),
        },
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        tensor_names=_GPT2_TENSORS,
        config_keys=_GPT2_KEYS,
        activation_key="activation_function",
        activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"},
        required_settings={
            "position": ("learned",),
            "norm": ("layernorm",),
            "activation": ("gelu", "relu2"),
            "attention.qk_norm": (False,),
            "attention.window": (None,),
        },
        supported_values={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
}


# -- choosing an architecture ----------------------------------------------------------------------


def choose_model_type(config: ModelConfig) -> str:
    """Choose the architecture of a folded configuration; ConfigError names what none has."""
    misfits = {
        model_type: list(_find_misfits(model_type, config))
        for model_type, architecture in ARCHITECTURES.items()
        if architecture.required_settings is not None
    }
    nearest = min(misfits, key=lambda model_type: len(misfits[model_type]))
    if misfits[nearest]:
        where = f"in {nearest}, the nearest architecture; set it so and train again"
        raise ConfigError(*(f"{line} {where}" for line in misfits[nearest]))
    return nearest


def _find_misfits(model_type: str, config: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each setting that this architecture cannot represent."""
    required_settings = ARCHITECTURES[model_type].required_settings or {}
    values = dict(iter_settings(config.model_dump()))
    for key, allowed in required_settings.items():
        if values[key] not in allowed:
            alternatives = " or ".join(str(value) for value in allowed)
            yield f"model.{key}: {values[key]}, but must be {alternatives}"
    has_head_dim = model_type not in ("starcoder2", "gpt2")
    if not has_head_dim and config.head_dim * config.n_head != config.d_model:
        yield f"model.head_dim: {config.head_dim}, but must be d_model / n_head"


# -- tensors ---------------------------------------------------------------------------------------


def hf_name(model_type: str, name: str) -> str:
    """Return Hugging Face's name for one of our tensors."""
    tensor_names = ARCHITECTURES[model_type].tensor_names
    return ".".join(tensor_names.get(part, part) for part in name.split("."))


def from_hf(model_type: str, config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Return our tensor `name`, given theirs that holds it.

    GPT-2 stores the matrices of its blocks transposed, and q, k and v as one; Phi-3 these, and
    gate and up. A matrix of another size gives a tensor of another shape.
    """
    if model_type not in ("gpt2", "phi3") or not name.startswith("blocks."):
        return tensor
    if model_type == "gpt2" and tensor.ndim == 2:
        tensor = tensor.mT
    q_end = config.n_head * config.head_dim
    k_end = q_end + config.n_kv_head * config.head_dim
    rows = {"q_proj": slice(q_end), "k_proj": slice(q_end, k_end), "v_proj": slice(k_end, None)}
    if model_type == "phi3":
        rows |= {"gate_proj": slice(config.d_ff), "up_proj": slice(config.d_ff, None)}
    module = name.split(".")[-2]
    return tensor[rows[module]] if module in rows else tensor


def to_hf(model_type: str, config: ModelConfig, weights: Tensors) -> Tensors:
    """Return their tensors, given ours; the reverse of `from_hf`."""
    parts: dict[str, list[Tensor]] = {}  # of GPT-2, q, k and v have one name
    for name, tensor in weights.items():
        parts.setdefault(hf_name(model_type, name), []).append(tensor)
    if config.attention.qkv_bias and not config.bias:  # with those, theirs always has this one
        for layer in range(config.n_layer):
            name = hf_name(model_type, f"blocks.{layer}.attn.o_proj.bias")
            parts[name] = [torch.zeros(config.d_model)]
    hf_weights = {}
    for name, tensors in parts.items():
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]  # copy no large one
        if model_type == "gpt2" and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.mT
        hf_weights[name] = tensor.contiguous()
    return hf_weights


def match_tensors(
    config: ModelConfig,
    stored: Collection[str],
    list_names: Callable[[str], list[str]],
    may_lack: Callable[[str], bool],
    is_ignored: Callable[[str], bool],
    model_type: str,
    where: Path,
) -> dict[str, str | None]:
    """Find the name of each of our tensors in a file: of those that `list_names` gives, the first.

    None stands for one that it may lack: a bias, which is 0. CheckpointError for any other that is
    missing, and for one that we do not have.
    """

    def find_name(name: str) -> str | None:
        candidates = list_names(name)
        found = next((each for each in candidates if each in stored), None)
        if found is None and not may_lack(name):
            raise CheckpointError(f"{where}: tensor {candidates[0]}: missing; download it again")
        return found

    find_name(f"blocks.{config.n_layer - 1}.attn_norm.weight")  # first, as 1000 layers take seconds
    names = {name: find_name(name) for name in create_undrawn(config).state_dict()}
    for name in set(stored) - set(names.values()):
        if not is_ignored(name):
            raise CheckpointError(
                f"{where}: tensor {shorten(name)}: unknown in a {model_type}; choose another model"
            )
    return names


def convert_tensors(
    config: ModelConfig,
    names: dict[str, str | None],
    convert: Callable[[str, str], Tensor],
    where: Path,
) -> NamedTensors:
    """Yield each of our tensors, made by `convert` of our name and theirs when it is asked for."""
    for name, empty in create_undrawn(config).state_dict().items():
        their_name = names[name]
        if their_name is None:
            yield name, torch.zeros(empty.shape)
            continue
        tensor = convert(name, their_name)
        if name == "positions.weight":
            tensor = tensor[: len(empty)]  # the context may be shorter than theirs
        yield name, check_tensor(tensor, empty, f"{where}: tensor {their_name}")


def check_tensor(tensor: Tensor, expected: Tensor, where: str) -> Tensor:
    """Return a tensor in the type it has.

    CheckpointError unless it has the shape of `expected` and its values are finite.
    """
    if tensor.dtype not in FLOAT_DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{where}: {dtype}; use float32, float16 or bfloat16")
    if tensor.shape != expected.shape:
        sizes = f"{tuple(tensor.shape)}, but its settings make it {tuple(expected.shape)}"
        raise CheckpointError(f"{where}: {sizes}; restore the original files")
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise CheckpointError(f"{where}: has values that are not finite; download it again")
    return tensor.contiguous()


# -- our settings to config.json -------------------------------------------------------------------


def to_hf_config(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the content of config.json for a folded configuration."""
    architecture = ARCHITECTURES[model_type]
    settings = config.model_dump()
    hf_config: dict[str, Any] = {
        key: settings[name] for name, key in architecture.config_keys.items()
    }
    hf_config["architectures"] = [architecture.hf_class]
    hf_config["model_type"] = model_type
    hf_config["dtype"] = "float32"
    hf_config["torch_dtype"] = "float32"  # the older name for it
    # Several of theirs may be one of ours; the first is the architecture's usual one.
    hf_activation = next(
        theirs for theirs, ours in architecture.activations.items() if ours == config.activation
    )
    if model_type == "gpt2":
        hf_config["activation_function"] = hf_activation
        return hf_config

    hf_config["num_key_value_heads"] = config.n_kv_head
    # transformers 5 reads rope_parameters, 4 the other two.
    rope = _to_hf_rope(config)
    hf_config["rope_theta"] = config.rope_theta
    hf_config["rope_parameters"] = rope
    hf_config["rope_scaling"] = rope if config.rope_scaling is not None else None
    hf_config["hidden_act"] = hf_activation
    window = config.attention.window
    if model_type == "starcoder2":
        hf_config["use_bias"] = True
        hf_config["sliding_window"] = window
        return hf_config

    hf_config["head_dim"] = config.head_dim
    hf_config["mlp_bias"] = config.bias
    hf_config["attention_bias"] = bool(config.bias or config.attention.qkv_bias)
    if model_type == "mistral":
        hf_config["sliding_window"] = window
    if model_type == "qwen3":
        windows = [config.get_window(layer) for layer in range(config.n_layer)]
        hf_config["use_sliding_window"] = window is not None
        hf_config["sliding_window"] = window
        hf_config["max_window_layers"] = 0 if window else config.n_layer
        hf_config["layer_types"] = [
            "full_attention" if each is None else "sliding_attention" for each in windows
        ]
    return hf_config


def _to_hf_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the parameters of the rotary positions."""
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    factor, low_freq_factor, high_freq_factor, original_length = config.rope_scaling
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": int(original_length),
    }


# -- config.json to our settings -------------------------------------------------------------------


def from_hf_config(
    hf_config: dict[str, Any], where: Path, context_length: int | None
) -> ModelConfig:
    """Return the settings in config.json, with a context of at most 2048 positions by default.

    Raises CheckpointError that names the key of whatever gptmini does not support.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{where}: model_type: {shorten(model_type)} is not supported; use one of {known}"
        )
    architecture = ARCHITECTURES[model_type]
    _check_supported(hf_config, architecture, where)
    try:
        settings = _convert_settings(hf_config, model_type, where)
        return validate_settings(settings, architecture.config_keys, where, context_length)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        problem = describe_lookup_error(error)
        raise CheckpointError(f"{where}: {problem}; restore the original file") from None


def validate_settings(
    settings: dict[str, Any], keys: dict[str, str], where: Path, context_length: int | None
) -> ModelConfig:
    """Validate the section `model` of a foreign file, with a context of at most 2048 by default.

    `keys` are the file's names of our settings, for CheckpointError. Raises ConfigError for a
    `context_length` that the model does not have.
    """
    max_length = settings["context_length"]
    settings = settings | {
        "context_length": min(context_length or DEFAULT_CONTEXT_LENGTH, max_length)
    }
    origins: Origins = {("model",): str(where)}
    for name, key in keys.items():
        origins["model", name] = f"{where}: {key}"
    try:
        config = validate({"model": settings}, origins).model
    except ConfigError as error:
        problem = error.lines[0].removeprefix(str(where))
        problem = problem.partition("; ")[0]  # without the remedy, which is for our own settings
        raise CheckpointError(f"{where}{problem}; choose another model") from None
    if context_length is not None and context_length > max_length:
        raise ConfigError(
            f"--context-length {context_length}: {keys['context_length']} is {max_length}; use at "
            f"most that"
        )
    return config


def _check_supported(hf_config: dict[str, Any], architecture: Architecture, where: Path) -> None:
    """Raise CheckpointError for a key whose value changes the model in a way we cannot follow."""
    supported: dict[str, tuple[Any, ...]] = {
        "quantization_config": (None,),
        "auto_map": (None,),  # code of its own
        architecture.activation_key: tuple(architecture.activations),
    }
    if hf_config["model_type"] not in ("qwen2", "qwen3"):
        supported["layer_types"] = (None,)  # transformers makes another model of it
    supported |= architecture.supported_values
    for key, allowed in supported.items():
        default = allowed[0]
        if hf_config.get(key, default) not in allowed:
            raise make_unsupported_error(where, key, repr(hf_config[key]))
    known = {
        *supported,
        *architecture.config_keys.values(),
        *f"{_READ_KEYS} {_IGNORED_KEYS}".split(),
    }
    for key, value in hf_config.items():
        if value and key not in known and not key.startswith(("_", "unsloth_")):
            raise CheckpointError(
                f"{where}: {shorten(key)}: {shorten(value)} may change the model in a way that "
                f"gptmini does not know; choose another, or delete the key if it does not"
            )


def make_unsupported_error(where: Path, key: str, value: object) -> CheckpointError:
    shown = shorten(value, 120)
    return CheckpointError(f"{where}: {key}: {shown} is not supported; choose another model")


def _convert_settings(hf_config: dict[str, Any], model_type: str, where: Path) -> dict[str, Any]:
    """Return the section `model` as plain data, which is not validated yet."""
    architecture = ARCHITECTURES[model_type]
    # transformers leaves out of config.json what has these values.
    defaults: dict[str, Any] = {
        "layer_norm_epsilon": 1e-5,
        "norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5 if model_type == "phi3" else 1e-6,
        "tie_word_embeddings": model_type in ("gpt2", "starcoder2"),
    }
    given = {key: value for key, value in hf_config.items() if value is not None}
    complete = defaults | given
    if model_type == "gpt2" and "n_embd" in given:
        complete.setdefault("n_inner", 4 * given["n_embd"])
    settings: dict[str, Any] = {}
    for name, key in architecture.config_keys.items():
        if key not in complete:
            raise CheckpointError(f"{where}: {key}: missing; restore the original file")
        settings[name] = complete[key]
    default_activation = next(iter(architecture.activations))
    hf_activation = hf_config.get(architecture.activation_key, default_activation)
    settings["activation"] = architecture.activations[hf_activation]
    if model_type == "gpt2":
        settings["position"] = "learned"
        settings["bias"] = True
        settings["attention"] = {"qk_norm": False}
        return settings

    n_head = settings["n_head"]
    default_head_dim = 128 if model_type == "qwen3" else None
    head_dim = hf_config.get("head_dim", default_head_dim)
    settings["head_dim"] = head_dim or settings["d_model"] // max(1, n_head)
    n_kv_head = hf_config.get("num_key_value_heads") or n_head
    attention: dict[str, Any] = {
        "variant": {n_head: "mha", 1: "mqa"}.get(n_kv_head, "gqa"),
        "n_kv_head": n_kv_head,
        "qk_norm": model_type == "qwen3",
    }
    attention |= _convert_window(hf_config, model_type, where)
    settings["attention"] = attention
    settings |= _convert_rope(hf_config, where)
    if model_type == "starcoder2":
        settings["bias"] = True
        return settings

    bias = model_type == "llama" and bool(hf_config.get("mlp_bias", False))
    settings["bias"] = bias
    settings["norm"] = "rmsnorm"
    has_qkv_bias = model_type == "qwen2" or hf_config.get("attention_bias") or bias
    attention["qkv_bias"] = has_qkv_bias or None
    return settings


def _convert_rope(hf_config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Return the settings of the rotary positions, from the keys of transformers 4 or 5."""
    rope = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or rope
    bases = (rope.get("rope_theta"), hf_config.get("rope_theta"))
    rope_theta = next((base for base in bases if base is not None), 10_000.0)
    settings: dict[str, Any] = {"rope_theta": float(rope_theta)}
    shares = (scaling.get("partial_rotary_factor"), hf_config.get("partial_rotary_factor"))
    for share in shares:
        if share not in (None, 1):
            raise make_unsupported_error(where, "partial_rotary_factor", share)

    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type == "llama3":
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        settings["rope_scaling"] = [
            _read_rope_number(scaling, key, where) for key in ("factor", *keys)
        ]
    elif rope_type == "linear":
        factor = _read_rope_number(scaling, "factor", where)
        context = float(hf_config["max_position_embeddings"])
        settings["rope_scaling"] = [factor, *ALL_FREQUENCIES, context]
    # "dynamic" changes nothing in texts of at most max_position_embeddings, and no run has more.
    elif rope_type not in ("default", "dynamic"):
        raise make_unsupported_error(where, "rope_scaling", repr(rope_type))
    return settings


def _read_rope_number(scaling: dict[str, Any], key: str, where: Path) -> float:
    if scaling.get(key) is None:
        raise CheckpointError(f"{where}: rope_scaling.{key}: missing; restore the original file")
    return float(scaling[key])


def _convert_window(hf_config: dict[str, Any], model_type: str, where: Path) -> dict[str, Any]:
    """Return their windows as ours: in every layer, or in all but every n-th."""
    default_window = None if model_type in ("starcoder2", "phi3") else 4096
    window = hf_config.get("sliding_window", default_window)
    if model_type == "llama" or window is None:
        return {}
    if model_type not in ("qwen2", "qwen3"):
        return {"window": window}

    if not hf_config.get("use_sliding_window"):
        return {}
    full_every = _find_full_every(hf_config, where)
    return {} if full_every == 1 else {"window": window, "full_every": full_every or None}


def _find_full_every(hf_config: dict[str, Any], where: Path) -> int:
    """Find n where every n-th layer has no window: 1 if none has one, 0 if all have."""
    n_layer = hf_config["num_hidden_layers"]  # not validated yet: perhaps too many to list
    layer_types = hf_config.get("layer_types")
    if not layer_types:
        first_window_layer = hf_config.get("max_window_layers")
        if first_window_layer is None:
            first_window_layer = 28
        if 0 < first_window_layer < n_layer:
            raise make_unsupported_error(where, "max_window_layers", first_window_layer)
        return int(first_window_layer > 0)
    known = all(each in ("full_attention", "sliding_attention") for each in layer_types)
    is_full = [layer_type == "full_attention" for layer_type in layer_types]
    full_every = is_full.index(True) + 1 if any(is_full) else 0
    expected = [full_every > 0 and (n + 1) % full_every == 0 for n in range(len(is_full))]
    if not known or len(is_full) != n_layer or is_full != expected:
        raise make_unsupported_error(where, "layer_types", layer_types)
    return full_every
