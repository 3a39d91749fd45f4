"""Learning rates as functions of the step, and the optimizers by the role of each parameter."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gptmini.config.settings import TrainConfig
from gptmini.model.gpt import GPT


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step: a linear rise, a plateau at lr, a cool-down towards min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    cooldown = cooldown_steps(config)
    left = config.steps - step
    if left > cooldown:
        return config.lr
    share = left / cooldown
    if config.schedule == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return config.min_lr + (config.lr - config.min_lr) * share


def cooldown_steps(config: TrainConfig) -> int:
    """How many steps at the end make the cool-down."""
    return min(round(config.cooldown * config.steps), config.steps - config.warmup_steps)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, so that no direction of a matrix is learnt faster than another.

    As torch.optim.Muon (Jordan et al. 2024), but matrices of one shape are turned at once, which
    takes half the time for small ones (24 matrices of width 256: 15 ms for 30 on two cores), and in
    `dtype`, since not every processor is fast at bfloat16.
    """

    def __init__(self, matrices: list[Tensor], weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay, "momentum": 0.95})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices by their gradients."""
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[Tensor]] = {}
            for matrix in group["params"]:
                alike.setdefault((min(matrix.shape), max(matrix.shape)), []).append(matrix)
            for matrices in alike.values():
                turned = orthogonal(torch.stack([self._momentum(m, group) for m in matrices]))
                for matrix, update in zip(matrices, turned, strict=True):
                    rows, columns = matrix.shape
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(
                        update.T if rows > columns else update,
                        alpha=-group["lr"] * max(1, rows / columns) ** 0.5,
                    )

    def _momentum(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient led on by the mean of those before (Nesterov), wider than it is tall."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        mean = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
        led = matrix.grad.lerp(mean, group["momentum"]).to(self.dtype)
        return led.T if led.shape[0] > led.shape[1] else led


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (N, R, C), R <= C, with all singular values brought near 1.

    Five steps of a Newton-Schulz iteration whose coefficients grow small values fastest; they end
    between 0.7 and 1.2, not at 1 (Jordan et al. 2024).
    """
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


# What each optimizer keeps for a parameter.
QUANTITIES = {torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"), Muon: ("momentum",)}


class Optimizer:
    """What turns gradients into updates: AdamW, or Muon for the matrices in the blocks beside it.

    AdamW (Loshchilov and Hutter 2019) is for embeddings, norms, biases and the head. Only matrices
    of linear layers decay. `dtype` is that of matrix products.
    """

    def __init__(self, model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32) -> None:
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }
        linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
        turned = linear & set(model.blocks.parameters()) if config.optimizer == "muon" else set()
        decaying = [p for p in self.names if p in linear - turned]
        constant = [p for p in self.names if p not in linear]
        groups = [
            {"params": decaying, "weight_decay": config.weight_decay},
            {"params": constant, "weight_decay": 0.0},
        ]
        beta1, beta2 = config.betas
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=(beta1, beta2), fused=True
        )
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [(adamw, 1.0)]
        if turned:
            matrices = [p for p in self.names if p in turned]
            muon = Muon(matrices, config.weight_decay, dtype)
            self.parts.append((muon, config.muon_lr / config.lr))

    def step(self, rate: float) -> None:
        """Update the weights at a rate of AdamW, Muon's in proportion, and clear the gradients."""
        for part, scale in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * scale
            part.step()
            part.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """All tensors as `parameter/quantity`: torch's own positions can be mixed up."""
        return {
            f"{self.names[parameter]}/{quantity}": value
            for part, _ in self.parts
            for parameter, quantities in part.state.items()
            for quantity, value in quantities.items()
        }

    def state_like(self) -> dict[str, Tensor]:
        """Tensors of the names and shapes that `state` gives once an update was made."""
        return {
            f"{self.names[parameter]}/{quantity}": torch.zeros(())
            if quantity == "step"
            else parameter
            for part, _ in self.parts
            for parameter in _parameters(part)
            for quantity in QUANTITIES[type(part)]
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        for part, _ in self.parts:
            state = {
                position: {
                    quantity: tensors[f"{self.names[parameter]}/{quantity}"]
                    for quantity in QUANTITIES[type(part)]
                }
                for position, parameter in enumerate(_parameters(part))
            }
            groups = part.state_dict()["param_groups"]
            part.load_state_dict({"state": state, "param_groups": groups})


def _parameters(part: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of one of torch's optimizers, in its order."""
    return [parameter for group in part.param_groups for parameter in group["params"]]
