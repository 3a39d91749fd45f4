"""What a model costs, by arithmetic: parameters, operations, bytes of its KV cache.

Letters: T positions, V vocabulary, L layers, D width, F inner width, H query heads, G KV heads,
K head size.
"""

from gptmini.config.settings import ModelConfig

CHINCHILLA_TOKENS_PER_PARAMETER = (
    20  # tokens per parameter, the best use of compute (Hoffmann et al. 2022)
)


def count_parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """The number of parameters by part, without empty parts; `vocab_size` must be set."""
    V, D, L, F = config.vocab_size or 0, config.d_model, config.n_layer, config.d_ff
    queries, keys = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    bias, qkv_bias = int(config.bias), config.attention.qkv_bias
    attention, mlp = _count_matrix_weights(config)
    attention += bias * D
    attention += (bias if qkv_bias is None else int(qkv_bias)) * (queries + 2 * keys)
    attention += 2 * config.head_dim * config.attention.qk_norm
    inner = 2 if config.activation == "swiglu" else 1  # projections from D to F
    mlp += bias * (inner * F + D)
    norm = D * (1 + (config.norm == "layernorm" and config.bias))
    parts = {
        "embedding": V * D,
        "positions": config.context_length * D * (config.position == "learned"),
        "attention": L * attention,
        "mlp": L * mlp,
        "norms": (2 * L + 1) * norm,
        "head": 0 if config.tie_embeddings else V * D,
    }
    return {part: count for part, count in parts.items() if count}


def _count_matrix_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights in the matrices of one layer's attention and of its MLP."""
    heads = (config.n_head + config.n_kv_head) * config.head_dim  # q and k; o and v have as many
    inner = 2 if config.activation == "swiglu" else 1
    return 2 * config.d_model * heads, (inner + 1) * config.d_model * config.d_ff


def count_parameters(config: ModelConfig) -> int:
    """All parameters together; a tied head counts once."""
    return sum(count_parameters_by_part(config).values())


def count_forward_flops(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Floating-point operations per token of a forward pass over T tokens, by part.

    A product with a matrix of n weights takes 2 n. Attention counts only the keys that a query
    sees: half of T on average under the causal mask, fewer with a window.
    """
    attention, mlp = _count_matrix_weights(config)
    heads = config.n_head * config.head_dim
    seen = sum(
        _average_keys_seen(config.get_window(layer), seq_len) for layer in range(config.n_layer)
    )
    return {
        "attention": 2 * config.n_layer * attention + 4 * heads * seen,
        "mlp": 2 * config.n_layer * mlp,
        "head": 2 * config.d_model * (config.vocab_size or 0),
    }


def _average_keys_seen(window: int | None, seq_len: int) -> float:
    """Keys that a query sees, averaged over T positions."""
    width = min(window or seq_len, seq_len)
    return (width * (width + 1) / 2 + (seq_len - width) * width) / seq_len


def count_training_flops(config: ModelConfig, seq_len: int, checkpointing: bool = False) -> float:
    """Operations per token of a training step; a backward pass takes twice a forward pass.

    Gradient checkpointing repeats the forward pass of the blocks.
    """
    parts = count_forward_flops(config, seq_len)
    again = parts["attention"] + parts["mlp"] if checkpointing else 0
    return 3 * sum(parts.values()) + again


def count_cache_bytes(config: ModelConfig, positions: int, element: int = 4) -> int:
    """Bytes of the keys and values of these positions: 2 L G K elements each, float32 by default.

    A layer with a window keeps only its window.
    """
    kept = sum(min(positions, config.get_cache_length(layer)) for layer in range(config.n_layer))
    return 2 * kept * config.n_kv_head * config.head_dim * element
