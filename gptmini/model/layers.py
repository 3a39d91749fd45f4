"""The small parts of a block: norms, feed-forwards, rotary positions.

Letters: B batch, T positions, H heads, D width, K head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig


def norm(config: ModelConfig) -> nn.Module:
    """The norm of a configuration over the last axis (Ba et al. 2016; Zhang and Sennrich 2019)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Dropout(nn.Module):
    """Each element is zero with probability p, a multiple of 1/256, and scaled up otherwise.

    One random byte decides over an element: four times as fast on a CPU as torch's, which draws a
    number each on one core (16 x 256 x 192 elements: 1.2 ms for 5.5).
    """

    def __init__(self, p: float | None) -> None:
        super().__init__()
        self.dropped = round(256 * (p or 0))

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of any shape -> one of the same."""
        if not self.training or self.dropped == 0:
            return x
        words = torch.randint(-(2**63), 2**63 - 1, ((x.numel() + 7) // 8,), device=x.device)
        chances = words.view(torch.uint8)[: x.numel()].view(x.shape)
        return x.masked_fill(chances < self.dropped, 0.0) * (256 / (256 - self.dropped))


class MLP(nn.Module):
    """Feed-forward (B, T, D) -> (B, T, D), each position by itself.

    gelu: GPT-2's tanh form (Hendrycks and Gimpel 2016); relu2: the square of the positive part
    (So et al. 2021); swiglu: a gate through SiLU times a linear branch (Shazeer 2020).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(config.d_model, config.d_ff, config.bias)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, config.bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        inner = self.up_proj(x)
        if self.activation == "swiglu":
            inner = F.silu(self.gate_proj(x)) * inner
        elif self.activation == "relu2":
            inner = F.relu(inner).square()
        else:
            inner = F.gelu(inner, approximate="tanh")
        return self.down_proj(inner)


class Rotary(nn.Module):
    """Cosines and sines of the angles position · theta^(-2i/K) (Su et al. 2021)."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        frequencies = config.rope_theta**-pairs
        angles = torch.arange(config.context_length)[:, None] * frequencies
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        self.register_buffer("sines", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions (T,) as (T, K/2), of (B, T) as (B, 1, T, K/2)."""
        cosines, sines = self.cosines[positions], self.sines[positions]
        return (cosines, sines) if positions.ndim == 1 else (cosines[:, None], sines[:, None])


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + K/2) of x (B, H, T, K) by its position's angle; computed in float32.

    Scores of rotated queries and keys depend on their distance only.
    """
    cosines, sines = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1).type_as(x)
