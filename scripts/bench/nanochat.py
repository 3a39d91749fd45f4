"""nanochat's model and optimizer, rebuilt from its published facts for learning.py.

As of July 2026, for small models on a CPU in float32: the window pattern, fp8 and padding of the
vocabulary are left out, and rates are not scaled by the size of the batch, whose reference is a
cluster's.

Letters: B rows, T positions, D width, H heads, K head size, V vocabulary, L layers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGIT_CAP = 15.0
QK_SCALE = 1.2  # of queries and of keys, after their norm
ROPE_THETA = 100_000.0
GATE_CHANNELS = 12  # of the stream, that open the gates of value embeddings
SMEAR_CHANNELS = 24
WARMUP_STEPS = 10  # 40 there, of many thousands
COOLDOWN_SHARE = 0.65
FINAL_SHARE = 0.05  # of the learning rate
MOMENTUM_STEPS = 400  # until Muon's momentum has risen from the first to the second of these
MOMENTA = (0.85, 0.97, 0.90)  # at the beginning, on the plateau, at the end
# Of matrices; fades to 0 along a cosine. The published 0.28 is for a model of 12 layers, and is
# scaled there by the lengths of trainings that are thousands of times as long as these.
WEIGHT_DECAY = 0.2
# Amsel et al. 2025, for five iterations.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def normalize(x: Tensor) -> Tensor:
    """RMSNorm without weights."""
    return F.rms_norm(x, x.shape[-1:])


class NanochatBlock(nn.Module):
    """Attention with rotated and normed queries and keys, then an MLP with squared ReLU."""

    def __init__(self, width: int, heads: int, has_values: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.gate: nn.Linear | None = None
        if has_values:
            self.gate = nn.Linear(GATE_CHANNELS, heads, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, values: Tensor | None) -> Tensor:
        """(B, T, D) -> (B, T, D); `values` (B, T, D) are embeddings that join the values."""
        x = x + self.attend(normalize(x), cos, sin, values)
        return x + self.down(F.relu(self.up(normalize(x))).square())

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, values: Tensor | None) -> Tensor:
        B, T, D = x.shape
        q, k, v = (matrix(x).view(B, T, self.heads, -1) for matrix in (self.q, self.k, self.v))
        if values is not None and self.gate is not None:
            gate = 3 * torch.sigmoid(self.gate(x[..., :GATE_CHANNELS]))  # (B, T, H)
            v = v + gate[..., None] * values.view(B, T, self.heads, -1)
        q = QK_SCALE * normalize(rotate(q, cos, sin))
        k = QK_SCALE * normalize(rotate(k, cos, sin))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, K)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, D))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head (B, T, H, K) against each other by position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos + right * sin, right * cos - left * sin], dim=-1)


class Nanochat(nn.Module):
    """The model: tokens (B, T) -> logits (B, T, V)."""

    cos: Tensor  # (T, 1, K / 2), of the angle of each position and pair
    sin: Tensor

    def __init__(self, vocabulary: int, layers: int, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        # Every second layer has value embeddings, the last one always.
        self.has_values = [n % 2 == (layers - 1) % 2 for n in range(layers)]
        self.blocks = nn.ModuleList(NanochatBlock(width, heads, has) for has in self.has_values)
        self.values = nn.ModuleDict(
            {str(n): nn.Embedding(vocabulary, width) for n in range(layers) if self.has_values[n]}
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        depth = torch.arange(layers) / max(1, layers - 1)
        self.stream_scales = nn.Parameter(1.15 - 0.10 * depth)
        self.embed_scales = nn.Parameter(0.20 - 0.15 * depth)
        self.smear_gate = nn.Linear(SMEAR_CHANNELS, 1, bias=False)
        self.smear_scale = nn.Parameter(torch.zeros(1))
        self.backout_scale = nn.Parameter(torch.full((1,), 0.2))
        size = width // heads
        frequencies = ROPE_THETA ** -(torch.arange(0, size, 2) / size)  # (K / 2,)
        angles = torch.outer(torch.arange(length), frequencies)  # (T, K / 2)
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])
        self.init_weights(width)

    @torch.no_grad()
    def init_weights(self, width: int) -> None:
        """Draw the weights; projections back into the stream begin at 0."""
        bound = math.sqrt(3 / width)  # a uniform distribution of standard deviation 1 / √D
        nn.init.normal_(self.embed.weight, std=0.8)
        nn.init.normal_(self.head.weight, std=0.001)
        nn.init.uniform_(self.smear_gate.weight, 0, 0.02)
        for table in self.values.parameters():
            nn.init.uniform_(table, -bound, bound)
        for block in self.blocks:
            assert isinstance(block, NanochatBlock)
            for matrix in (block.q, block.k, block.v):
                nn.init.uniform_(matrix.weight, -bound, bound)
            nn.init.uniform_(block.up.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.down.weight)
            if block.gate is not None:
                nn.init.uniform_(block.gate.weight, 0, 0.02)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward_hidden(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> the normed output of the last block (B, T, D)."""
        T = tokens.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        x = normalize(self.embed(tokens))  # (B, T, D)
        gate = self.smear_scale * torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR_CHANNELS]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)  # (B, T, D)
        first = x
        middle = x
        for n, block in enumerate(self.blocks):
            x = self.stream_scales[n] * x + self.embed_scales[n] * first
            values = self.values[str(n)](tokens) if self.has_values[n] else None
            x = block(x, cos, sin, values)
            if n == len(self.blocks) // 2:
                middle = x
        return normalize(x - self.backout_scale * middle)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden (..., D) -> logits (..., V)."""
        return LOGIT_CAP * torch.tanh(self.head(hidden).float() / LOGIT_CAP)


class NanochatOptimizer:
    """Muon for the matrices of the blocks, AdamW with rates of its own for every other role."""

    def __init__(self, model: Nanochat, steps: int) -> None:
        self.steps = steps
        scale = math.sqrt(768 / model.embed.weight.shape[1])
        fast = {"eps": 1e-10, "fused": True}
        embed = {"lr": 0.3 * scale, "betas": (0.8, 0.995), "weight_decay": 0.001}
        head = {"lr": 0.008 * scale, "betas": (0.8, 0.96), "weight_decay": 0.01}
        values = {"lr": 0.15 * scale, "betas": (0.8, 0.995), "weight_decay": 0.01}
        smear = [model.smear_gate.weight, model.smear_scale, model.backout_scale]
        plain = {"betas": (0.8, 0.95), "weight_decay": 0.0}
        groups = [
            {"params": [model.embed.weight], **embed},
            {"params": [model.head.weight], **head},
            {"params": list(model.values.parameters()), **values},
            {"params": [model.stream_scales], **plain, "lr": 0.005, "weight_decay": 0.05},
            {"params": [model.embed_scales], **plain, "lr": 0.5, "betas": (0.96, 0.95)},
            {"params": smear, **plain, "lr": 0.2},
        ]
        self.adamw = torch.optim.AdamW(groups, **fast)  # type: ignore[arg-type]
        self.rates = [group["lr"] for group in self.adamw.param_groups]
        self.matrices: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in model.blocks.parameters():
            self.matrices.setdefault(tuple(matrix.shape), []).append(matrix)
        self.momenta = {
            shape: torch.zeros(len(matrices), *shape) for shape, matrices in self.matrices.items()
        }
        self.squares: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update the weights and clear the gradients."""
        share = self.get_rate_share(step)
        for group, rate in zip(self.adamw.param_groups, self.rates, strict=True):
            group["lr"] = share * rate
        self.adamw.step()
        decay = WEIGHT_DECAY * (1 + math.cos(math.pi * step / self.steps)) / 2
        momentum = self.get_momentum(step)
        for shape, matrices in self.matrices.items():
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            updates = self.compute_updates(shape, gradients, momentum)  # (N, rows, columns)
            rows, columns = shape
            lr = 0.02 * share * max(1, rows / columns) ** 0.5
            for matrix, update in zip(matrices, updates, strict=True):
                # Weights shrink only where the update shrinks them as well.
                shrinks = update * matrix >= 0
                matrix.sub_(lr * update + lr * decay * matrix * shrinks)
        self.adamw.zero_grad()
        for matrices in self.matrices.values():
            for matrix in matrices:
                matrix.grad = None

    def compute_updates(self, shape: tuple[int, ...], gradients: Tensor, momentum: float) -> Tensor:
        """Orthogonalize the Nesterov momenta of matrices of one shape (N, rows, columns)."""
        mean = self.momenta[shape].lerp_(gradients, 1 - momentum)
        x = gradients.lerp(mean, momentum)
        # Rows of equal length (MuonEq).
        whole = x.norm(dim=(1, 2), keepdim=True) / shape[0] ** 0.5
        x = x * whole / x.norm(dim=2, keepdim=True).clamp_min(1e-6)
        x = polar_express(x)
        # The length that an orthogonal matrix has (Muon+).
        x = x * min(shape) ** 0.5 / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-6)
        # A second moment for each row, or column if they are the longer side (NorMuon).
        axis = 2 if shape[0] >= shape[1] else 1
        square = x.square().mean(dim=axis, keepdim=True)
        mean_square = self.squares.setdefault(shape, torch.zeros_like(square))
        mean_square.lerp_(square, 0.1)
        scale = mean_square.clamp_min(1e-10).rsqrt()
        before = square.sum(dim=(1, 2), keepdim=True).sqrt()
        after = (square * scale.square()).sum(dim=(1, 2), keepdim=True).sqrt()
        return x * scale * (before / after.clamp_min(1e-10))

    def get_rate_share(self, step: int) -> float:
        """Rise, plateau, fall to a twentieth."""
        cooldown = round(COOLDOWN_SHARE * self.steps)
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        if step <= self.steps - cooldown:
            return 1.0
        left = (self.steps - step) / cooldown
        return left + (1 - left) * FINAL_SHARE

    def get_momentum(self, step: int) -> float:
        first, plateau, last = MOMENTA
        cooldown = round(COOLDOWN_SHARE * self.steps)
        if step < MOMENTUM_STEPS:
            share = step / MOMENTUM_STEPS
            return (1 - share) * first + share * plateau
        done = max(0.0, (step - (self.steps - cooldown)) / cooldown)
        return (1 - done) * plateau + done * last


def polar_express(x: Tensor) -> Tensor:
    """Make matrices (N, rows, columns) nearly orthogonal (Amsel et al. 2025)."""
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (1.01 * x.norm(dim=(1, 2), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
