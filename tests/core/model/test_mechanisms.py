"""The written-out mechanisms: golden values, and the equalities between them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.model import mechanisms as m
from gptmini.model.layers import Rotary, apply_rotary, compute_alibi_slopes


def close(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=6e-5, rtol=0)


def words_and_weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sentence "Life is short, eat dessert first" and three projections; V is not K."""
    torch.manual_seed(123)
    x = nn.Embedding(50000, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()
    torch.manual_seed(123)
    return x, torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 4)


def test_golden_self_attention():
    x, w_q, w_k, w_v = words_and_weights()
    close(
        m.self_attention(x, w_q, w_k, w_v)[[0, 1, 5]],
        [
            [-0.1564, 0.1028, -0.0763, -0.0764],
            [0.5313, 1.3607, 0.7891, 1.3110],
            [-0.5296, -0.2799, -0.4107, -0.6006],
        ],
    )


def test_masks_are_what_they_look_like():
    def rows(mask: Tensor) -> list[str]:
        return ["".join(".x"[int(cell)] for cell in row) for row in mask]

    assert rows(m.global_mask(4, 1, 2)) == ["x...", "xx..", "xxx.", "xx.x"]
    lengths = torch.tensor([3, 1])
    assert [rows(row) for row in m.padding_mask(lengths, 4)] == [["xxx."], ["x..."]]
    assert [rows(row) for row in m.padding_mask(lengths, 4, "left")] == [[".xxx"], ["...x"]]
    assert rows(m.cross_mask(lengths, 2, 4)[0]) == ["xxx.", "xxx."]


def test_dropout_drops_what_torchs_drops_from_the_same_seed():
    weights = torch.rand(50, 60)
    torch.manual_seed(123)
    expected = nn.Dropout(0.4)(weights)
    torch.manual_seed(123)
    torch.testing.assert_close(m.drop(weights, 0.4), expected)


def test_many_heads_with_biases_on_a_batch_are_torchs():
    torch.manual_seed(0)
    B, T, D, H = 2, 5, 12, 3
    torchs, x = nn.MultiheadAttention(D, H, batch_first=True), torch.randn(B, T, D)
    nn.init.normal_(torchs.in_proj_bias)
    nn.init.normal_(torchs.out_proj.bias)
    weights = (*torchs.in_proj_weight.view(3, D, D).mT, torchs.out_proj.weight.T)
    biases = (*torchs.in_proj_bias.view(3, D), torchs.out_proj.bias)
    expected, _ = torchs(x, x, x, attn_mask=~m.causal_mask(T))
    torch.testing.assert_close(m.multi_head_by_splitting(x, weights, H, biases), expected)


def test_cross_attention_is_torchs_and_sees_no_padding():
    torch.manual_seed(0)
    B, T, S, D = 2, 4, 6, 8
    torchs = nn.MultiheadAttention(D, 1, bias=False, batch_first=True)
    nn.init.eye_(torchs.out_proj.weight)
    x, context, lengths = torch.randn(B, T, D), torch.randn(B, S, D), torch.tensor([6, 3])
    weights = tuple(torchs.in_proj_weight.view(3, D, D).mT)
    visible = m.cross_mask(lengths, T, S)
    expected, _ = torchs(x, context, context, key_padding_mask=~visible[:, 0])
    mixed = m.cross_attention(x, context, weights, visible)
    torch.testing.assert_close(mixed, expected)
    context[1, 3:] = 99.0
    assert torch.equal(m.cross_attention(x, context, weights, visible)[1], mixed[1])


def test_a_batch_is_its_rows():
    torch.manual_seed(0)
    x, weights = torch.randn(2, 5, 8), torch.randn(3, 8, 4)
    q, k, v = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3)
    for function, arguments in (
        (m.self_attention_without_weights, (x,)),
        (lambda x: m.self_attention(x, *weights), (x,)),
        (m.causal_attention_by_renormalizing, (q, q, q)),
        (m.stepwise_attention, (q, k, v)),
    ):
        rows = [function(*row) for row in zip(*arguments, strict=True)]
        torch.testing.assert_close(function(*arguments), torch.stack(rows))


# -- positions -------------------------------------------------------------------------------------


