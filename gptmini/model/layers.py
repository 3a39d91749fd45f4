"""The small parts of a block: norms, dropout, feed-forward, rotary positions.

Letters: B batch, T positions, H heads, D width, K head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.model.kernels import RMSNorm


def create_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last axis."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Dropout(nn.Module):
    """Zeroes each element with probability p, rounded to a multiple of 1/256; scales up the rest.

    One random byte per element decides. On a CPU this is four times as fast as torch's dropout,
    which draws one number per element on one core (16 x 256 x 192 elements: 1.2 ms instead
    of 5.5).
    """

    def __init__(self, p: float | None) -> None:
        super().__init__()
        self.drop_threshold = round(256 * (p or 0))  # byte values out of 256

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_threshold == 0:
            return x
        words = torch.randint(-(2**63), 2**63 - 1, ((x.numel() + 7) // 8,), device=x.device)
        kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.drop_threshold
        return x * kept.to(x.dtype) * (256 / (256 - self.drop_threshold))  # faster than masked_fill


class MLP(nn.Module):
    """Feed-forward (B, T, D) -> (B, T, D), applied to each position by itself.

    gelu: GPT-2's tanh form (Hendrycks and Gimpel 2016); relu2: squared ReLU (So et al. 2021);
    swiglu: a linear branch gated by SiLU (Shazeer 2020).
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
            hidden = F.relu(hidden).square()
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return self.down_proj(hidden)  # (B, T, D)


class Rotary(nn.Module):
    """Cosines and sines of the angles position · theta^(-2i/K) (Su et al. 2021)."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        frequencies = scaled(config.rope_theta**-exponents, config.rope_scaling)  # (K/2,)
        angles = torch.arange(config.context_length)[:, None] * frequencies  # (context, K/2)
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        self.register_buffer("sines", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (T,) -> two tensors (T, K/2); positions (B, T) -> two (B, 1, T, K/2)."""
        cosines, sines = self.cosines[positions], self.sines[positions]
        return (cosines, sines) if positions.ndim == 1 else (cosines[:, None], sines[:, None])


def scaled(frequencies: Tensor, scaling: list[float] | None) -> Tensor:
    """Frequencies (K/2,) slowed down as in Llama 3.1, or as they are without `scaling`.

    `scaling` is (factor, low, high, context). What turns at most `low` times in the old context is
    divided by the factor, what turns at least `high` times stays, and between them it is mixed.
    """
    if scaling is None:
        return frequencies
    factor, low, high, context = scaling
    turns = context * frequencies / (2 * torch.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def apply_rotary(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + K/2) of x (B, H, T, K) by angle i of its position, in float32.

    A rotated query and key then have a dot product that depends on their distance alone.
    """
    cosines, sines = rotation
    first, second = x.float().chunk(2, dim=-1)  # (B, H, T, K/2) each
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, dim=-1).type_as(x)  # (B, H, T, K)
