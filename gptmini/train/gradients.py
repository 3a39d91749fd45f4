"""Adds the gradients of a step's micro-batches, and clips them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Gradients:
    """Autograd adds each micro-batch's gradients to those before it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [each for each in parameters if each.requires_grad]

    def after_backward(self) -> None:
        """Add the gradients of a micro-batch; called after its backward pass."""

    def finish(self) -> None:
        """Make every parameter's gradient that of the whole step."""

    def unscale(self, loss_scale: float) -> None:
        """Divide the gradients of a loss that was multiplied by a power of two, without rounding.

        Called before `clip`, which needs their true norm.
        """
        if loss_scale != 1:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1 / loss_scale)

    def clip(self, limit: float) -> Tensor:
        """Scale gradients with a larger total norm down to it; returns the norm they had, ()."""
        return nn.utils.clip_grad_norm_(self.parameters, limit)
