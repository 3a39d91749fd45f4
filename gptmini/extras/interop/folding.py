"""Rewrites weights so that they compute the same function in an architecture that others have."""

import torch
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.model.gpt import create_undrawn
from gptmini.runs.tensors import Tensors

# silu(S u) u / S is within 0.28 / S² of relu(u)². As a power of four it rounds no weight, and the
# products stay in float16's range.
GATE_SHARPNESS = 4.0**5


def fold(config: ModelConfig, weights: Tensors) -> tuple[ModelConfig, Tensors]:
    """Rewrite settings and weights as the same function in a form that others have.

    That form is Llama's or Qwen3's (rotary positions, a gated MLP, RMSNorm) wherever it computes
    the same. Otherwise it is StarCoder2's or GPT-2's: LayerNorm with biases, which are 0 where
    there were none. `architectures.choose_model_type` then finds the architecture.
    """
    settings = config.model_dump()
    attention = config.attention.model_dump()
    weights = {name: tensor.cpu() for name, tensor in weights.items()}
    window = attention["window"]
    if window is not None and window >= config.context_length:  # it hides nothing
        attention["window"] = None
        attention["full_every"] = None
    can_be_gated = config.activation != "gelu" and (config.norm == "rmsnorm" or not config.bias)
    if config.position not in ("learned", "none") and can_be_gated:
        if config.norm == "layernorm":
            _center_weights(weights)
            settings["norm"] = "rmsnorm"
            settings["tie_embeddings"] = False
        if config.activation == "relu2":
            _add_gates(weights)
            settings["activation"] = "swiglu"
    elif config.norm == "layernorm":
        settings["bias"] = True
    if config.position in ("learned", "none") and not config.attention.qk_norm:  # GPT-2
        _repeat_kv_heads(weights, config)
        settings["position"] = "learned"
        attention["variant"] = "mha"
        attention["n_kv_head"] = None
    if settings["bias"]:
        attention["qkv_bias"] = None
    settings["attention"] = attention
    folded_config = ModelConfig.model_validate(settings)
    # Biases and positions that the model did not have are 0.
    folded = {
        name: weights[name].float() if name in weights else torch.zeros(empty.shape)
        for name, empty in create_undrawn(folded_config).state_dict().items()
    }
    return folded_config, folded


def _center_weights(weights: Tensors) -> None:
    """Turn LayerNorm without bias into RMSNorm, its equal where the mean is 0 (Jiang 2023).

    No block reads the mean of the residual stream, so whatever a block adds to the stream may lose
    its mean. The head reads the embeddings as they were, so it gets a copy.
    """
    weights.setdefault("head.weight", weights["embed.weight"])
    weights["embed.weight"] = _subtract_mean(weights["embed.weight"], axis=1)
    for name in weights:
        if name.split(".")[-2] in ("o_proj", "down_proj"):
            weights[name] = _subtract_mean(weights[name], axis=0)


def _subtract_mean(tensor: Tensor, axis: int) -> Tensor:
    exact = tensor.double()
    return (exact - exact.mean(axis, keepdim=True)).float()


def _add_gates(weights: Tensors) -> None:
    """Turn relu(u)² into silu(gate) · up, to about 3e-7."""
    root = GATE_SHARPNESS**0.5
    for name in list(weights):
        if name.split(".")[-2] == "up_proj":
            weights[name.replace("up_proj", "gate_proj")] = weights[name] * GATE_SHARPNESS
            weights[name] = weights[name] / root
        elif name.endswith("down_proj.weight"):
            weights[name] = weights[name] / root


def _repeat_kv_heads(weights: Tensors, config: ModelConfig) -> None:
    """Give every query head a copy of its KV head, as GPT-2 has no grouped-query attention."""
    share = config.n_head // config.n_kv_head
    if share == 1:
        return
    for name in weights:
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            heads = weights[name].unflatten(0, (config.n_kv_head, -1))  # (G, K, ...)
            weights[name] = heads.repeat_interleave(share, 0).flatten(0, 1)  # (H K, ...)
