"""Attention written out, one mechanism after another: a page to read, and the tests' oracle.

Nothing here is fast, and the model uses none of it. Each function is a definition in plain tensor
code. Tests check that `attention.py`, which the model uses, computes the same.

To play with them, run `python -i -m gptmini.model.mechanisms` and type, for example,
`self_attention_without_weights(torch.eye(3))`.

Every function takes a batch as leading axes, written `...`, and no batch as well.

Letters: B batch, T queries, S keys, H query heads, G KV heads, D width, K head size, V value size.
"""

import math
from typing import Literal

import torch
from torch import Tensor

# -- from averaging similar words to queries, keys and values --------------------------------------


def self_attention_without_weights(x: Tensor) -> Tensor:
    """softmax(x xᵀ) x, of the shape (..., T, D) of x: each word a mean of all, by similarity."""
    scores = x @ x.transpose(-1, -2)  # (..., T, T)
    return scores.softmax(dim=-1) @ x


def self_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Learned projections of x (..., T, D): w_q and w_k (D, K), w_v (D, V) -> (..., T, V).

    A word can now look for one thing (query), be found by another (key) and pass on a third
    (value). V may differ from K.
    """
    return scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v)


def cross_attention(
    x: Tensor, context: Tensor, weights: tuple[Tensor, Tensor, Tensor], mask: Tensor | None = None
) -> Tensor:
    """Queries of x (..., T, D) on another sequence, context (..., S, D') -> (..., T, V).

    The weights are w_q (D, K), w_k (D', K) and w_v (D', V). A decoder reads its encoder this way.
    There is no future in another sequence, so only its padding is masked (`cross_mask`).
    """
    w_q, w_k, w_v = weights
    return scaled_dot_product_attention(x @ w_q, context @ w_k, context @ w_v, mask)


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / √K + bias) v: q (..., T, K), k (..., S, K), v (..., S, V) -> (..., T, V).

    See `attention_weights` for mask and bias. Dropout is of the weights.
    """
    return drop(attention_weights(q, k, mask, bias), dropout) @ v


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The weights (..., T, S) of q (..., T, K) on k (..., S, K) (Vaswani et al. 2017).

    Dividing by √K keeps long vectors from saturating the softmax. Where `mask` is false the
    score is -∞ and the weight 0. A query that sees no key gets weights of 0, not NaN. `bias` is
    added to the scores, as `alibi_bias` is.
    """
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (..., T, S)
    if bias is not None:
        scores = scores + bias
    if mask is None:
        return scores.softmax(dim=-1)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)


# -- masks: true means visible ---------------------------------------------------------------------


def causal_mask(T: int) -> Tensor:
    """(T, T): position i sees j ≤ i."""
    return torch.ones(T, T, dtype=torch.bool).tril()


def window_mask(T: int, window: int) -> Tensor:
    """(T, T): position i sees i - window < j ≤ i (Beltagy et al. 2020)."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return (distance >= 0) & (distance < window)


def strided_mask(T: int, stride: int) -> Tensor:
    """(T, T): the last `stride` positions, before them every stride-th (Child et al. 2019)."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return (distance >= 0) & ((distance < stride) | (distance % stride == 0))


def global_mask(T: int, window: int, n_global: int) -> Tensor:
    """(T, T): a window, and the first n_global positions from everywhere (Beltagy et al. 2020)."""
    first = causal_mask(T) & (torch.arange(T) < n_global)
    return window_mask(T, window) | first


def padding_mask(lengths: Tensor, S: int, side: Literal["left", "right"] = "right") -> Tensor:
    """(B, 1, S) for rows of lengths (B,), padded on one side to S: no query sees padding.

    Padded on the left, the rows of a batch end together and can go on together.
    """
    first = S - lengths if side == "left" else torch.zeros_like(lengths)  # (B,)
    places = torch.arange(S) - first[:, None]  # (B, S), counted from the first token of a row
    return ((places >= 0) & (places < lengths[:, None]))[:, None, :]


def cross_mask(lengths: Tensor, T: int, S: int) -> Tensor:
    """(B, T, S): T queries on S keys of another sequence with rows of lengths (B,)."""
    return padding_mask(lengths, S).expand(-1, T, S)


def causal_attention_by_renormalizing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zero the weights of the future, then renormalize: causal attention (..., T, V) another way.

    The result equals masking with -∞, because a softmax over fewer terms is the same exponentials
    divided by their smaller sum.
    """
    weights = attention_weights(q, k) * causal_mask(q.shape[-2])  # (..., T, T)
    return weights / weights.sum(dim=-1, keepdim=True) @ v


def drop(weights: Tensor, p: float) -> Tensor:
    """Zero each weight with probability p and scale the others by 1 / (1 - p).

    Attention dropout, as training uses it. It draws as nn.Dropout does, so that the same seed
    drops the same weights.
    """
    kept = torch.empty_like(weights).bernoulli_(1 - p)
    return weights * kept / (1 - p)


# -- positions: without them, attention reads a sequence as a set ----------------------------------


def sinusoidal_positions(T: int, D: int) -> Tensor:
    """Rows (T, D) that are added to embeddings, nothing learned (Vaswani et al. 2017).

    Numbers 2i and 2i + 1 are sine and cosine of t · 10,000^(-2i/D): hands of clocks, the first of
    which turns fast and the last slowly.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, D, 2) / D)  # (D / 2,)
    angles = torch.arange(T)[:, None] * frequencies  # (T, D / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)  # (T, D)


def rotate_by_position(x: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotary embedding of queries or keys (..., T, K), of the same shape (Su et al. 2021).

    Number i of a head and number i + K/2 are a point in a plane. At position t it is turned by the
    angle t · theta^(-2i/K): fast for the first pairs, slowly for the last. A score then depends on
    how far query and key are apart, and not on where they are.
    """
    T, K = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, K, 2) / K)  # (K / 2,)
    angles = torch.arange(T)[:, None] * frequencies  # (T, K / 2)
    first, second = x.chunk(2, dim=-1)  # (..., T, K / 2) each
    turned_first = first * angles.cos() - second * angles.sin()
    turned_second = first * angles.sin() + second * angles.cos()
    return torch.cat([turned_first, turned_second], dim=-1)


