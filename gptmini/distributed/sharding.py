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
from gptmini.distributed.gradients import (
    ExactGradients,
    FastGradients,
    Gradients,
    get_odd_part,
    swap,
    turning,
)
from gptmini.distributed.group import Group
from gptmini.distributed.rows import AlignedAdamW, ShardedInit
from gptmini.model.gpt import GPT
from gptmini.model.layers import Rotary
from gptmini.model.optim import Optimizer
from gptmini.runs.tensors import RowSlice, ShardSpec

NORM_MODULES = (nn.LayerNorm, nn.RMSNorm)


class Shards:
    """Which rows a rank has: those that torch.chunk gives it."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.mesh = init_device_mesh(device.type, (group.world_size,))
        self.spec = ShardSpec(self.slice_rows, self.to_dtensor)  # what to read of a checkpoint
        # Without its warning that gloo gathers what could be exchanged.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)

    def slice_rows(self, count: int) -> slice:
        """The rows of this rank, of `count`; the last ranks may have fewer, or none."""
        share = -(-count // self.group.world_size)
        first = min(self.group.rank * share, count)
        return slice(first, min(first + share, count))

    def to_dtensor(self, rows: Tensor, shape: tuple[int, ...]) -> DTensor:
        """A tensor of this shape, of which this rank has these rows."""
        stride = torch.empty(shape, device="meta").stride()
        rows, size = rows.to(self.device), torch.Size(shape)
        return DTensor.from_local(rows, self.mesh, [Shard(0)], shape=size, stride=stride)

    def to_row_slices(self, tensors: Mapping[str, Tensor]) -> dict[str, RowSlice]:
        """What this rank writes of a checkpoint; numbers are the same on all ranks."""
        return {
            name: RowSlice(each.to_local(), self.slice_rows(len(each)).start, tuple(each.shape))
            if isinstance(each, DTensor)
            else RowSlice(each, 0, ())
            for name, each in tensors.items()
        }

    def create_model(self, config: ModelConfig, reduce: str, dtype: torch.dtype) -> GPT:
        """A sharded model with the initial weights of one process, one tensor whole at a time."""
        with torch.device("meta"), ShardedInit(self.slice_rows) as drawing:
            model = GPT(config)
        drawn = [drawing.initial_rows[id(parameter)] for parameter in model.parameters()]
        apply_fsdp(model, self.mesh, reduce, dtype)
        model.to_empty(device=self.device)
        for parameter, rows in zip(model.parameters(), drawn, strict=True):
            parameter.detach().to_local().copy_(rows)  # type: ignore[attr-defined]
        if model.rotary is not None:
            model.rotary = Rotary(config).to(self.device)
        return model

    def create_optimizer(self, model: GPT, config: TrainConfig, dtype: torch.dtype) -> Optimizer:
        """The optimizer of one process on the rows of this rank."""
        optimizer = Optimizer(model, config, dtype, self._divided(turning(config.reduce)))
        if config.reduce == "exact" and self.device.type == "cpu":
            AlignedAdamW(optimizer.optimizers[0][0], self.slice_rows)
        return optimizer

    def _divided(self, turn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`turn` for sharded matrices (N, R, C): each rank turns its share of whole ones."""

        def shared(matrices: Tensor) -> Tensor:
            assert isinstance(matrices, DTensor)
            whole = matrices.redistribute(placements=[Shard(0)]).to_local()
            turned = self.to_dtensor(turn(whole), matrices.shape)
            return turned.redistribute(placements=matrices.placements)

        return shared


def apply_fsdp(model: GPT, mesh: DeviceMesh, reduce: str, dtype: torch.dtype) -> None:
    """Shard a model: ranks gather each block when it is used, and add gradients in float32.

    `fast` gathers the blocks' matrices in `dtype`, the type of their products; `exact` gathers all
    in float32, in which a run is evaluated.
    """
    gathered = torch.float32 if reduce == "exact" else dtype
    matrices = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if gathered != torch.float32:  # but norms compute in it
            norms: list[nn.Module] = [
                each for each in block.modules() if isinstance(each, NORM_MODULES)
            ]
            fully_shard(norms, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=matrices)
    fully_shard(model, mesh=mesh)
    for module in _list_fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # no mean
        module.set_force_sum_reduction_for_comms(True)
    # Evaluating calls `hidden`. So does the forward pass, after which FSDP drops what is beside the
    # blocks and gathers it again for the backward pass: more traffic, but less memory at the peak.
    register_fsdp_forward_method(model, "forward_hidden")


def _list_fsdp_modules(model: GPT) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def create_gradients(reduce: str, model: GPT, group: Group, n: int, sharded: bool) -> Gradients:
    """The way of `train.reduce`, once decided, for n micro-batches of each rank."""
    parameters = model.parameters()
    if reduce == "exact":
        return (
            ShardedExactGradients(model, group, n)
            if sharded
            else ExactGradients(parameters, group, n)
        )
    if sharded:
        return ShardedFastGradients(parameters)
    return FastGradients(parameters, group, n) if group.world_size > 1 else Gradients(parameters)


def micro_batches_of(n: int, group: Group, sharded: bool) -> list[int]:
    """The micro-batches of a rank, by their number in the step: a stretch, or if sharded, every
    W-th group that autograd adds, so that the same group of all ranks is a subtree of `Exact`."""
    run_length = get_odd_part(n) if sharded else n
    return [
        m for m in range(n * group.world_size) if m // run_length % group.world_size == group.rank
    ]


class ShardedFastGradients(Gradients):
    """FSDP adds the gradients of all ranks after each micro-batch; each keeps its rows."""

    def clip(self, limit: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor().item()  # type: ignore[attr-defined]


class ShardedExactGradients(ExactGradients):
    """The tree of `Exact`, whose branches over the ranks FSDP adds; each keeps its rows."""

    def __init__(self, model: GPT, group: Group, n: int) -> None:
        super().__init__(model.parameters(), group, n)
        adding: Any = _TreeReduceScatter(group)  # after the interface of torch's ReduceScatter
        for module in _list_fsdp_modules(model):
            module.set_custom_reduce_scatter(adding)
        self.model: Any = model
        self._set_gradient_sync()

    def _set_gradient_sync(self) -> None:
        """Say whether the next micro-batch ends a group, whose sum then goes over the ranks."""
        self.model.set_requires_gradient_sync((self.micro_batches_done + 1) % self.run_length == 0)

    def after_backward(self) -> None:
        super().after_backward()
        self._set_gradient_sync()

    def reduce_over_ranks(self, tree: list[Tensor]) -> list[Tensor]:
        return tree

    def clip(self, limit: float) -> float:
        """By the norm that one process has: from whole tensors, one after the other."""
        whole: Any = (each.grad for each in self.parameters)
        norms = [torch._foreach_norm([gradient.full_tensor()])[0] for gradient in whole]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
        return norm.item()


class _TreeReduceScatter:
    """Each rank's chunk of the sum of all ranks' vectors, added as in `gradients.tree_sum`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        chunks, bit = input_tensor.view(self.group.world_size, -1), 1  # (W, ...)
        while bit < self.group.world_size:
            own = self.group.rank // bit % 2  # of every two chunks
            kept, given = chunks[own::2].contiguous(), chunks[1 - own :: 2].contiguous()
            received = torch.empty_like(kept)
            swap(given, received, self.group.rank ^ bit)
            chunks, bit = kept.add_(received), 2 * bit
        output_tensor.copy_(chunks[0])
