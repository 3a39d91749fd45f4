"""Causal attention in which H query heads share G key/value heads.

G = H is multi-head attention (Vaswani et al. 2017), G = 1 multi-query (Shazeer 2019), what lies
between grouped-query (Ainslie et al. 2023). One formula serves all: query head h reads KV head
h // (H / G), and keys and values are never repeated.

Letters: B batch, T queries, S keys, H query heads, G KV heads, D width, K head size.
"""

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptmini.config.settings import ModelConfig
from gptmini.errors import MachineError
from gptmini.model import masks
from gptmini.model.layers import rotate


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Scaled dot-product attention: q (B, H, T, K), k and v (B, G, S, K) -> (B, H, T, K).

    Without a mask (T, S) or (B, 1, T, S), true where visible, T queries are causal among S = T
    keys, and one query sees every key. `dropout` acts on the weights. The values may have a size
    of their own. MachineError if `backend` is a kernel that this machine has not.
    """
    B, H, T, K = q.shape
    if T > 1:
        return _run(q, k, v, mask, mask is None, dropout, backend)
    # One query: the heads of a group are the rows of one product. Two products a KV head keep two
    # cores busy (12 heads on 1024 keys of one KV head: 38 us in one, 30 in two, 69 in twelve).
    G = k.shape[1]
    blocks = 2 * G if H % (2 * G) == 0 else G
    packed = _run(q.reshape(B, blocks, H // blocks, K), k, v, mask, False, dropout, backend)
    return packed.view(B, H, 1, -1)


def choose_backend(q: Tensor, masked: bool, dropout: float) -> str:
    """What `auto` means: `eager` where three plain products beat the fused kernel, else `sdpa`.

    On a CPU the fused kernel is slow backwards in bfloat16 on short rows and under a mask (1024
    with a window: 151 ms a step eager, 185 fused), and dropout leaves it.
    Milliseconds, eager / fused, of 6 heads of 64 on 4096 tokens in all (two cores with AMX):

    | length                      | 32       | 128      | 256     | 512     | 1024    | 2048     |
    |-----------------------------|----------|----------|---------|---------|---------|----------|
    | bfloat16, with gradients    | 9 / 39   | 12 / 43  | 17 / 32 | 30 / 43 | 58 / 53 | 136 / 83 |
    | bfloat16, without           | 2 / 2    | 4 / 2    | 7 / 4   | 15 / 6  | 26 / 9  | 61 / 14  |
    | float32, with gradients     | 16 / 11  | 25 / 20  | 38 / 30 | 77 / 54 | 150/76  | 316/122  |
    """
    slow = q.requires_grad and q.dtype == torch.bfloat16 and (q.shape[2] < 1024 or masked)
    return "eager" if q.device.type == "cpu" and (slow or dropout > 0) else "sdpa"


def _run(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, backend: str
) -> Tensor:
    if backend == "auto":
        backend = choose_backend(q, mask is not None, dropout)
    if backend == "eager":
        return _attend_eagerly(q, k, v, mask, causal, dropout)
    grouped = k.shape[1] < q.shape[1]
    if backend == "sdpa":
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped
        )
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped
            )
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise MachineError(
            f"model.attention.backend: no flash kernel for {q.dtype} on this {q.device.type} "
            f"({reason}); take auto"
        ) from None


def _attend_eagerly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """`attend` by its definition, softmax(q kᵀ / √K + mask) v, the group in the query axis."""
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    packed = (q * K**-0.5).reshape(B, G, H // G * T, K)
    scores = (packed @ k.transpose(-1, -2)).view(B, H, T, S)
    if causal:
        positions = torch.arange(T, device=q.device)
        mask = masks.visible(positions, positions)
    if mask is not None:
        hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + hidden
    weights = F.dropout(scores.softmax(dim=-1), dropout).to(v.dtype)
    return (weights.view(B, G, H // G * T, S) @ v).view(B, H, T, -1)


class LayerCache:
    """The keys and values of one layer's past, (B, G, size, K), in memory taken once.

    Position p lies at place p % size, so a layer with a window keeps its window and no more.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.size = keys.shape[2]
        self.length = 0  # positions seen

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add k and v (B, G, T, K); gives keys and values (B, G, S, K) to look at, and where.

        These are all that a window lets the T new queries see, at positions (S,), in any order.
        """
        start, end = self.length, self.length + k.shape[2]
        self.length = end
        positions = torch.arange(start, end, device=k.device)
        if end <= self.size:
            self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
            positions = torch.arange(end, device=k.device)
            return self.keys[:, :, :end], self.values[:, :, :end], positions
        if len(positions) == 1:
            place = start % self.size
            self.keys[:, :, place : place + 1], self.values[:, :, place : place + 1] = k, v
            places = torch.arange(self.size, device=k.device)
            return self.keys, self.values, start - (place - places) % self.size
        # A chunk over the border: what is kept of the past, then the chunk.
        past = torch.arange(max(0, start - self.size), start, device=k.device)
        keys = torch.cat([self.keys[:, :, past % self.size], k], dim=2)
        values = torch.cat([self.values[:, :, past % self.size], v], dim=2)
        positions = torch.cat([past, positions])
        newest = positions[-self.size :] % self.size
        self.keys[:, :, newest] = keys[:, :, -self.size :]
        self.values[:, :, newest] = values[:, :, -self.size :]
        return keys, values, positions


class KVCache:
    """One LayerCache per layer: 2 · G · K numbers for each position that the layer keeps.

    Those with a window keep `spare` positions more, so that as many can be taken back.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        spare: int = 0,
    ) -> None:
        self.layers = []
        for layer in range(config.n_layer):
            size = min(config.cache_length(layer) + spare, config.context_length)
            shape = (batch_size, config.n_kv_head, size, config.head_dim)
            both = torch.empty(2, *shape, device=device, dtype=dtype)
            self.layers.append(LayerCache(both[0], both[1]))

    @property
    def length(self) -> int:
        """Positions seen."""
        return self.layers[0].length

    @property
    def bytes(self) -> int:
        """Memory taken."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on; the memory stays."""
        for layer in self.layers:
            layer.length = length

    def row(self, index: int) -> "KVCache":
        """The cache of one row of the batch, in the same memory."""
        one = copy(self)
        rows = slice(index, index + 1)
        one.layers = [LayerCache(layer.keys[rows], layer.values[rows]) for layer in self.layers]
        return one


