"""Adds the gradients of a step's micro-batches, by autograd or in one tree, and clips them."""

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


class ExactGradients(Gradients):
    """A binary tree over the step's n micro-batches, whose bits hang on nothing else.

    A tree over n leaves is the sum of two trees over n / 2 each; an odd number of leaves is added
    from left to right, as autograd does. Floating-point sums depend on their order, so the order
    must not depend on how many processes share the work: each takes a subtree.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], n: int) -> None:
        super().__init__(parameters)
        self.run_length = n // (n & -n)  # the odd part of n: micro-batches that autograd adds
        self.micro_batches_done = 0
        self.sums: list[list[Tensor]] = []  # of finished subtrees, from large to small

    def after_backward(self) -> None:
        self.micro_batches_done += 1
        groups, rest = divmod(self.micro_batches_done, self.run_length)
        if rest:
            return
        tree = []
        for parameter in self.parameters:
            # A model of your own may leave one unused.
            gradient = parameter.grad
            tree.append(torch.zeros_like(parameter) if gradient is None else gradient)
            parameter.grad = None
        # As in binary counting: each carry joins two subtrees of one size.
        while groups % 2 == 0:
            left = self.sums.pop()
            torch._foreach_add_(left, tree)
            tree = left
            groups //= 2
        self.sums.append(tree)

    def finish(self) -> None:
        (tree,) = self.sums  # n is the odd part times a power of two, so one tree is left
        self.sums = []
        self.micro_batches_done = 0
        for parameter, gradient in zip(self.parameters, self.reduce(tree), strict=True):
            parameter.grad = gradient

    def reduce(self, tree: list[Tensor]) -> list[Tensor]:
        """Return the sums over all processes."""
        return tree
