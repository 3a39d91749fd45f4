"""Weights, gradients and optimizer state sharded over the ranks: of every tensor, each has some
rows.

torch's FSDP gathers the weights of a block before it computes and drops them afterwards. What is
here makes that the training of one process: initial weights, sums and norms of gradients to the
same bits, whole matrices for Muon, and pieces for checkpoints.

Letters: N matrices, R rows, C columns; n micro-batches of a rank, W ranks.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from gptmini.config.settings import ModelConfig, TrainConfig
from gptmini.distributed.gradients import Exact, Fast, Gradients, odd_part, swap, turning
from gptmini.distributed.ranks import Ranks
from gptmini.model.gpt import GPT
from gptmini.model.layers import Rotary
from gptmini.model.optim import Optimizer
from gptmini.model.rows import AlignedAdamW, Drawing
from gptmini.runs.tensors import Part, Piece

NORMS = (nn.LayerNorm, nn.RMSNorm)


class Shards:
    """Which rows a rank has: those that torch.chunk gives it."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.mesh = init_device_mesh(device.type, (ranks.size,))
        self.part = Part(self.rows, self.tensor)  # what to read of a checkpoint
        # Without its warning that gloo gathers what could be exchanged.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)

    def rows(self, count: int) -> slice:
        """The rows of this rank, of `count`; the last ranks may have fewer, or none."""
        share = -(-count // self.ranks.size)
        first = min(self.ranks.rank * share, count)
        return slice(first, min(first + share, count))

    def tensor(self, rows: Tensor, shape: tuple[int, ...]) -> DTensor:
        """A tensor of this shape, of which this rank has these rows."""
        stride = torch.empty(shape, device="meta").stride()
        rows, size = rows.to(self.device), torch.Size(shape)
        return DTensor.from_local(rows, self.mesh, [Shard(0)], shape=size, stride=stride)

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """What this rank writes of a checkpoint; numbers are the same on all ranks."""
        return {
            name: Piece(each.to_local(), self.rows(len(each)).start, tuple(each.shape))
            if isinstance(each, DTensor)
            else Piece(each, 0, ())
            for name, each in tensors.items()
        }

    def model(self, config: ModelConfig, reduce: str, dtype: torch.dtype) -> GPT:
        """A sharded model with the initial weights of one process, one tensor whole at a time."""
        with torch.device("meta"), Drawing(self.rows) as drawing:
            model = GPT(config)
        drawn = [drawing.drawn[id(parameter)] for parameter in model.parameters()]
        wrap(model, self.mesh, reduce, dtype)
        model.to_empty(device=self.device)
        for parameter, rows in zip(model.parameters(), drawn, strict=True):
            parameter.detach().to_local().copy_(rows)  # type: ignore[attr-defined]
        if model.rotary is not None:
            model.rotary = Rotary(config).to(self.device)
        return model

    def optimizer(self, model: GPT, config: TrainConfig, dtype: torch.dtype) -> Optimizer:
        """The optimizer of one process on the rows of this rank."""
        optimizer = Optimizer(model, config, dtype, self._divided(turning(config.reduce)))
        if config.reduce == "exact" and self.device.type == "cpu":
            AlignedAdamW(optimizer.parts[0][0], self.rows)
        return optimizer

    def _divided(self, turn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`turn` for sharded matrices (N, R, C): each rank turns its share of whole ones."""

        def shared(matrices: Tensor) -> Tensor:
            assert isinstance(matrices, DTensor)
            whole = matrices.redistribute(placements=[Shard(0)]).to_local()
            turned = self.tensor(turn(whole), matrices.shape)
            return turned.redistribute(placements=matrices.placements)

        return shared


def wrap(model: GPT, mesh: DeviceMesh, reduce: str, dtype: torch.dtype) -> None:
    """Shard a model: ranks gather each block when it is used, and add gradients in float32.

    `fast` gathers the blocks' matrices in `dtype`, the type of their products; `exact` gathers all
    in float32, in which a run is evaluated.
    """
    gathered = torch.float32 if reduce == "exact" else dtype
    matrices = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if gathered != torch.float32:  # but norms compute in it
            norms: list[nn.Module] = [each for each in block.modules() if isinstance(each, NORMS)]
            fully_shard(norms, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=matrices)
    fully_shard(model, mesh=mesh)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)  # no mean
        module.set_force_sum_reduction_for_comms(True)
    # Evaluating calls `hidden`. So does the forward pass, after which FSDP drops what is beside the
    # blocks and gathers it again for the backward pass: more traffic, but less memory at the peak.
    register_fsdp_forward_method(model, "hidden")


def _sharded(model: GPT) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gradients(reduce: str, model: GPT, ranks: Ranks, n: int, sharded: bool) -> Gradients:
    """The way of `train.reduce`, once decided, for n micro-batches of each rank."""
    parameters = model.parameters()
    if reduce == "exact":
        return ShardedExact(model, ranks, n) if sharded else Exact(parameters, ranks, n)
    if sharded:
        return ShardedFast(parameters)
    return Fast(parameters, ranks, n) if ranks.size > 1 else Gradients(parameters)


def own_micro_batches(n: int, ranks: Ranks, sharded: bool) -> list[int]:
    """The micro-batches of a rank, by their number in the step: a stretch, or if sharded, every
    W-th group that autograd adds, so that the same group of all ranks is a subtree of `Exact`."""
    group = odd_part(n) if sharded else n
    return [m for m in range(n * ranks.size) if m // group % ranks.size == ranks.rank]


class ShardedFast(Gradients):
    """FSDP adds the gradients of all ranks after each micro-batch; each keeps its rows."""

    def clip(self, limit: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor().item()  # type: ignore[attr-defined]


class ShardedExact(Exact):
    """The tree of `Exact`, whose branches over the ranks FSDP adds; each keeps its rows."""

    def __init__(self, model: GPT, ranks: Ranks, n: int) -> None:
        super().__init__(model.parameters(), ranks, n)
        adding: Any = _TreeSum(ranks)  # after the interface of torch's ReduceScatter
        for module in _sharded(model):
            module.set_custom_reduce_scatter(adding)
        self.model: Any = model
        self._announce()

    def _announce(self) -> None:
        """Say whether the next micro-batch ends a group, whose sum then goes over the ranks."""
        self.model.set_requires_gradient_sync((self.made + 1) % self.odd == 0)

    def added(self) -> None:
        super().added()
        self._announce()

    def over_ranks(self, tree: list[Tensor]) -> list[Tensor]:
        return tree

    def clip(self, limit: float) -> float:
        """By the norm that one process has: from whole tensors, one after the other."""
        whole: Any = (each.grad for each in self.parameters)
        norms = [torch._foreach_norm([gradient.full_tensor()])[0] for gradient in whole]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
        return norm.item()


class _TreeSum:
    """Each rank's chunk of the sum of all ranks' vectors, added as in `gradients.tree_sum`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def allocate(self, size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        chunks, bit = input_tensor.view(self.ranks.size, -1), 1  # (W, ...)
        while bit < self.ranks.size:
            own = self.ranks.rank // bit % 2  # of every two chunks
            kept, given = chunks[own::2].contiguous(), chunks[1 - own :: 2].contiguous()
            received = torch.empty_like(kept)
            swap(given, received, self.ranks.rank ^ bit)
            chunks, bit = kept.add_(received), 2 * bit
        output_tensor.copy_(chunks[0])
