import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.model import mechanisms
from gptmini.model.attention import Attention, attend, choose_backend, make_mask
from gptmini.model.cache import KVCache, NoCache
from gptmini.model.layers import Rotary


def by_the_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of each head and query under a bias (B, H, T, S) on its scores, one by one."""
    share = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = bias[b, h, t] > -torch.inf
        scores = k[b, h // share, seen] @ q[b, h, t] / math.sqrt(q.shape[-1]) + bias[b, h, t, seen]
        out[b, h, t] = scores.softmax(0) @ v[b, h // share, seen]
    return out


def make_bias(mask: Tensor) -> Tensor:
    """What hides the same keys as a mask, added to scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


WHOLE = NoCache(torch.device("cpu"))  # texts are read whole
SHAPES = [  # H, G, T, S, K, size of a value
    (4, 4, 5, 5, 8, 8),
    (4, 2, 5, 5, 8, 8),
    (4, 1, 5, 5, 8, 8),
    (6, 3, 1, 7, 4, 4),
    (6, 1, 1, 7, 4, 4),
    (4, 2, 3, 9, 8, 8),
    (2, 2, 1, 1, 6, 6),
    (4, 2, 6, 6, 8, 5),
]


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("H", "G", "T", "S", "K", "V"), SHAPES)
def test_attend_is_the_definition(H, G, T, S, K, V, causal, backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, H, T, K), torch.randn(2, G, S, K), torch.randn(2, G, S, V)
    mask = make_mask(torch.arange(S - T, S), torch.arange(S))
    mask = mask if causal else torch.ones_like(mask)
    found = attend(q, k, v, mask, backend=backend)
    expected = by_the_bias(q, k, v, make_bias(mask).expand(2, H, T, S))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("T", [1, 5])
