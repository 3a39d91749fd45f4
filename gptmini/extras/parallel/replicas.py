"""How processes share a batch, the gradients of its rows, and the matrices that Muon updates.

With `train.reduce: exact` 1, 2, 4 or 8 of them make the same bits, given micro-batches of one size
and as many threads for each; then a single one needs this, too.

Letters: n micro-batches of a rank, W ranks; N matrices, R rows, C columns.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmini.config.settings import Config, TrainConfig
from gptmini.console import warn
from gptmini.errors import ConfigError
from gptmini.extras.parallel.ranks import Ranks
from gptmini.model.optim import Orthogonalize, orthogonalize
from gptmini.plan.cost import count_parameters
from gptmini.plan.timing import Machine, choose_micro_batch_size
from gptmini.train.gradients import Gradients
from gptmini.train.group import Group

EXACT_WORLD_SIZES = (1, 2, 4, 8)  # with the same micro-batches
BUCKET_BYTES = 25 << 20  # of gradients that are sent together, as in torch's DDP


# -- the plan --------------------------------------------------------------------------------------


def share_batch(config: Config, stated: TrainConfig, machine: Machine, dry_run: bool) -> Config:
    """Choose how processes share every batch: rows per forward pass, shards, how gradients add up.

    `stated` is what was requested; `dry_run` as in `make_plan`. ConfigError for settings that
    contradict each other, MachineError for a model that does not fit.
    """
    if not dry_run:
        config = shard_if_needed(config, machine)
    config = split_batch(config, machine.world_size, stated.micro_batch_size is not None)
    if config.train.micro_batch_size is None:
        world_sizes = list_equivalent_world_sizes(config, machine.world_size)
        size = choose_micro_batch_size(config, machine, world_sizes)
        config = config.with_train(micro_batch_size=size)
    return config


def shard_if_needed(config: Config, machine: Machine) -> Config:
    """Shard a model that does not fit whole; raises MachineError if it does not fit at all.

    ConfigError if gradients are to be added exactly, for which every process needs it whole.
    """
    count = count_parameters(config.model)
    world_size = machine.world_size
    if world_size > 1 and machine.get_free_memory(count, sharded=False) < 0:
        if config.train.reduce == "exact":
            raise ConfigError(
                "train.reduce: exact needs whole models, which do not fit; use fast, and "
                "train.shard: true"
            )
        config = config.with_train(shard=True)
    if world_size > 1 and config.train.shard and config.train.compile == "auto":
        config = config.with_train(compile="off")
    machine.check_memory(count, config.train.shard)
    return config


def split_batch(config: Config, world_size: int, is_micro_batch_stated: bool) -> Config:
    """Check that processes can share every batch equally, and choose how they add gradients.

    They add them exactly where that costs little and every process has the whole model. A
    micro-batch that does not divide a process's rows is chosen again unless it was stated. Raises
    ConfigError for what does not divide, and for exact sums of shards.
    """
    train = config.train
    rows, rest = divmod(train.batch_size, world_size)
    if rest:
        nearest = [count * world_size for count in (rows, rows + 1) if count > 0]
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows do not divide among {world_size} "
            f"processes; use {' or '.join(map(str, nearest))}"
        )
    size = train.micro_batch_size
    if size is not None and rows % size:
        problem = f"{size} does not divide the {rows} rows of each of {world_size} processes"
        if is_micro_batch_stated:
            raise ConfigError(f"train.micro_batch_size: {problem}; use a divisor of {rows}")
        warn(f"train.micro_batch_size: {problem}; choosing another")
        config = config.with_train(micro_batch_size=None)
    if train.reduce == "exact" and world_size.bit_count() > 1:
        raise ConfigError(
            f"train.reduce: exact needs 1, 2, 4 or 8 processes, not {world_size}; use fast"
        )
    is_sharded = train.shard and world_size > 1
    if train.reduce == "exact" and is_sharded:
        raise ConfigError("train.reduce: exact needs whole models, not train.shard; use fast")
    if train.reduce == "auto":
        is_exact = world_size in EXACT_WORLD_SIZES[1:] and not is_sharded
        config = config.with_train(reduce="exact" if is_exact else "fast")
    return config


def list_equivalent_world_sizes(config: Config, world_size: int) -> list[int]:
    """List the numbers of processes that must make the same bits as `world_size` of them."""
    if config.train.reduce != "exact":
        return [world_size]
    divisors = [size for size in EXACT_WORLD_SIZES if config.train.batch_size % size == 0]
    return sorted({world_size, *divisors})


# -- gradients -------------------------------------------------------------------------------------


class ExactGradients(Gradients):
    """A binary tree over the step's micro-batches, n of each rank, whose bits hang on nothing else.

    A tree over n leaves is the sum of two trees over n / 2 each; an odd number of leaves is added
    from left to right, as autograd does. Floating-point sums depend on their order, so the order
    must not depend on how many processes share the work: each takes a subtree, the contiguous block
    of its micro-batches.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], n: int, group: Group) -> None:
        super().__init__(parameters)
        self.group = group
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
        if self.group.world_size > 1:
            flat = torch.cat([gradient.flatten() for gradient in tree])
            tree = unflatten(all_reduce_tree(flat, self.group), tree)
        for parameter, gradient in zip(self.parameters, tree, strict=True):
            parameter.grad = gradient


def all_reduce_tree(flat: Tensor, ranks: Group) -> Tensor:
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


# -- matrices --------------------------------------------------------------------------------------


def orthogonalize_one_by_one(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices (N, R, C), each with bits that do not depend on the others.

    In a batch they may: kernels are chosen by the size of the whole batch, and round otherwise for
    a matrix that does not begin at a multiple of 16 bytes, as those after one of an odd size.
    """
    return torch.cat([orthogonalize(matrix) for matrix in matrices.contiguous().split(1)])


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
