"""Causal attention in which H query heads share G key/value heads.

G = H is multi-head attention (Vaswani et al. 2017), G = 1 multi-query (Shazeer 2019), what lies
between grouped-query (Ainslie et al. 2023). One formula serves all: query head h reads KV head
h // (H / G), and keys and values are never repeated.

Letters: B batch, T queries, S keys, H query heads, G KV heads, D width, K head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config import ModelConfig
from gptmini.layers import rotate


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(T, S), true where a query sees a key; the queries are the last T of the S positions."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return mask.tril(keys - queries)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, dropout: float = 0.0) -> Tensor:
    """Scaled dot-product attention: q (B, H, T, K), k and v (B, G, S, K) -> (B, H, T, K).

    The queries are the last T of the S positions. `dropout` acts on the weights. The values may
    have a size of their own.
    """
    B, H, T, _ = q.shape
    G, S = k.shape[1], k.shape[2]
    if T == 1:
        # One query sees every key, so a group's query heads are rows of one small product.
        packed = q.reshape(B, G, H // G, -1)
        return F.scaled_dot_product_attention(packed, k, v, dropout_p=dropout).view(B, H, 1, -1)
    if _plain_is_faster(q, dropout):
        return _attend_plainly(q, k, v, causal, dropout)
    mask = causal_mask(T, S, q.device) if causal and T < S else None
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=causal and T == S, enable_gqa=G < H
    )


def _plain_is_faster(q: Tensor, dropout: float) -> bool:
    """Whether three plain products beat the fused kernel.

    On a CPU the fused kernel's backward pass is slow in bfloat16 (forward and backward of B 32,
    H 4, T 256, K 64 on two cores with AMX: 44 ms fused, 22 ms plain), and dropout leaves it.
    """
    training = torch.is_grad_enabled() and q.requires_grad
    return q.device.type == "cpu" and (dropout > 0 or (training and q.dtype == torch.bfloat16))


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float) -> Tensor:
    """`attend` by its definition, softmax(q kᵀ / √K + mask) v, the group in the query axis."""
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    packed = (q * K**-0.5).reshape(B, G, H // G * T, K)
    scores = (packed @ k.transpose(-1, -2)).view(B, H, T, S)
    if causal:
        hidden = ~causal_mask(T, S, q.device)
        scores = scores + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    weights = F.dropout(scores.softmax(dim=-1), dropout).to(v.dtype)
    return (weights.view(B, G, H // G * T, S) @ v).view(B, H, T, -1)


class LayerCache:
    """The keys and values of one layer's past positions, (B, G, S, K), in memory taken once."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v (B, G, T, K); all keys and values so far, as views."""
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """One LayerCache per layer: 2 · L · G · K numbers for each position."""

    def __init__(
        self, config: ModelConfig, batch_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (batch_size, config.n_kv_head, config.context_length, config.head_dim)
        self.layers = [
            LayerCache(*torch.zeros(2, *shape, device=device, dtype=dtype))
            for _ in range(config.n_layer)
        ]

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layers[0].length

    @property
    def bytes(self) -> int:
        """Memory taken."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def clear(self) -> None:
        """Forget all positions; the memory stays."""
        for layer in self.layers:
            layer.length = 0


class Attention(nn.Module):
    """Projections around `attend`: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim, self.dropout = config.head_dim, config.dropout
        D, K, bias = config.d_model, config.head_dim, config.bias
        self.q_proj = nn.Linear(D, config.n_head * K, bias)
        self.k_proj = nn.Linear(D, config.n_kv_head * K, bias)
        self.v_proj = nn.Linear(D, config.n_kv_head * K, bias)
        self.o_proj = nn.Linear(config.n_head * K, D, bias)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); with a cache the positions follow those it holds."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = attend(q, k, v, dropout=self.dropout if self.training else 0.0)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, T, -1))
