"""Adds gradients over ranks that each hold the whole model, exactly or as they come.

`ExactSums` continues the binary tree of `ExactGradients` over the ranks. Each has a contiguous
block of the step's micro-batches, which is a subtree, so that 1, 2, 4 or 8 ranks make the same
bits, given micro-batches of one size and as many threads for each rank. `FastGradients` adds them
in the order in which they come.

Letters: n micro-batches of a rank, W ranks; N matrices, R rows, C columns.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmini.extras.parallel.ranks import Ranks
from gptmini.model.optim import Orthogonalize
from gptmini.train.gradients import ExactGradients, Gradients

BUCKET_BYTES = 25 << 20  # of gradients that are sent together, as in torch's DDP


class ExactSums(ExactGradients):
    """A binary tree over the micro-batches of all ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter], n: int, ranks: Ranks) -> None:
        super().__init__(parameters, n)
        self.ranks = ranks

    def reduce(self, tree: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([gradient.flatten() for gradient in tree])
        return unflatten(all_reduce_tree(flat, self.ranks), tree)


def all_reduce_tree(flat: Tensor, ranks: Ranks) -> Tensor:
    """Add all ranks' vectors pairwise, in place: ((0 + 1) + (2 + 3)) + ...; W is a power of two.

    gloo's and NCCL's all-reduce add in an order that depends on W and on the size, so the sum is
    made here. Partners exchange halves, then quarters, and so on, and each adds what it keeps; then
    the parts travel back. A rank sends 2 (W - 1) / W of the vector, no more than in a ring
    (Rabenseifner 2004).
    """
    part = flat
    splits = []
    bit = 1
    while bit < ranks.world_size:
        partner = ranks.rank ^ bit
        low, high = part.chunk(2)
        kept, sent = (high, low) if ranks.rank & bit else (low, high)
        received = torch.empty_like(kept)
        swap(sent, received, partner)
        # In place, in a view of `flat`. A sum of two has the same bits in either order.
        part = kept.add_(received)
        splits.append((kept, sent, partner))
        bit *= 2
    for kept, sent, partner in reversed(splits):
        swap(kept, sent, partner)
    return flat


def swap(sent: Tensor, received: Tensor, partner: int) -> None:
    """Send a tensor to a rank and receive one of its shape from it."""
    # In one batch: two ranks that both send first would wait for each other.
    both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


class FastGradients(Gradients):
    """An all-reduce of each bucket of gradients, begun as soon as the backward pass has them.

    So does torch's DDP, but it makes its buckets anew after the first step, so that a run which is
    resumed adds in another order: with four ranks it has other bits than one that never stopped.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], n: int) -> None:
        super().__init__(parameters)
        self.n = n
        self.micro_batches_done = 0
        self.sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        self.bucket: list[Tensor] = []  # gradients that are not sent yet
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: Tensor) -> None:
        """Send a gradient, in its bucket, once the last micro-batch has been added to it."""
        if self.micro_batches_done < self.n - 1:
            return
        assert parameter.grad is not None
        self.bucket.append(parameter.grad)
        if sum(gradient.nbytes for gradient in self.bucket) >= BUCKET_BYTES:
            self._send()

    def _send(self) -> None:
        if self.bucket:
            flat = torch.cat([gradient.flatten() for gradient in self.bucket])
            work = dist.all_reduce(flat, async_op=True)
            assert work is not None
            self.sent.append((work, flat, self.bucket))
            self.bucket = []

    def after_backward(self) -> None:
        self.micro_batches_done += 1

    def finish(self) -> None:
        self._send()
        for work, flat, gradients in self.sent:
            work.wait()
            torch._foreach_copy_(gradients, unflatten(flat, gradients))
        self.sent = []
        self.micro_batches_done = 0


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Cut a vector into tensors of the shapes of others."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def share_orthogonalize(compute: Orthogonalize, ranks: Ranks) -> Orthogonalize:
    """Return `compute` for matrices that all ranks have: each computes its share of them."""

    def orthogonalize_share(matrices: Tensor) -> Tensor:
        count, *shape = matrices.shape
        share_size = -(-count // ranks.world_size)
        share = matrices[ranks.rank * share_size :][:share_size]  # the last ranks may have fewer
        result = matrices.new_zeros(share_size, *shape)
        if len(share):
            result[: len(share)] = compute(share)
        return ranks.all_gather(result).flatten(0, 1)[:count]  # (N, R, C)

    return orthogonalize_share
