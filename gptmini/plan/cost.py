"""Count what a model costs, by arithmetic: parameters, operations, memory, bytes of its KV cache.

Letters: T positions, V vocabulary, L layers, D width, F inner width, H query heads, G KV heads,
K head size.
"""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from gptmini.config.settings import Config, ModelConfig

if TYPE_CHECKING:
    from gptmini.machine import Compute

# What the formula for activations leaves out, and what allocators keep of freed blocks.
ACTIVATIONS_MARGIN = 1.25


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds at its peak.

    `activations` is everything above the first three: what the forward pass keeps for the backward
    pass, or the optimizer's temporaries. Writing a checkpoint takes none.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        return sum(astuple(self))


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


def count_step_flops(config: Config) -> tuple[float, float]:
    """Count the operations of a step: of its passes, and of the optimizer's update.

    Muon makes its updates of products, 30 operations for each weight and row; others take none.
    """
    model = config.model
    train = config.train
    per_token = count_training_flops(model, config.seq_len, train.gradient_checkpointing)
    passes = train.batch_size * config.seq_len * per_token
    if train.optimizer != "muon":
        return passes, 0.0
    parts = count_parameters_by_part(model)
    return passes, 30.0 * model.d_model * (parts["attention"] + parts["mlp"])


def estimate_memory(config: Config, compute: "Compute") -> Memory:
    """Estimate the memory of a training run; `micro_batch_size` must be set.

    Of 150 runs on a CPU whose every tensor was counted, in both number types, it gave 0.94 to 1.9
    times the peak, in the median 1.15 times.
    """
    model = config.model
    train = config.train
    parts = count_parameters_by_part(model)
    weights = 4 * sum(parts.values())
    matrices = parts["attention"] + parts["mlp"]
    head = (model.vocab_size or 0) * model.d_model
    state = 2 * weights  # two moments in float32, but one for the matrices that Muon updates
    itemsize = compute.dtype.itemsize
    orthogonalizing = 0
    if train.optimizer == "muon":
        state -= 4 * matrices
        orthogonalizing = int(3.4 * itemsize * matrices)  # several copies of most of them
    rows = train.micro_batch_size or train.batch_size
    # A gradient that is added to that of the pass before, or to that of the embedding.
    passing = 4 * max(head, model.d_model * model.d_ff)
    if rows < train.batch_size and model.tie_embeddings:
        passing *= 2
    if itemsize < 4:
        passing += itemsize * (matrices + head)  # weights that autocast has converted
    kept = rows * config.seq_len * count_bytes_kept_per_token(config, compute)
    activations = int(ACTIVATIONS_MARGIN * max(kept + passing, orthogonalizing))
    return Memory(weights, weights, state, activations)


def count_bytes_kept_per_token(config: Config, compute: "Compute") -> int:
    """Count what a forward pass keeps of a token for the backward pass, and its logits."""
    model = config.model
    itemsize = compute.dtype.itemsize
    residual = 8 + 2 * itemsize  # the stream and its norms, in float32, and what goes in and out
    if model.dropout:
        residual += 2 * itemsize
    inner = 4 if model.activation == "swiglu" else 2
    heads = 3 * (model.n_head + model.n_kv_head) * model.head_dim  # q, k, v and the result
    block = residual * model.d_model + itemsize * (inner * model.d_ff + heads)
    scores = itemsize * model.n_head * config.seq_len
    if model.attention.backend == "eager" or model.attention.weight_dropout:
        block += 5 * scores
    elif compute.device.type == "cpu" and itemsize < 4 and config.seq_len < 1024:
        block += 2 * scores  # attention without a fused kernel
    blocks = model.n_layer * block
    if config.train.gradient_checkpointing:
        blocks = block + model.n_layer * itemsize * model.d_model
    return blocks + 12 * model.d_model + 4 * (model.vocab_size or 0)


def count_cache_bytes(config: ModelConfig, positions: int, element: int = 4) -> int:
    """Count the bytes of the keys and values of these positions: 2 L G K elements for each.

    A layer with a window keeps only its window. Each has `element` bytes, four in float32.
    """
    kept = sum(min(positions, config.get_cache_length(layer)) for layer in range(config.n_layer))
    return 2 * kept * config.n_kv_head * config.head_dim * element
