import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError
from gptmini.model.layers import MLP, Rotary, apply_rotary, compute_alibi_slopes, create_norm


@given(
    theta=st.sampled_from([10.0, 10_000.0, 1e6]),
    half=st.integers(1, 6),
    start=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_rotary_positions_turn_complex_numbers(theta, half, start, seed):
    """Pair i at position p is a complex number times exp(i · p · theta^(-2i/K)), K = 2 half."""
    torch.manual_seed(seed)
    config = ModelConfig(
        head_dim=2 * half, n_head=1, d_model=8, context_length=32, rope_theta=theta
    )
    x = torch.randn(2, 3, 5, 2 * half)
    positions = torch.arange(start, start + 5)
    found = apply_rotary(x, Rotary(config)(positions))
    each = apply_rotary(x, Rotary(config)(torch.stack([positions, positions])))
    assert torch.equal(found, each)
    for p in range(5):
        for i in range(half):
            turn = cmath.exp(1j * (start + p) * theta ** (-2 * i / (2 * half)))
            pairs = zip(x[:, :, p].flatten(0, 1), found[:, :, p].flatten(0, 1), strict=True)
            for before, after in pairs:
                turned = complex(before[i], before[i + half]) * turn
                assert after[i].item() == pytest.approx(turned.real, abs=1e-5)
                assert after[i + half].item() == pytest.approx(turned.imag, abs=1e-5)


def test_scaled_rotary_positions_slow_down_what_turns_seldom():
    """Llama 3.1: by wavelength, the frequency as it is, divided by the factor, or in between."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64.0
    scaled = ModelConfig(
        head_dim=16,
        n_head=1,
        d_model=8,
        context_length=40,
        rope_scaling=[factor, low, high, original],
    )
    table = Rotary(scaled).cosines
    kinds = set()
    for i in range(8):
        frequency = 10_000.0 ** (-2 * i / 16)
        wavelength = 2 * cmath.pi / frequency
        if wavelength < original / high:
            kinds.add("kept")
        elif wavelength > original / low:
            kinds.add("divided")
            frequency /= factor
        else:
            kinds.add("between")
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        for position in (1, 39):
            assert table[position, i].item() == pytest.approx(
                cmath.cos(position * frequency).real, abs=1e-6
            )
    assert kinds == {"kept", "between", "divided"}
    with pytest.raises(ConfigError, match="low_freq_factor is not below high_freq_factor"):
        ModelConfig(rope_scaling=[8.0, 4.0, 4.0, 64.0])


def test_rotated_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    config = ModelConfig(head_dim=8, n_head=1, d_model=8, context_length=40)
    rotary = Rotary(config)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> float:
        return float(
            (
                apply_rotary(q, rotary(torch.tensor([i])))
                * apply_rotary(k, rotary(torch.tensor([j])))
            ).sum()
        )

    for distance in (0, 1, 7):
        scores = [score(j + distance, j) for j in (0, 3, 20)]
        assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)
    assert score(7, 0) != pytest.approx(score(0, 0), abs=1e-3)


def test_apply_rotary_keeps_the_type_and_computes_in_float32():
    config = ModelConfig(head_dim=8, n_head=1, d_model=8, context_length=512)
    x, cos_sin = torch.randn(1, 1, 512, 8).bfloat16(), Rotary(config)(torch.arange(512))
    found = apply_rotary(x, cos_sin)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, apply_rotary(x.float(), cos_sin).bfloat16())


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_are_their_formulas(kind, bias, eps):
    torch.manual_seed(0)
    module = create_norm(ModelConfig(norm=kind, norm_eps=eps, bias=bias, d_model=12, n_head=1))
    parameters = dict(module.named_parameters())
    assert ("bias" in parameters) == (bias and kind == "layernorm")
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, 12)
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    expected = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt() * parameters["weight"]
    torch.testing.assert_close(module(x), expected + parameters.get("bias", 0))


def gelu(x: float) -> float:
    """GPT-2's: with tanh in the place of the error function, up to 0.0005 away from it."""
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "gelu": lambda up, gate: gelu(up),
    "relu2": lambda up, gate: max(up, 0) ** 2,
    "swiglu": lambda up, gate: up * gate / (1 + math.exp(-gate)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_the_feed_forward_is_its_formula(activation, bias):
    torch.manual_seed(0)
    module = MLP(ModelConfig(d_model=4, n_head=1, d_ff=3, activation=activation, bias=bias))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    weights = module.state_dict()
    assert ("down_proj.bias" in weights) == bias

    def apply(name: str, x: list[float]) -> list[float]:
        matrix = weights[f"{name}.weight"].tolist()
        shift = weights.get(f"{name}.bias", torch.zeros(len(matrix))).tolist()
        return [
            sum(w * v for w, v in zip(row, x, strict=True)) + b
            for row, b in zip(matrix, shift, strict=True)
        ]

    x: Tensor = torch.randn(6, 4)
    for row, found in zip(x.tolist(), module(x).tolist(), strict=True):
        up = apply("up_proj", row)
        gate = apply("gate_proj", row) if activation == "swiglu" else up
        hidden = [FORMULAS[activation](u, g) for u, g in zip(up, gate, strict=True)]
        assert found == pytest.approx(apply("down_proj", hidden), abs=1e-4, rel=1e-5)


def test_slopes_of_alibi_are_those_of_its_authors():
    """By the function in their repository, which BLOOM and MPT repeat."""

    def list_slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return list_slopes(closest) + list_slopes(2 * closest)[0::2][: n - closest]

    for n_head in range(1, 41):
        assert compute_alibi_slopes(n_head).tolist() == pytest.approx(list_slopes(n_head))
