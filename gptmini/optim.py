"""Learning rates as functions of the step, and AdamW by the role of each parameter."""

import math

import torch
from torch import Tensor, nn

from gptmini.config import TrainConfig

QUANTITIES = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step: a linear rise, a plateau at lr, a cool-down towards min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    cooldown = min(round(config.cooldown * config.steps), config.steps - config.warmup_steps)
    left = config.steps - step
    if left > cooldown:
        return config.lr
    share = left / cooldown
    if config.schedule == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return config.min_lr + (config.lr - config.min_lr) * share


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); only the matrices of linear layers decay."""
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    parameters = list(model.parameters())
    groups = [
        {
            "params": [p for p in parameters if id(p) in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), fused=True)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as `parameter/quantity`; torch's own positions can be mixed up."""
    return {
        f"{name}/{quantity}": value
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state[parameter].items()
    }


def state_like(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the names and shapes that `named_state` gives once an update was made."""
    return {
        f"{name}/{quantity}": torch.zeros(()) if quantity == "step" else parameter
        for name, parameter in model.named_parameters()
        for quantity in QUANTITIES
    }


def restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `named_state` gave."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = {
        position: {quantity: tensors[f"{name}/{quantity}"] for quantity in QUANTITIES}
        for position, name in enumerate(order)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