def test_a_kernel_may_lay_its_result_out_as_it_likes(T, variant, monkeypatch):
    """On a GPU some kernels return a transposed (B, T, H, V)."""
    settings: dict[str, Any] = {"variant": variant, "backend": "sdpa"}
    if variant == "gqa":
        settings["n_kv_head"] = 2
    config = ModelConfig(vocab_size=50, n_head=4, d_model=32, attention=settings)
    torch.manual_seed(0)
    attention = Attention(config)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        cos_sin = Rotary(config)(torch.arange(9))
        expected = attention(x, cos_sin, WHOLE)
    kernel = F.scaled_dot_product_attention

    def transposed(*inputs, **options):
        return kernel(*inputs, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    cache = KVCache(config, 2, torch.device("cpu"), torch.float32).layers[0]
    found = []
    with torch.no_grad():
        for start in range(0, 9, T):
            part = slice(start, start + T)
            angles = tuple(each[part] for each in cos_sin)
            found.append(attention(x[:, part], angles, cache))
    torch.testing.assert_close(torch.cat(found, dim=1), expected)


class OnGpu(Tensor):
    """A tensor in main memory that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


@pytest.mark.parametrize(("H", "G", "T", "S", "K", "V"), SHAPES)
def test_on_a_gpu_no_kernel_has_to_share_kv_heads(H, G, T, S, K, V, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, H, T, K), torch.randn(2, G, S, K), torch.randn(2, G, S, V)
    mask = make_mask(torch.arange(S - T, S), torch.arange(S))
    expected = attend(q, k, v, mask)
    kv_heads = []
    kernel = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, *others: object, enable_gqa: bool, **options: object):
        assert not enable_gqa
        kv_heads.append(k.shape[1])
        return kernel(q, k, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, k, v = (tensor.as_subclass(OnGpu) for tensor in (q, k, v))
    torch.testing.assert_close(attend(q, k, v, mask).as_subclass(Tensor), expected)
    assert kv_heads == [G if T == 1 else H]  # decoding copies nothing of the cache


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("T", [1, 3])
def test_a_query_that_sees_no_key_gets_zeros_and_gives_no_gradient(T, backend):
    torch.manual_seed(0)
    leaves = [torch.randn(2, 4, n, 8, requires_grad=True) for n in (T, 5, 5)]
    mask = torch.rand(2, 1, T, 5) < 0.7
    mask[1, 0, -1] = False
    mixed = attend(*leaves, mask, backend=backend)
    assert not mixed[1, :, -1].any()
    expected = by_the_bias(*leaves, make_bias(mask).expand(2, 4, T, 5))
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
    mixed.square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert not leaves[0].grad[1, :, -1].any()


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("shape", ["TS", "HTS", "B1TS", "BHTS"])
@pytest.mark.parametrize(("H", "G", "T"), [(4, 4, 5), (4, 2, 5), (6, 1, 1), (8, 2, 1), (3, 3, 1)])
@pytest.mark.parametrize("kind", ["bias", "boolean"])
def test_a_mask_may_be_a_bias_and_differ_between_heads(H, G, T, shape, backend, kind):
    torch.manual_seed(0)
    B, S = 2, 7
    q, k, v = torch.randn(B, H, T, 8), torch.randn(B, G, S, 8), torch.randn(B, G, S, 8)
    sizes = {"B": B, "H": H, "T": T, "S": S, "1": 1}
    bias = 2 * torch.randn([sizes[letter] for letter in shape])
    bias[torch.rand(bias.shape) < 0.3] = -torch.inf
    bias[..., -1, :] = -torch.inf  # the last query sees no key, or
    if T == 1:
        bias[..., 3] = 1.0
    given = bias if kind == "bias" else bias > -torch.inf
    meant = bias if kind == "bias" else make_bias(given)
    expected = by_the_bias(q, k, v, meant.expand(B, H, T, S))
    found = attend(q.requires_grad_(), k, v, given, backend=backend)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.square().sum().backward()
    assert q.grad.isfinite().all()
    found = attend(q.detach().bfloat16(), k.bfloat16(), v.bfloat16(), given, backend=backend)
    torch.testing.assert_close(found.float(), expected, atol=0.06, rtol=0.06)


def test_dropout_acts_on_weights_under_a_bias():
    torch.manual_seed(0)
    q, k, bias = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 500, 8), torch.randn(4, 1, 500)
    dropped = attend(q, k, torch.ones(1, 2, 500, 8), bias, dropout=0.5)
    assert (dropped - 1).abs().max() < 0.5
    assert (dropped != 1).all()


def test_bfloat16_training_on_a_cpu_is_eager_and_agrees_with_float32():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    exact = attend(q, k, v)
    low_q = q.bfloat16().requires_grad_()
    assert choose_backend(low_q, False, 0.0) == "eager"
    low = attend(low_q, k.bfloat16(), v.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, atol=0.03, rtol=0.03)


def test_dropout_keeps_the_mean_and_depends_on_the_seed():
    q, k, v = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8), torch.ones(1, 2, 64, 8)
    torch.manual_seed(3)
    first = attend(q, k, v, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, attend(q, k, v, dropout=0.5))
    assert first.mean() == pytest.approx(1.0, abs=0.1)  # rows of weights still sum to 1 on average
    assert first.std() > 0.05


# -- the module ------------------------------------------------------------------------------------


def test_the_cache_is_allocated_once_and_read_in_place():
    attention = {"variant": "gqa", "n_kv_head": 2}
    config = ModelConfig(n_head=4, d_model=32, context_length=16, attention=attention)
    layer = KVCache(config, 1, torch.device("cpu"), torch.float32).layers[0]
    memory = layer.keys.data_ptr()
    first, second = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 1, 8)
    layer.update(first, first)
    keys, _, positions = layer.update(second, second)
    assert positions.tolist() == [0, 1, 2, 3]
    assert keys.data_ptr() == memory
    assert torch.equal(keys, torch.cat([first, second], dim=2))


# -- everything against the written-out mechanisms -------------------------------------------------

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (0.02, 0.05)}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("position", ["rope", "alibi"])
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa"])
def test_the_module_equals_the_written_out_mechanism(variant, position, window, backend, dtype):
    torch.manual_seed(0)
    config = ModelConfig.model_validate(
        {
            "n_head": 4,
            "d_model": 32,
            "context_length": 16,
            "position": position,
            "attention": {
                "variant": variant,
                "n_kv_head": 2 if variant == "gqa" else None,
                "window": window,
                "qk_norm": position == "rope",
                "qkv_bias": True,
                "backend": backend,
            },
        }
    )
    module = Attention(config)
    cos_sin = Rotary(config)(torch.arange(9)) if position == "rope" else None
    x = torch.randn(2, 9, 32, requires_grad=True)
    q, k, v = module.project_qkv(x, cos_sin)
    mask = mechanisms.causal_mask(9) if window is None else mechanisms.window_mask(9, window)
    bias = mechanisms.alibi_bias(4, 9) if position == "alibi" else None
    rows = [
        mechanisms.grouped_query_attention(*row, mask, bias) for row in zip(q, k, v, strict=True)
    ]
    expected = module.o_proj(torch.stack(rows).transpose(1, 2).flatten(2))
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = module(x, cos_sin, WHOLE).float()
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    (found_gradient,) = torch.autograd.grad(found.square().sum(), x)
    scale = gradient.abs().max().item()
    torch.testing.assert_close(found_gradient, gradient, atol=scale * atol * 5, rtol=rtol)


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_masks_equal_the_written_out_ones(window):
    positions = torch.arange(5)
    expected = mechanisms.causal_mask(5) if window is None else mechanisms.window_mask(5, window)
    assert torch.equal(make_mask(positions, positions, window), expected)
    assert torch.equal(make_mask(positions[3:], positions, window), expected[3:])
    shuffled = torch.tensor([2, 0, 4, 1, 3])
    assert torch.equal(make_mask(positions, shuffled, window), expected[:, shuffled])


def test_rows_with_positions_of_their_own_have_masks_of_their_own():
    queries = torch.tensor([[2, 3], [0, 1]])
    keys = torch.tensor([[0, 1, 2, 3], [0, 1, -2, -1]])  # negative: an index that holds no key yet
    first, second = make_mask(queries, keys)[:, 0]
    assert torch.equal(first, mechanisms.causal_mask(4)[2:])
    assert second.tolist() == [[True, False, False, False], [True, True, False, False]]
    first, second = make_mask(queries, keys, 2)[:, 0]
    assert torch.equal(first, mechanisms.window_mask(4, 2)[2:])
    assert second.tolist() == [[True, False, False, False], [True, True, False, False]]
    (wide,) = make_mask(torch.tensor([[0]]), torch.tensor([[0, -1]]), 9)
    assert wide.tolist() == [[[True, False]]]
