"""Adds gradients: over the micro-batches of a rank, then over the ranks.

`ExactGradients` adds them in one binary tree over all micro-batches of a step. Each rank has a
contiguous block of them, which is a subtree, so that 1, 2, 4 or 8 ranks make the same bits, given
micro-batches of one size and as many threads for each rank. `FastGradients` adds them in the order
in which they come, and sends them while the backward pass still runs.

Letters: n micro-batches of a rank, W ranks; N matrices, R rows, C columns.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmini.distributed.group import Group
from gptmini.model.optim import orthogonalize

MAX_EXACT_WORLD_SIZE = 8  # up to which train.reduce=auto is exact
BUCKET_BYTES = 25 << 20  # of gradients that are sent together, as in torch's DDP

Orthogonalize = Callable[[Tensor], Tensor]  # (N, R, C) -> (N, R, C)


class Gradients:
    """A single process: autograd adds each micro-batch's gradients to those before it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def after_backward(self) -> None:
        """Add the gradients of a micro-batch; called after its backward pass."""

    def finish(self) -> None:
        """Make every parameter's gradient that of the whole step, on all ranks."""

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
    """A binary tree over the step's micro-batches, the same for every number of ranks.

    A tree over n leaves is the sum of two trees over n / 2 each; an odd number of leaves is added
    from left to right, as autograd does. Floating-point sums depend on their order, so the order
    must not depend on how many ranks share the work.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group, n: int) -> None:
        super().__init__(parameters)
        self.group = group
        self.run_length = get_odd_part(n)  # micro-batches that autograd adds
        self.micro_batches_done = 0
        self.sums: list[list[Tensor]] = []  # of finished subtrees, from large to small

    def after_backward(self) -> None:
        self.micro_batches_done += 1
        groups, rest = divmod(self.micro_batches_done, self.run_length)
        if rest:
            return
        tree = []
        for parameter in self.parameters:
            assert parameter.grad is not None
            tree.append(parameter.grad)
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
        gradients = self.reduce_over_ranks(tree)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def reduce_over_ranks(self, tree: list[Tensor]) -> list[Tensor]:
        """Return the sums of the gradients of all ranks."""
        if self.group.world_size == 1:
            return tree
        flat = torch.cat([gradient.flatten() for gradient in tree])
        return _unflatten(all_reduce_tree(flat, self.group), tree)


def get_odd_part(number: int) -> int:
    """Return the largest odd divisor."""
    return number // (number & -number)


def list_micro_batches(n: int, group: Group) -> list[int]:
    """Return this rank's share of the n · W micro-batches of a step: a contiguous block."""
    return list(range(group.rank * n, (group.rank + 1) * n))


def all_reduce_tree(flat: Tensor, group: Group) -> Tensor:
    """Add all ranks' vectors pairwise: ((0 + 1) + (2 + 3)) + ...; W is a power of two.

    gloo's and NCCL's all-reduce add in an order that depends on W and on the size, so the sum is
    made here. Partners exchange halves, then quarters, and so on, and each adds what it keeps; then
    the parts travel back. A rank sends 2 (W - 1) / W of the vector, no more than in a ring
    (Rabenseifner 2004).
    """
    padding = -len(flat) % group.world_size
    whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    part = whole
    splits = []
    bit = 1
    while bit < group.world_size:
        partner = group.rank ^ bit
        low, high = part.chunk(2)
        kept, sent = (high, low) if group.rank & bit else (low, high)
        received = torch.empty_like(kept)
        swap(sent, received, partner)
        # In place, in a view of `whole`. A sum of two has the same bits in either order.
        part = kept.add_(received)
        splits.append((kept, sent, partner))
        bit *= 2
    for kept, sent, partner in reversed(splits):
        swap(kept, sent, partner)
    return whole[: len(flat)]


def swap(sent: Tensor, received: Tensor, partner: int) -> None:
    """Send a tensor to a rank and receive one of its shape from it."""
    # In one batch: two ranks that both send first would wait for each other.
    both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Cut a vector into tensors of the shapes of others."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


class FastGradients(Gradients):
    """An all-reduce of each bucket of gradients, begun as soon as the backward pass has them.

    The buckets of all ranks are alike, as autograd visits the parameters of one model in one order.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group, n: int) -> None:
        super().__init__(parameters)
        self.n = n
        self.micro_batches_done = 0
        self.sent: list[tuple[dist.Work, Tensor, list[nn.Parameter]]] = []
        self.bucket: list[nn.Parameter] = []  # with gradients that are not sent yet
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: Tensor) -> None:
        """Send a gradient, in its bucket, once the last micro-batch has been added to it."""
        if self.micro_batches_done < self.n - 1:
            return
        assert isinstance(parameter, nn.Parameter)
        self.bucket.append(parameter)
        if sum(each.nbytes for each in self.bucket) >= BUCKET_BYTES:
            self._send()

    def _send(self) -> None:
        if self.bucket:
            gradients = [each.grad.flatten() for each in self.bucket if each.grad is not None]
            flat = torch.cat(gradients)
            work = dist.all_reduce(flat, async_op=True)
            assert work is not None
            self.sent.append((work, flat, self.bucket))
            self.bucket = []

    def after_backward(self) -> None:
        self.micro_batches_done += 1

    def finish(self) -> None:
        self._send()
        for work, flat, parameters in self.sent:
            work.wait()
            gradients = _unflatten(flat, parameters)  # type: ignore[arg-type]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        self.sent = []
        self.micro_batches_done = 0


def orthogonalize_one_by_one(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices (N, R, C), each with bits that do not depend on the others.

    In a batch they may: kernels are chosen by the size of the whole batch, and round otherwise for
    a matrix that does not begin at a multiple of 16 bytes, as those after one of an odd size.
    """
    return torch.cat([orthogonalize(matrix) for matrix in matrices.contiguous().split(1)])


def make_orthogonalize(group: Group, reduce: str) -> Orthogonalize:
    """Return `orthogonalize` for matrices that all ranks have: each computes its share of them."""
    compute = orthogonalize_one_by_one if reduce == "exact" else orthogonalize
    if group.world_size == 1:
        return compute

    def orthogonalize_share(matrices: Tensor) -> Tensor:
        count, *shape = matrices.shape
        share_size = -(-count // group.world_size)
        share = matrices[group.rank * share_size :][:share_size]  # the last ranks may have fewer
        result = matrices.new_zeros(share_size, *shape)
        if len(share):
            result[: len(share)] = compute(share)
        return group.all_gather(result).flatten(0, 1)[:count]  # (N, R, C)

    return orthogonalize_share
