"""How gradients are added: over the micro-batches of a rank, then over the ranks.

`Exact` adds them in one binary tree over all micro-batches of a step. Each rank has a contiguous
stretch of them, a subtree, so that 1, 2, 4 or 8 ranks make the same bits, given micro-batches of
one size and as many threads for each rank. `Fast` adds them in the order in which they come, and
sends them while the backward pass still runs.

Letters: n micro-batches of a rank, W ranks.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmini.distributed.ranks import Ranks
from gptmini.model.optim import orthogonal

EXACT_UP_TO = 8  # ranks, where train.reduce is auto
BUCKET = 25 << 20  # bytes of gradients sent together


class Gradients:
    """A single process: autograd adds each micro-batch's gradients to those before it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def added(self) -> None:
        """Called after the backward pass of each micro-batch."""

    def finish(self) -> None:
        """Make every parameter's gradient that of the whole step, on all ranks."""

    def clip(self, limit: float) -> float:
        """Scale gradients with a larger total norm down to it; returns the norm they had."""
        return nn.utils.clip_grad_norm_(self.parameters, limit).item()


class Exact(Gradients):
    """A binary tree over the step's micro-batches, the same for every number of ranks.

    A tree over n leaves is the sum of two trees over n / 2 each; an odd number of leaves is added
    from left to right, as autograd does.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks, n: int) -> None:
        super().__init__(parameters)
        self.ranks = ranks
        self.odd = odd_part(n)  # micro-batches that autograd adds
        self.made = 0
        self.sums: list[list[Tensor]] = []  # of finished subtrees, from large to small

    def added(self) -> None:
        self.made += 1
        groups, rest = divmod(self.made, self.odd)
        if rest:
            return
        tree = []
        for parameter in self.parameters:
            assert parameter.grad is not None
            tree.append(parameter.grad)
            parameter.grad = None
        while groups % 2 == 0:  # as in counting: each carry joins two subtrees of one size
            left = self.sums.pop()
            torch._foreach_add_(left, tree)
            tree, groups = left, groups // 2
        self.sums.append(tree)

    def finish(self) -> None:
        (tree,), self.sums, self.made = self.sums, [], 0
        for parameter, gradient in zip(self.parameters, self.over_ranks(tree), strict=True):
            parameter.grad = gradient

    def over_ranks(self, tree: list[Tensor]) -> list[Tensor]:
        """The sums of what all ranks have."""
        if self.ranks.size == 1:
            return tree
        flat = torch.cat([gradient.flatten() for gradient in tree])
        return _unflattened(tree_sum(flat, self.ranks), tree)


def odd_part(n: int) -> int:
    """The largest odd divisor."""
    return n // (n & -n)


def tree_sum(flat: Tensor, ranks: Ranks) -> Tensor:
    """The sum of all ranks' vectors, added pairwise: ((0 + 1) + (2 + 3)) + ...; W a power of two.

    Partners exchange halves, then quarters, and so on, and each adds what it keeps; then the parts
    travel back. A rank sends 2 (W - 1) / W of the vector, no more than in a ring (Rabenseifner
    2004).
    """
    padding = -len(flat) % ranks.size
    whole = part = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    splits = []
    bit = 1
    while bit < ranks.size:
        low, high = part.chunk(2)
        kept, given = (high, low) if ranks.rank & bit else (low, high)
        received = torch.empty_like(kept)
        swap(given, received, ranks.rank ^ bit)
        part = kept.add_(received)
        splits.append((kept, given, ranks.rank ^ bit))
        bit *= 2
    for kept, given, partner in reversed(splits):
        swap(kept, given, partner)
    return whole[: len(flat)]


def swap(sent: Tensor, received: Tensor, partner: int) -> None:
    both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _unflattened(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


class Fast(Gradients):
    """An all-reduce of each bucket of gradients, begun as soon as the backward pass has them."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks, n: int) -> None:
        super().__init__(parameters)
        self.n, self.made = n, 0
        self.sent: list[tuple[dist.Work, Tensor, list[nn.Parameter]]] = []
        self.ready: list[nn.Parameter] = []  # of the bucket that is being filled
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: Tensor) -> None:
        if self.made < self.n - 1:
            return
        assert isinstance(parameter, nn.Parameter)
        self.ready.append(parameter)
        if sum(each.nbytes for each in self.ready) >= BUCKET:
            self._send()

    def _send(self) -> None:
        if self.ready:
            flat = torch.cat([each.grad.flatten() for each in self.ready if each.grad is not None])
            work = dist.all_reduce(flat, async_op=True)
            assert work is not None
            self.sent.append((work, flat, self.ready))
            self.ready = []

    def added(self) -> None:
        self.made += 1

    def finish(self) -> None:
        self._send()
        for work, flat, parameters in self.sent:
            work.wait()
            parts = _unflattened(flat, parameters)  # type: ignore[arg-type]
            for parameter, gradient in zip(parameters, parts, strict=True):
                parameter.grad = gradient
        self.sent, self.made = [], 0


def one_by_one(matrices: Tensor) -> Tensor:
    """`orthogonal`, with bits of each matrix (N, R, C) that do not depend on the others.

    In a batch they may: kernels are chosen by the size of the whole batch, and round otherwise for
    a matrix that does not begin at a multiple of 16 bytes, as those after one of an odd size.
    """
    return torch.cat([orthogonal(matrix) for matrix in matrices.contiguous().split(1)])


def turning(reduce: str) -> Callable[[Tensor], Tensor]:
    """How `train.reduce`, once decided, orthogonalizes the matrices that a rank has."""
    return one_by_one if reduce == "exact" else orthogonal


def divided(ranks: Ranks, reduce: str) -> Callable[[Tensor], Tensor]:
    """`orthogonal` for matrices (N, R, C) that all ranks have: each turns its share of them."""
    turn = turning(reduce)
    if ranks.size == 1:
        return turn

    def shared(matrices: Tensor) -> Tensor:
        count, *shape = matrices.shape
        share = -(-count // ranks.size)
        own = matrices[ranks.rank * share :][:share]
        turned = matrices.new_zeros(share, *shape)
        if len(own):
            turned[: len(own)] = turn(own)
        return ranks.gather(turned).flatten(0, 1)[:count]  # (N, R, C)

    return shared
