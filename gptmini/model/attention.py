"""Causal self-attention with grouped KV heads, sliding windows and a KV cache.

`Attention` is the module: project_qkv, mix, o_proj. Its `mask` says what `mix` may see, and with
ALiBi how well. `attend` does the work, scaled dot-product attention under any mask; `make_mask`
makes every mask of the model. The cache of earlier keys and values is in cache.py.

H query heads share G KV heads. G = H is multi-head attention (Vaswani et al. 2017), G = 1 is
multi-query (Shazeer 2019), anything between is grouped-query (Ainslie et al. 2023). One formula
serves all three: query head h reads KV head h // (H / G). The cache holds G heads, and on a CPU
keys and values are never repeated.

Letters: B batch, T queries, S keys, H query heads, G KV heads, D width, K head size, V head size of
the values (K in the model).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.model.cache import LayerCache, Masks
from gptmini.model.kernels import RMSNorm
from gptmini.model.layers import apply_rotary, compute_alibi_slopes


class Attention(nn.Module):
    """Self-attention of one layer: (B, T, D) -> (B, T, D)."""

    alibi_slopes: Tensor | None  # (H,)

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        D = config.d_model
        H = config.n_head
        G = config.n_kv_head
        K = config.head_dim
        qkv_bias = config.attention.qkv_bias
        if qkv_bias is None:
            qkv_bias = config.bias
        self.q_proj = nn.Linear(D, H * K, qkv_bias)
        self.k_proj = nn.Linear(D, G * K, qkv_bias)
        self.v_proj = nn.Linear(D, G * K, qkv_bias)
        self.o_proj = nn.Linear(H * K, D, config.bias)
        self.head_dim = K
        self.window = config.get_window(layer)
        self.dropout = config.attention.weight_dropout
        self.backend = config.attention.backend
        self.qk_norm = config.attention.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(K, eps=config.norm_eps)
            self.k_norm = RMSNorm(K, eps=config.norm_eps)
        slopes = compute_alibi_slopes(H) if config.position == "alibi" else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None, cache: LayerCache
    ) -> Tensor:
        """Compute causal self-attention over x (B, T, D) -> (B, T, D).

        `cos_sin` are those of `Rotary`, (T, K/2) each. x continues the positions in the cache, of
        which a `NoCache` has none.
        """
        q, k, v = self.project_qkv(x, cos_sin)  # (B, H, T, K), (B, G, T, K), (B, G, T, K)
        mixed = self.mix(q, k, v, cache)  # (B, H, T, K)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # (B, T, H·K) -> (B, T, D)

    def project_qkv(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, D) to queries (B, H, T, K), keys and values (B, G, T, K).

        Queries and keys are normalized and rotated; values are not.
        """
        heads = (-1, self.head_dim)
        projections = [self.q_proj, self.k_proj, self.v_proj]
        if self.training and fuses_qkv(x.device):
            q, k, v = fused_linear(projections, x)
        else:
            q, k, v = (project(x) for project in projections)
        q = q.unflatten(-1, heads)  # (B, T, H·K) -> (B, T, H, K)
        k = k.unflatten(-1, heads)  # (B, T, G·K) -> (B, T, G, K)
        v = v.unflatten(-1, heads)  # (B, T, G·K) -> (B, T, G, K)
        if self.qk_norm:  # in the type of its weights, float32 also under autocast
            q = self.q_norm(q.to(self.q_norm.weight.dtype))
            k = self.k_norm(k.to(self.k_norm.weight.dtype))
        q = q.transpose(1, 2)  # (B, H, T, K)
        k = k.transpose(1, 2)  # (B, G, T, K)
        v = v.transpose(1, 2)  # (B, G, T, K)
        if cos_sin is not None:
            q = apply_rotary(q, cos_sin)
            k = apply_rotary(k, cos_sin)
        return q.type_as(v), k.type_as(v), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        """Average, for each query, the values it sees: q (B, H, T, K) -> (B, H, T, K).

        k and v (B, G, T, K) are those of the same T tokens; `cache.update` adds them to what the
        queries may see. An attention of your own overrides this (docs/own-attention.md).
        """
        query_positions = cache.next_positions(q.shape[2])  # (T,) or (B, T)
        k, v, key_positions = cache.update(k, v)  # (B, G, S, K) twice, (S,) or (B, S)
        mask = self.mask(query_positions, key_positions, cache.masks)
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, mask, dropout, self.backend)

    def mask(self, queries: Tensor, keys: Tensor, shared: Masks) -> Tensor | None:
        """Make the mask for `attend`, of queries at positions (T,) on keys at positions (S,).

        Positions are (B, T) and (B, S) where each row has its own. The layers of a pass then share
        masks: `shared` has them, by window. A rule on positions goes into `make_mask`, and into the
        question below of whether a mask is needed; a bias on the scores goes where ALiBi's is.
        """
        if keys.ndim == 2:
            if self.window not in shared:
                # As a bias, or torch's kernels would turn it into one in each layer.
                shared[self.window] = self._make_bias(queries, keys)
            return shared[self.window]  # (B, 1, T, S), with ALiBi (B, H, T, S)
        if self.alibi_slopes is not None:
            return self._make_bias(queries, keys)  # (H, T, S)
        T = len(queries)
        S = len(keys)
        window_hides = self.window is not None and self.window < S
        if not window_hides and T in (1, S):
            return None  # `attend` needs none if T = S (causal) or T = 1 (sees every key)
        return make_mask(queries, keys, self.window)  # (T, S)

    def _make_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Make the mask as a bias on the scores, with that of ALiBi if the model has it."""
        mask = make_mask(queries, keys, self.window)  # (T, S) or (B, 1, T, S)
        bias = _convert_to_bias(mask, self.k_proj.weight.dtype)
        if self.alibi_slopes is None:
            return bias
        return (bias + make_alibi_bias(queries, keys, self.alibi_slopes)).type_as(bias)


def fuses_qkv(device: torch.device) -> bool:
    """Check whether training computes q, k and v in one product: it fills an accelerator better.

    In generation, joining the weights would cost more than it saves.
    """
    return device.type != "cpu"


def fused_linear(layers: list[nn.Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Apply several linear layers to x (..., D) in one product, forward and backward."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat(weights)  # (all outputs, D)
    bias = torch.cat(biases) if biases else None  # (all outputs,)
    return F.linear(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax(q kᵀ / √K + bias) v, scaled dot-product attention.

    q is (B, H, T, K), k (B, G, S, K), v (B, G, S, V), the result (B, H, T, V). V, the head size of
    the values, is K in the model.

    `mask` is (T, S), (H, T, S), (B, 1, T, S) or (B, H, T, S): boolean, as from `make_mask`, or a
    bias that is added to the scores and hides a key by -∞. Without a mask, T queries on S = T keys
    are causal, and a single query sees every key. A query that sees no key gets zeros. `dropout`
    acts on the weights.
    """
    B, H, T, K = q.shape
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask[None]  # (1, H, T, S); torch's fused kernels take masks of 2 or 4 axes
    if T > 1:
        causal = mask is None
        return _attend(q, k, v, mask, causal, dropout, backend)
    # Decoding has a single query. The heads that share a KV head then become the rows of one matrix
    # product, or on a CPU of two, to use two cores (scripts/LOG.md: Eager attention, or torch's
    # fused kernel?).
    G = k.shape[1]
    products = 2 * G if q.device.type == "cpu" and H % (2 * G) == 0 else G
    packed = q.reshape(B, products, H // products, K)  # the heads take the place of T
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == H:  # and so do those of its mask
        mask = mask.reshape(*mask.shape[:-3], products, H // products, -1)
    mixed = _attend(packed, k, v, mask, False, dropout, backend)  # (B, products, H / products, V)
    return mixed.reshape(B, H, 1, -1)  # (B, H, 1, V); kernels lay their results out as they like


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, backend: str
) -> Tensor:
    """Run `attend` on a backend: `auto`, `eager`, or `sdpa`, torch's fused kernels."""
    if backend == "auto":
        backend = choose_backend(q, mask is not None, dropout)
    if backend == "eager":
        return _attend_eager(q, k, v, mask, causal, dropout)
    grouped = k.shape[1] < q.shape[1]
    if grouped and q.device.type != "cpu" and (mask is not None or q.dtype != torch.bfloat16):
        # On CUDA only the flash kernel shares KV heads, and it takes neither masks nor float32;
        # GPUs that train in float16 have none. Without copies torch would fall back to plain
        # products, which hold all scores.
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, K)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, K)
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped
    )


