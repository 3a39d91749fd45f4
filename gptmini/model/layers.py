"""The small parts of a block: norms, feed-forward, rotary positions, slopes of ALiBi.

Letters: B batch, T positions, H heads, D width, K head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.model.kernels import RMSNorm, square_relu


def create_norm(config: ModelConfig) -> nn.Module:
    """Create a LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) of width D."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class MLP(nn.Module):
    """Feed-forward network (B, T, D) -> (B, T, D), applied to each position by itself.

    | activation | formula                                                          |
    |------------|------------------------------------------------------------------|
    | gelu       | GELU in GPT-2's tanh form (Hendrycks and Gimpel 2016)            |
    | relu2      | squared ReLU (So et al. 2021)                                    |
    | swiglu     | a linear branch times the SiLU of a gate branch (Shazeer 2020)   |
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(config.d_model, config.d_ff, config.bias)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, config.bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up_proj(x)  # (B, T, d_ff)
        if self.activation == "swiglu":
            hidden = F.silu(self.gate_proj(x)) * hidden
        elif self.activation == "relu2":
            hidden = square_relu(hidden)  # relu(x)²
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return self.down_proj(hidden)  # (B, T, D)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021): cos and sin of position · theta^(-2i/K)."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequencies = compute_frequencies(config)  # (K/2,)
        angles = torch.arange(config.context_length)[:, None] * frequencies  # (context, K/2)
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        self.register_buffer("sines", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up positions (T,) -> a pair of (T, K/2), or (B, T) -> a pair of (B, 1, T, K/2)."""
        cosines = self.cosines[positions]
        sines = self.sines[positions]
        if positions.ndim == 2:  # rows with positions of their own, the same for all heads
            return cosines[:, None], sines[:, None]
        return cosines, sines


def compute_frequencies(config: ModelConfig) -> Tensor:
    """Compute the angles (K/2,), in radians per position, by which RoPE turns the pairs."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents  # from 1 down to almost 1 / theta
    if config.rope_scaling is not None:
        frequencies = scale_frequencies(frequencies, config.rope_scaling)
    return frequencies


def scale_frequencies(frequencies: Tensor, scaling: list[float]) -> Tensor:
    """Scale RoPE frequencies (K/2,) for a longer context, as Llama 3.1 does.

    `scaling` is (factor, low_freq_factor, high_freq_factor, original context length). Frequencies
    with at most low_freq_factor periods in the original context are divided by factor; those with
    at least high_freq_factor are kept; in between, interpolate.
    """
    factor, low, high, context = scaling
    periods = context * frequencies / (2 * torch.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)  # 0: divide, 1: keep
    return frequencies * (kept + (1 - kept) / factor)


def apply_rotary(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + K/2) of x (B, H, T, K) by angle i of its position, in float32.

    The dot product of a rotated query and a rotated key depends on their distance alone.
    """
    cosines, sines = cos_sin
    first, second = x.float().chunk(2, dim=-1)  # (B, H, T, K/2) each
    rotated_first = first * cosines - second * sines
    rotated_second = second * cosines + first * sines
    return torch.cat([rotated_first, rotated_second], dim=-1).type_as(x)  # (B, H, T, K)


def compute_alibi_slopes(n_head: int) -> Tensor:
    """Compute the slopes (H,) of ALiBi (Press et al. 2022): how much each head minds distance.

    For P heads, a power of two, they are 2^(-8/P), 2^(-16/P), ..., 2^-8. Beyond the largest power
    of two, heads take every other slope of the next one: 2^(-4/P), 2^(-12/P), ...
    """
    P = 2 ** (n_head.bit_length() - 1)
    exponents = [8 * n / P for n in range(1, P + 1)]
    exponents += [4 * n / P for n in range(1, 2 * (n_head - P), 2)]
    return torch.tensor([2**-exponent for exponent in exponents])
