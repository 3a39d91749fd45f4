"""Count what a model costs, by arithmetic: parameters, operations, bytes of its KV cache.

Letters: T positions, V vocabulary, L layers, D width, F inner width, H query heads, G KV heads,
K head size.
"""

from gptmini.config.settings import ModelConfig

# The best use of compute (Hoffmann et al. 2022).
CHINCHILLA_TOKENS_PER_PARAMETER = 20


def count_parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of each part, without empty parts; `vocab_size` must be set."""
    V = config.vocab_size or 0
    D = config.d_model
    L = config.n_layer
    F = config.d_ff
    queries = config.n_head * config.head_dim
    keys = config.n_kv_head * config.head_dim
    bias = int(config.bias)
    qkv_bias = bias if config.attention.qkv_bias is None else int(config.attention.qkv_bias)
    attention, mlp = _count_matrix_weights(config)
    attention += bias * D
    attention += qkv_bias * (queries + 2 * keys)
    if config.attention.qk_norm:
        attention += 2 * config.head_dim
    mlp += bias * (_count_inner_projections(config) * F + D)
    norm = 2 * D if config.norm == "layernorm" and config.bias else D
    parts = {
        "embedding": V * D,
        "positions": config.context_length * D if config.position == "learned" else 0,
        "attention": L * attention,
        "mlp": L * mlp,
        "norms": (2 * L + 1) * norm,
        "head": 0 if config.tie_embeddings else V * D,
    }
    return {part: count for part, count in parts.items() if count}


def _count_matrix_weights(config: ModelConfig) -> tuple[int, int]:
    """Count the weights in the matrices of one layer's attention and of its MLP."""
    heads = (config.n_head + config.n_kv_head) * config.head_dim  # q and k; o and v have as many
    attention = 2 * config.d_model * heads
    mlp = (_count_inner_projections(config) + 1) * config.d_model * config.d_ff
    return attention, mlp


def _count_inner_projections(config: ModelConfig) -> int:
    """Count the MLP's projections from D to F; one more leads back."""
    return 2 if config.activation == "swiglu" else 1


def count_parameters(config: ModelConfig) -> int:
    """Count all parameters; a tied head counts once."""
    return sum(count_parameters_by_part(config).values())


def count_forward_flops(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Count the floating-point operations per token of a forward pass over T tokens, by part.

    A product with a matrix of n weights takes 2 n. Attention counts only the keys that a query
    sees: half of T on average under the causal mask, fewer with a window.
    """
    attention, mlp = _count_matrix_weights(config)
    heads = config.n_head * config.head_dim
    windows = [config.get_window(layer) for layer in range(config.n_layer)]
    seen = sum(_average_keys_seen(window, seq_len) for window in windows)
    return {
        "attention": 2 * config.n_layer * attention + 4 * heads * seen,
        "mlp": 2 * config.n_layer * mlp,
        "head": 2 * config.d_model * (config.vocab_size or 0),
    }


def _average_keys_seen(window: int | None, seq_len: int) -> float:
    """Average the keys that a query sees over T positions."""
    width = min(window or seq_len, seq_len)
    growing = width * (width + 1) / 2  # the first queries see one key, two keys, ...
    full = (seq_len - width) * width
    return (growing + full) / seq_len


def count_training_flops(config: ModelConfig, seq_len: int, checkpointing: bool = False) -> float:
    """Count the operations per token of a training step; a backward pass takes two forward passes.

    Gradient checkpointing repeats the forward pass of the blocks.
    """
    parts = count_forward_flops(config, seq_len)
    again = parts["attention"] + parts["mlp"] if checkpointing else 0
    return 3 * sum(parts.values()) + again


def count_cache_bytes(config: ModelConfig, positions: int, element: int = 4) -> int:
    """Count the bytes of the keys and values of these positions: 2 L G K elements for each.

    A layer with a window keeps only its window. Each has `element` bytes, four in float32.
    """
    kept = sum(min(positions, config.get_cache_length(layer)) for layer in range(config.n_layer))
    return 2 * kept * config.n_kv_head * config.head_dim * element
