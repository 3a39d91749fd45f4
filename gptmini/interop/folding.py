"""Rewrites weights so that they compute the same in an architecture that others have."""

import torch
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.interop.architectures import Tensors, create_meta_tensors

# silu(S u) u / S is within 0.28 / S² of relu(u)². As a power of four it rounds no weight, and the
# products stay in float16's range.
GATE_SHARPNESS = 4.0**5


def fold(config: ModelConfig, weights: Tensors) -> tuple[ModelConfig, Tensors]:
    """The same function as settings and weights that `architectures.choose` can place.

    With rotary positions, a gated MLP and RMSNorm (Llama, Qwen3) wherever it can be had exactly;
    else LayerNorm with biases, which are 0 where there were none (StarCoder2, GPT-2).
    """
    tree, attention = config.model_dump(), config.attention.model_dump()
    weights = {name: tensor.cpu() for name, tensor in weights.items()}
    if (attention["window"] or 0) >= config.context_length:
        attention |= {"window": None, "full_every": None}
    gated = config.activation != "gelu" and (config.norm == "rmsnorm" or not config.bias)
    if config.position == "rope" and gated:
        if config.norm == "layernorm":
            _center_weights(weights)
            tree |= {"norm": "rmsnorm", "tie_embeddings": False}
        if config.activation == "relu2":
            _add_gates(weights)
            tree["activation"] = "swiglu"
    elif config.norm == "layernorm":
        tree["bias"] = True
    if config.position != "rope" and not config.attention.qk_norm:
        group = config.n_head // config.n_kv_head
        for name in weights:  # GPT-2 has as many KV heads as query heads
            if group > 1 and name.split(".")[-2] in ("k_proj", "v_proj"):
                heads = weights[name].unflatten(0, (config.n_kv_head, -1))  # (G, K, ...)
                weights[name] = heads.repeat_interleave(group, 0).flatten(0, 1)
        tree["position"] = "learned"
        attention |= {"variant": "mha", "n_kv_head": None}
    if tree["bias"]:
        attention["qkv_bias"] = None
    folded = ModelConfig.model_validate(tree | {"attention": attention})
    zeros = {name: torch.zeros(like.shape) for name, like in create_meta_tensors(folded).items()}
    return folded, {name: weights.get(name, zero).float() for name, zero in zeros.items()}


def _center_weights(weights: Tensors) -> None:
    """Let LayerNorm without bias become RMSNorm, which it is where the mean is 0 (Jiang 2023).

    No block reads the mean of the residual stream, so what is added to the stream may lose its
    own. The head reads the embeddings as they were.
    """
    weights.setdefault("head.weight", weights["embed.weight"])
    weights["embed.weight"] = _subtract_mean(weights["embed.weight"], 1)
    for name in weights:
        if name.split(".")[-2] in ("o_proj", "down_proj"):
            weights[name] = _subtract_mean(weights[name], 0)


def _subtract_mean(tensor: Tensor, axis: int) -> Tensor:
    exact = tensor.double()
    return (exact - exact.mean(axis, keepdim=True)).float()


def _add_gates(weights: Tensors) -> None:
    """Let relu(u)² become silu(gate) · up, to about 3e-7."""
    root = GATE_SHARPNESS**0.5
    for name in list(weights):
        if name.split(".")[-2] == "up_proj":
            weights[name.replace("up_proj", "gate_proj")] = weights[name] * GATE_SHARPNESS
            weights[name] = weights[name] / root
        elif name.endswith("down_proj.weight"):
            weights[name] = weights[name] / root