def choose_backend(q: Tensor, masked: bool, dropout: float) -> str:
    """Resolve `auto`: `eager` where two matrix products beat torch's fused kernel, else `sdpa`.

    On a CPU the backward pass of the fused kernel is slow in bfloat16, for short rows and under a
    mask, and the kernel has no dropout (scripts/LOG.md: Eager attention, or torch's fused kernel?).
    """
    if q.device.type != "cpu":
        return "sdpa"
    slow_backward = q.dtype == torch.bfloat16 and (q.shape[2] < 1024 or masked)
    if dropout > 0 or (q.requires_grad and slow_backward):
        return "eager"
    return "sdpa"


def _attend_eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Compute `attend` by its definition, one matrix product after the other."""
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    # Heads that share a KV head are stacked along the query axis, so that k and v are not repeated.
    stacked = (q * K**-0.5).reshape(B, G, H // G * T, K)
    scores = (stacked @ k.transpose(-1, -2)).view(B, H, T, S)
    # (..., T, 1): rows with no visible key; None if there are none by construction
    sees_nothing = None
    if causal:
        positions = torch.arange(T, device=q.device)
        scores = scores + _convert_to_bias(make_mask(positions, positions), q.dtype)  # (B, H, T, S)
    elif mask is not None:
        bias = mask if mask.is_floating_point() else _convert_to_bias(mask, q.dtype)  # (..., T, S)
        sees_nothing = ~(bias > -torch.inf).any(-1, keepdim=True)  # (..., T, 1)
        # The softmax of a row of -∞ would be NaN, so such a row sees everything for the moment.
        scores = scores + bias.masked_fill(sees_nothing, 0)  # (B, H, T, S)
    weights = F.dropout(scores.softmax(dim=-1), dropout).to(v.dtype)  # (B, H, T, S)
    mixed = (weights.view(B, G, H // G * T, S) @ v).view(B, H, T, -1)  # (B, H, T, V)
    return mixed if sees_nothing is None else mixed.masked_fill(sees_nothing, 0)


def _convert_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into a bias: 0 where a key is visible, -∞ where it is not."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


# -- masks: every mask of the model is made here; True means visible -------------------------------


def make_mask(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """Say which keys at positions (S,) the queries at positions (T,) see: (T, S).

    A query sees the keys at its own position and before, with a window only the last `window` of
    them. Where each row has positions of its own, (B, T) and (B, S), the mask is (B, 1, T, S). Keys
    at negative positions are places that hold none yet.
    """
    distance = queries[..., :, None] - keys[..., None, :]  # (T, S) or (B, T, S)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if keys.ndim == 1:
        return mask
    mask &= keys[:, None] >= 0
    return mask[:, None]  # (B, 1, T, S)


def make_alibi_bias(queries: Tensor, keys: Tensor, slopes: Tensor) -> Tensor:
    """Make the bias of ALiBi (H, T, S): minus the distance of each key times a slope of the head.

    Positions are as in `make_mask`. Where each row has its own, the bias is (B, H, T, S). Keys
    behind their query get a bias too, and a mask must hide them.
    """
    distance = queries[..., None, :, None] - keys[..., None, None, :]  # ([B,] 1, T, S)
    return -slopes[:, None, None] * distance  # (H, T, S) or (B, H, T, S)