class Attention(nn.Module):
    """Projections around `attend`: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim, self.dropout = config.head_dim, config.attention.weight_dropout
        self.window, self.backend = config.window(layer), config.attention.backend
        D, K = config.d_model, config.head_dim
        qkv_bias = config.bias if config.attention.qkv_bias is None else config.attention.qkv_bias
        self.q_proj = nn.Linear(D, config.n_head * K, qkv_bias)
        self.k_proj = nn.Linear(D, config.n_kv_head * K, qkv_bias)
        self.v_proj = nn.Linear(D, config.n_kv_head * K, qkv_bias)
        self.o_proj = nn.Linear(config.n_head * K, D, config.bias)
        self.qk_norm = config.attention.qk_norm
        if self.qk_norm:
            self.q_norm = nn.RMSNorm(K, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(K, eps=config.norm_eps)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); with a cache the positions follow those it holds.

        `padding` (B,) counts the positions on the left of each row that are none.
        """
        q, k, v = self.heads(x, rotation)
        start, T = cache.length if cache else 0, x.shape[1]
        queries = keys = torch.arange(start, start + T, device=x.device)
        if cache is not None:
            k, v, keys = cache.append(k, v)
        narrow = self.window is not None and self.window < len(keys)
        whole = not narrow and T in (1, len(keys))
        mask = None
        if padding is not None or not whole:
            mask = masks.visible(queries, keys, self.window, padding)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, mask, dropout, self.backend)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def heads(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D) -> queries (B, H, T, K), keys and values (B, G, T, K), positions told."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        if self.qk_norm:  # in float32, as the weights are
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q.type_as(v), k.type_as(v), v
