import cmath

import pytest
import torch

from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError
from gptmini.model.layers import Rotary, apply_rotary


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


def test_apply_rotary_keeps_the_type_and_computes_in_float32():
    config = ModelConfig(head_dim=8, n_head=1, d_model=8, context_length=512)
    x, cos_sin = torch.randn(1, 1, 512, 8).bfloat16(), Rotary(config)(torch.arange(512))
    found = apply_rotary(x, cos_sin)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, apply_rotary(x.float(), cos_sin).bfloat16())