def alibi_slopes(H: int) -> Tensor:
    """The slopes (H,) of ALiBi: 2^(-8/H), 2^(-16/H), ..., 2^(-8) for H heads, a power of two.

    Other numbers of heads take those of the power of two below, then every other one of the next.
    """
    below = 2 ** int(math.log2(H))
    slopes = 2.0 ** (-8 * torch.arange(1, below + 1) / below)  # (below,)
    if below == H:
        return slopes
    return torch.cat([slopes, alibi_slopes(2 * below)[::2][: H - below]])  # (H,)


def alibi_bias(H: int, T: int) -> Tensor:
    """(H, T, T): minus the distance of each key times a slope of the head (Press et al. 2022)."""
    slopes = alibi_slopes(H)
    distance = torch.arange(T)[:, None] - torch.arange(T)  # (T, T)
    return -slopes[:, None, None] * distance


# -- many heads ------------------------------------------------------------------------------------


def multi_head_by_stacking(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> Tensor:
    """Causal heads side by side: x (..., T, D); w_q, w_k, w_v (H, D, K); w_o (H·K, D)."""
    mask = causal_mask(x.shape[-2])
    heads = [
        scaled_dot_product_attention(x @ q, x @ k, x @ v, mask)
        for q, k, v in zip(w_q, w_k, w_v, strict=True)
    ]  # H times (..., T, K)
    return torch.cat(heads, dim=-1) @ w_o  # (..., T, H·K) -> (..., T, D)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., T, H·K) -> (..., H, T, K): head h gets the h-th slice of every row."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def merge_heads(x: Tensor) -> Tensor:
    """(..., H, T, K) -> (..., T, H·K)."""
    return x.transpose(-2, -3).flatten(-2)


def multi_head_by_splitting(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    n_head: int,
    biases: tuple[Tensor | float, ...] = (0.0, 0.0, 0.0, 0.0),
) -> Tensor:
    """One wide projection split into heads: w_q, w_k, w_v (D, H·K), w_o (H·K, D) -> (..., T, D).

    Equals stacking heads whose weights are slices of the wide ones. The biases are those of q, k,
    v (H·K) and of the output (D).
    """
    w_q, w_k, w_v, w_o = weights
    b_q, b_k, b_v, b_o = biases
    q = split_heads(x @ w_q + b_q, n_head)  # (..., T, D) -> (..., H, T, K)
    k = split_heads(x @ w_k + b_k, n_head)
    v = split_heads(x @ w_v + b_v, n_head)
    mixed = scaled_dot_product_attention(q, k, v, causal_mask(x.shape[-2]))  # (..., H, T, K)
    return merge_heads(mixed) @ w_o + b_o  # (..., T, D)


def grouped_query_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None
) -> Tensor:
    """q (..., H, T, K) on k (..., G, S, K) and v (..., G, S, V) -> (..., H, T, V).

    Query head h reads h // (H / G). G = H is multi-head attention, G = 1 is multi-query (Shazeer
    2019), anything between is grouped-query attention (Ainslie et al. 2023). `bias` is (H, T, S).
    """
    H = q.shape[-3]
    G = k.shape[-3]
    heads = []
    for h in range(H):
        g = h // (H // G)
        keys = k[..., g, :, :]
        values = v[..., g, :, :]
        head_bias = None if bias is None else bias[h]
        head = scaled_dot_product_attention(q[..., h, :, :], keys, values, mask, head_bias)
        heads.append(head)  # (..., T, V)
    return torch.stack(heads, dim=-3)  # (..., H, T, V)


