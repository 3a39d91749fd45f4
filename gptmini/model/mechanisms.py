"""Attention written out, one mechanism after another: a page to read, and the tests' oracle.

Nothing here is fast and the model does not use it. Each function is the definition in plain
tensor code, so that the one production attention in `attention.py` has something to be equal to.

Letters: B batch, T queries, S keys, H query heads, G KV heads, D width, K head size, V value size.
"""

import math

import torch
from torch import Tensor

# -- from words that look at each other to queries, keys and values --------------------------------


def self_attention_without_weights(x: Tensor) -> Tensor:
    """softmax(x xᵀ) x, (T, D) -> (T, D): each word is a mean of all, by how alike they are."""
    scores = x @ x.T
    return scores.softmax(dim=-1) @ x


def self_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Queries, keys and values are learnt views of x (T, D): w_q, w_k (D, K), w_v (D, V) -> (T, V).

    What is asked, what answers to it and what is passed on need not be the same; V may differ
    from K.
    """
    return scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """softmax(q kᵀ / √K + mask) v: q (..., T, K), k (..., S, K), v (..., S, V) -> (..., T, V)."""
    return drop(attention_weights(q, k, visible), dropout) @ v


def attention_weights(q: Tensor, k: Tensor, visible: Tensor | None = None) -> Tensor:
    """The weights (..., T, S) of q (..., T, K) on k (..., S, K) (Vaswani et al. 2017).

    √K keeps the scores of long vectors from saturating the softmax. Where `visible` is false the
    score is -∞, so the weight is 0; a row that sees nothing gets weights of 0, not NaN.
    """
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if visible is None:
        return scores.softmax(dim=-1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


# -- masks: true is visible ------------------------------------------------------------------------


def causal_mask(T: int) -> Tensor:
    """(T, T): position i sees j ≤ i."""
    return torch.ones(T, T, dtype=torch.bool).tril()


def window_mask(T: int, window: int) -> Tensor:
    """(T, T): position i sees i - window < j ≤ i (Beltagy et al. 2020)."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return (distance >= 0) & (distance < window)


def padding_mask(lengths: Tensor, S: int) -> Tensor:
    """(B, 1, S) for rows of lengths (B,) padded on the right: nobody sees the padding."""
    return (torch.arange(S) < lengths[:, None])[:, None, :]


def causal_padding_mask(lengths: Tensor, T: int) -> Tensor:
    """(B, T, T): causal and padding."""
    return causal_mask(T) & padding_mask(lengths, T)


def cross_mask(lengths: Tensor, T: int, S: int) -> Tensor:
    """(B, T, S): T queries of one sequence on another of S positions and lengths (B,)."""
    return padding_mask(lengths, S).expand(-1, T, S)


def causal_attention_by_renormalising(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The other road to causal attention (T, V): zero the future's weights, divide by what is left.

    Equal to -∞ before the softmax, because a softmax without some terms is the others over their
    sum.
    """
    weights = attention_weights(q, k) * causal_mask(len(q))
    return weights / weights.sum(dim=-1, keepdim=True) @ v


def drop(weights: Tensor, p: float) -> Tensor:
    """Dropout on the weights: each is lost with probability p, those kept grow by 1 / (1 - p)."""
    kept = torch.rand_like(weights) >= p
    return weights * kept / (1 - p)


# -- many heads ------------------------------------------------------------------------------------


def multi_head_by_stacking(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> Tensor:
    """Causal heads side by side: x (T, D), w_q, w_k, w_v (H, D, K), w_o (H·K, D) -> (T, D)."""
    visible = causal_mask(len(x))
    heads = [
        scaled_dot_product_attention(x @ q, x @ k, x @ v, visible)
        for q, k, v in zip(w_q, w_k, w_v, strict=True)
    ]
    return torch.cat(heads, dim=-1) @ w_o


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(T, H·K) -> (H, T, K): head h holds the h-th span of every row."""
    return x.view(len(x), heads, -1).transpose(0, 1)


def multi_head_by_splitting(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, n_head: int
) -> Tensor:
    """One wide projection cut into heads: w_q, w_k, w_v (D, H·K) -> (T, D).

    The same as stacking the heads whose weights are the spans of the wide ones.
    """
    q, k, v = (split_heads(x @ w, n_head) for w in (w_q, w_k, w_v))
    mixed = scaled_dot_product_attention(q, k, v, causal_mask(len(x)))
    return mixed.transpose(0, 1).reshape(len(x), -1) @ w_o


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q (H, T, K) on k (G, S, K) and v (G, S, V) -> (H, T, V); query head h reads h // (H / G).

    G = H is multi-head attention, G = 1 multi-query (Shazeer 2019), between them grouped-query
    attention (Ainslie et al. 2023).
    """
    share = len(q) // len(k)
    heads = [
        scaled_dot_product_attention(q[h], k[h // share], v[h // share], visible)
        for h in range(len(q))
    ]
    return torch.stack(heads)


# -- one token after another -----------------------------------------------------------------------


def stepwise_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Grouped causal attention with a cache: position t appends its key and value, then looks back.

    q (H, T, K), k (G, T, K), v (G, T, V) -> (H, T, V), equal to the whole sequence under its mask.
    A window of w positions needs no more than the last w keys and values.
    """
    keys, values, steps = k[:, :0], v[:, :0], []
    for t in range(q.shape[1]):
        keys = torch.cat([keys, k[:, t : t + 1]], dim=1)
        values = torch.cat([values, v[:, t : t + 1]], dim=1)
        if window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        visible = torch.ones(1, keys.shape[1], dtype=torch.bool)
        steps.append(grouped_query_attention(q[:, t : t + 1], keys, values, visible))
    return torch.cat(steps, dim=1)