def test_rotation_is_that_of_the_model_and_depends_on_the_distance_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 8)  # (B, H, T, K)
    config = ModelConfig(vocab_size=5, n_head=4, d_model=32, context_length=7, rope_theta=500.0)
    expected = apply_rotary(x, Rotary(config)(torch.arange(7)))
    torch.testing.assert_close(m.rotate_by_position(x, 500.0), expected)
    q, k = torch.randn(2, 1, 8).expand(2, 7, 8)  # the same vector at each position
    scores = m.rotate_by_position(q) @ m.rotate_by_position(k).T  # (T, T)
    for distance in range(7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores[6, 0] != scores[6, 1]


def test_alibi_takes_from_a_score_its_distance_times_the_slope_of_the_head():
    bias = m.alibi_bias(8, 4)
    assert bias[0].tril().tolist() == [
        [0, 0, 0, 0],
        [-0.5, 0, 0, 0],
        [-1.0, -0.5, 0, 0],
        [-1.5, -1.0, -0.5, 0],
    ]
    assert [bias[h, 1, 0].item() for h in range(8)] == [-(2.0**-n) for n in range(1, 9)]
    for H in range(1, 40):  # those of the model, by another formula
        torch.testing.assert_close(m.alibi_slopes(H), compute_alibi_slopes(H))
    q, k = torch.zeros(2, 8, 4, 3)  # without content, the nearest keys weigh the most
    weights = m.attention_weights(q, k, m.causal_mask(4), bias)  # (H, T, T)
    e = math.exp(0.5)
    total = e**3 + e**2 + e + 1
    expected = [1 / total, e / total, e**2 / total, e**3 / total]
    assert weights[0, 3].tolist() == pytest.approx(expected)


# -- equal ways ------------------------------------------------------------------------------------


@given(
    T=st.integers(1, 9),
    S=st.integers(1, 9),
    tile=st.integers(1, 10),
    scale=st.sampled_from([0.1, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_attention_by_tiles_equals_attention_at_once(T, S, tile, scale, seed):
    torch.manual_seed(seed)
    q, k, v = scale * torch.randn(2, T, 4), torch.randn(2, S, 4), torch.randn(2, S, 6)
    visible = torch.rand(T, S) < 0.7
    for mask in (None, visible):
        expected = m.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(m.attention_by_tiles(q, k, v, tile, mask), expected)
    in_float64 = [each.double() for each in (q, k, v)]
    torch.testing.assert_close(
        m.attention_by_tiles(*in_float64, tile), m.scaled_dot_product_attention(*in_float64)
    )


SIZES = {"T": st.integers(1, 9), "G": st.integers(1, 3), "share": st.integers(1, 3)}


@given(**SIZES, window=st.integers(1, 10), seed=st.integers(0, 99))
def test_attention_step_by_step_equals_the_whole_sequence(T, G, share, window, seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(G * share, T, 4), torch.randn(G, T, 4), torch.randn(G, T, 6)
    for limit, visible in ((None, m.causal_mask(T)), (window, m.window_mask(T, window))):
        torch.testing.assert_close(
            m.stepwise_attention(q, k, v, limit), m.grouped_query_attention(q, k, v, visible)
        )


@given(T=SIZES["T"], H=st.integers(1, 4), P=st.sampled_from([0, 2]), seed=st.integers(0, 99))
def test_latent_attention_is_one_key_and_value_head_for_all_on_cached_latent_rows(T, H, P, seed):
    """Absorbed: a head's matrices go to its queries and results, and no key or value is made."""
    torch.manual_seed(seed)
    B, R, K, V = 2, 5, 4, 6
    q, latent = torch.randn(B, H, T, K + P), torch.randn(B, T, R + P)
    w_k, w_v = torch.randn(H, R, K), torch.randn(H, R, V)
    mixed = m.multi_head_latent_attention(q, latent, w_k, w_v, m.causal_mask(T))
    absorbed = torch.cat([q[..., :K] @ w_k.mT, q[..., K:]], dim=-1)  # (B, H, T, R + P)
    absorbed = absorbed * math.sqrt((R + P) / (K + P))
    rows = latent[:, None]  # (B, 1, T, R + P)
    stepwise = m.stepwise_attention(absorbed, rows, rows[..., :R]) @ w_v
    torch.testing.assert_close(mixed, stepwise, rtol=1e-4, atol=1e-4)