def multi_head_latent_attention(
    q: Tensor, latent: Tensor, w_k: Tensor, w_v: Tensor, mask: Tensor
) -> Tensor:
    """q (..., H, T, K + P) on one row a token, latent (..., S, R + P) -> (..., H, T, V) (MLA).

    Each head makes its own keys and values of the first R numbers of a row, by w_k (H, R, K) and
    w_v (H, R, V). The last P are a key that all heads share; RoPE turns it, and the last P of q. A
    cache keeps the rows: R + P numbers a token, however many heads there are (DeepSeek-V2 2024).
    """
    R = w_k.shape[-2]
    content = latent[..., None, :, :R]  # (..., 1, S, R)
    shared = latent[..., None, :, R:]  # (..., 1, S, P)
    own = content @ w_k  # (..., H, S, K)
    k = torch.cat([own, shared.expand(*own.shape[:-1], -1)], dim=-1)  # (..., H, S, K + P)
    return scaled_dot_product_attention(q, k, content @ w_v, mask)


# -- one tile at a time ----------------------------------------------------------------------------


def attention_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, tile: int, mask: Tensor | None = None
) -> Tensor:
    """Attention without ever holding all scores, as flash attention does (Dao et al. 2022).

    q (..., T, K), k (..., S, K), v (..., S, V) -> (..., T, V), with scores (..., T, tile) at a
    time. A softmax needs the largest score and the sum of all exponentials. Both are kept so far;
    when a tile brings a larger score, what was summed before is scaled down to it.
    """
    T, S = q.shape[-2], k.shape[-2]
    largest = q.new_full((*q.shape[:-1], 1), torch.finfo(q.dtype).min)  # (..., T, 1)
    total = torch.zeros_like(largest)  # (..., T, 1)
    mixed = q.new_zeros(*q.shape[:-1], v.shape[-1])  # (..., T, V)
    visible = torch.ones(T, S, dtype=torch.bool) if mask is None else mask
    for start in range(0, S, tile):
        keys = slice(start, start + tile)
        scores = q @ k[..., keys, :].transpose(-1, -2) / math.sqrt(q.shape[-1])  # (..., T, tile)
        scores = scores.masked_fill(~visible[..., keys], -torch.inf)
        new_largest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        shrink = (largest - new_largest).exp()  # (..., T, 1)
        exponentials = (scores - new_largest).exp()  # (..., T, tile)
        total = total * shrink + exponentials.sum(dim=-1, keepdim=True)
        mixed = mixed * shrink + exponentials @ v[..., keys, :]
        largest = new_largest
    # A query that sees no key has a total of 0, and gets 0.
    return mixed / total.clamp(min=torch.finfo(q.dtype).tiny)


# -- one token at a time ---------------------------------------------------------------------------


def stepwise_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Grouped causal attention with a KV cache: step t appends its key and value, then looks back.

    q (..., H, T, K), k (..., G, T, K), v (..., G, T, V) -> (..., H, T, V), equal to masked
    attention over the whole sequence. With a window, the cache keeps the last `window` of both.
    """
    keys = k[..., :0, :]  # the cache is empty
    values = v[..., :0, :]
    outputs = []
    for t in range(q.shape[-2]):
        now = slice(t, t + 1)
        keys = torch.cat([keys, k[..., now, :]], dim=-2)
        values = torch.cat([values, v[..., now, :]], dim=-2)
        if window is not None:
            keys = keys[..., -window:, :]
            values = values[..., -window:, :]
        sees_all = torch.ones(1, keys.shape[-2], dtype=torch.bool)
        outputs.append(grouped_query_attention(q[..., now, :], keys, values, sees_all))
    return torch.cat(outputs, dim=-2)  # T times (..., H, 1, V) -> (..., H, T, V)
