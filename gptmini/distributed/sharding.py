"""Shards weights, gradients and optimizer state: each rank holds some rows of every tensor.

torch's FSDP gathers the weights of a block before it computes and drops them afterwards. What is
here makes that the computation of one process: initial weights, sums and norms of gradients to the
same bits, whole matrices for Muon, and row slices for checkpoints.

Letters: N matrices, R rows, C columns; n micro-batches of a rank, W ranks.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
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
    Gradients,
    Orthogonalize,
    choose_orthogonalize,
    get_odd_part,
    list_micro_batches,
    swap,
)
from gptmini.distributed.group import Group
from gptmini.distributed.rows import AlignedAdamW, ShardedInit
from gptmini.machine import Compute
from gptmini.model.attention import Attention
from gptmini.model.gpt import GPT
from gptmini.model.layers import Rotary, compute_alibi_slopes
from gptmini.model.optim import Optimizer
from gptmini.runs.tensors import RowSlice, ShardSpec

NORM_MODULES = (nn.LayerNorm, nn.RMSNorm)


class Sharded:
    """A placement in which each rank holds the rows that torch.chunk gives it."""

    is_sharded = True

    def __init__(self, group: Group, compute: Compute, reduce: str) -> None:
        self.group = group
        self.compute = compute
        self.reduce = reduce
        self.mesh = init_device_mesh(compute.device.type, (group.world_size,))
        self.spec = ShardSpec(self.slice_rows, self.to_dtensor)  # what to read of a checkpoint
        # Silence its warning that gloo gathers what it could exchange.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)

    def slice_rows(self, count: int) -> slice:
        """Return the rows of this rank, of `count`; the last ranks may have fewer, or none."""
        share = -(-count // self.group.world_size)
        first = min(self.group.rank * share, count)
        return slice(first, min(first + share, count))

    def to_dtensor(self, rows: Tensor, shape: tuple[int, ...]) -> DTensor:
        """Make a tensor of this shape, of which this rank holds these rows."""
        stride = torch.empty(shape, device="meta").stride()
        local = rows.to(self.compute.device)
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], shape=torch.Size(shape), stride=stride
        )

    def to_row_slices(self, tensors: Mapping[str, Tensor]) -> dict[str, RowSlice]:
        """Return what this rank writes of a checkpoint; scalars are the same on all ranks."""
        slices = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                start = self.slice_rows(len(tensor)).start
                slices[name] = RowSlice(tensor.to_local(), start, tuple(tensor.shape))
            else:
                slices[name] = RowSlice(tensor, 0, ())
        return slices

    def create_model(self, config: ModelConfig) -> GPT:
        """Create a sharded model with the initial weights of one process.

        Only one tensor is whole at a time, so that a model fits that no rank could hold.
        """
        with torch.device("meta"), ShardedInit(self.slice_rows) as init:
            model = GPT(config)
        # By id, before FSDP replaces the parameters by DTensors.
        initial_rows = [init.initial_rows[id(parameter)] for parameter in model.parameters()]
        apply_fsdp(model, self.mesh, self.reduce, self.compute.dtype)
        model.to_empty(device=self.compute.device)
        for parameter, rows in zip(model.parameters(), initial_rows, strict=True):
            parameter.detach().to_local().copy_(rows)  # type: ignore[attr-defined]
        self._fill_buffers(model, config)
        return model

    def _fill_buffers(self, model: GPT, config: ModelConfig) -> None:
        """Compute the buffers, which `to_empty` left blank."""
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)  # so that one forgotten here is noticed
        if model.rotary is not None:
            model.rotary = Rotary(config).to(self.compute.device)
        for module in model.modules():
            if isinstance(module, Attention) and module.alibi_slopes is not None:
                module.alibi_slopes = compute_alibi_slopes(config.n_head).to(self.compute.device)

    def create_optimizer(self, model: GPT, train: TrainConfig) -> Optimizer:
        """Create the optimizer of one process on the rows of this rank."""
        orthogonalize = self._shard_orthogonalize(choose_orthogonalize(self.reduce))
        optimizer = Optimizer(model, train, self.compute.dtype, orthogonalize)
        if self.reduce == "exact" and self.compute.device.type == "cpu":
            adamw = optimizer.optimizers[0]
            AlignedAdamW(adamw, self.slice_rows)  # lives on in the optimizer's hooks
        return optimizer

    def create_gradients(self, model: GPT, n: int) -> Gradients:
        """Return the way of adding gradients for n micro-batches of each rank."""
        if self.reduce == "exact":
            return ShardedExactGradients(model, self.group, n)
        return ShardedFastGradients(model.parameters())

    def list_micro_batches(self, n: int) -> list[int]:
        """Return this rank's micro-batches: every W-th group that autograd adds.

        FSDP adds the same group of all ranks, which thus is a subtree of `ExactGradients`.
        """
        return list_micro_batches(n, self.group, get_odd_part(n))

    def enter_inference(self) -> AbstractContextManager[object]:
        """Enter the type in which `fast` gathers the matrices, outside of a training step too."""
        return self.compute.autocast() if self.reduce == "fast" else nullcontext()

    def _shard_orthogonalize(self, orthogonalize: Orthogonalize) -> Orthogonalize:
        """Return `orthogonalize` for sharded matrices: each rank computes its share of whole ones.

        Muon needs whole matrices. Sharding the batch by matrices instead of by rows gives each
        rank some of them, and sharding it by rows again returns the results.
        """

        def orthogonalize_share(matrices: Tensor) -> Tensor:
            assert isinstance(matrices, DTensor)  # (N, R, C)
            share = matrices.redistribute(placements=[Shard(0)]).to_local()
            result = self.to_dtensor(orthogonalize(share), matrices.shape)
            return result.redistribute(placements=matrices.placements)  # (N, R, C)

        return orthogonalize_share


def apply_fsdp(model: GPT, mesh: DeviceMesh, reduce: str, dtype: torch.dtype) -> None:
    """Shard a model: ranks gather each block when it is used, and add gradients in float32.

    `fast` gathers the blocks' matrices in `dtype`, the type of their products; `exact` gathers all
    in float32, in which a run is evaluated.
    """
    gathered = torch.float32 if reduce == "exact" else dtype
    matrices = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if gathered != torch.float32:  # norms compute in float32, so they are gathered apart
            norms: list[nn.Module] = [
                module for module in block.modules() if isinstance(module, NORM_MODULES)
            ]
            fully_shard(norms, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=matrices)
    fully_shard(model, mesh=mesh)
    for module in _list_fsdp_modules(model):
        # Losses are weighted by their rows, so gradients are added, where FSDP takes their mean.
        # The second call keeps NCCL from scaling within the sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # FSDP gathers when `forward` is called. Evaluating calls `forward_hidden`, which must gather
    # too. So the forward pass of a step drops what is beside the blocks after `forward_hidden` and
    # gathers it again for the backward pass: more traffic, but less memory at the peak.
    register_fsdp_forward_method(model, "forward_hidden")


def _list_fsdp_modules(model: GPT) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class ShardedFastGradients(Gradients):
    """FSDP adds the gradients of all ranks after each micro-batch; each keeps its rows."""

    def clip(self, limit: float) -> Tensor:
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor()


class ShardedExactGradients(ExactGradients):
    """The tree of `ExactGradients`, whose branches over the ranks FSDP adds; each keeps its rows.

    One process adds the micro-batches first, then ranks. Here ranks are added first, as soon as a
    group of micro-batches is done, since FSDP keeps no whole gradients. Which micro-batches a rank
    has is chosen so that both are the same tree.
    """

    def __init__(self, model: GPT, group: Group, n: int) -> None:
        super().__init__(model.parameters(), group, n)
        reduce_scatter: Any = _TreeReduceScatter(group)  # has the methods of torch's ReduceScatter
        for module in _list_fsdp_modules(model):
            module.set_custom_reduce_scatter(reduce_scatter)
        self.model: Any = model
        self._set_gradient_sync()

    def _set_gradient_sync(self) -> None:
        """Tell FSDP whether the next micro-batch ends a group, whose sum goes over the ranks."""
        ends_group = (self.micro_batches_done + 1) % self.run_length == 0
        self.model.set_requires_gradient_sync(ends_group)

    def after_backward(self) -> None:
        super().after_backward()
        self._set_gradient_sync()

    def reduce_over_ranks(self, tree: list[Tensor]) -> list[Tensor]:
        return tree  # FSDP has done so

    def clip(self, limit: float) -> Tensor:
        """Clip by the norm that one process has: from whole tensors, one after the other.

        A norm from the ranks' partial norms would round in another way.
        """
        norms: list[Tensor] = []
        for parameter in self.parameters:
            gradient: Any = parameter.grad
            norms += torch._foreach_norm([gradient.full_tensor()])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
        return norm


class _TreeReduceScatter:
    """Returns each rank's chunk of the sum of all vectors, added as `all_reduce_tree` does.

    FSDP calls it in place of NCCL's or gloo's reduce-scatter, whose order of adding depends on W.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        chunks = input_tensor.view(self.group.world_size, -1)  # (W, ...)
        bit = 1
        while bit < self.group.world_size:
            # Of every two chunks, keep the one for ranks on this side and send the other.
            side = self.group.rank // bit % 2
            kept = chunks[side::2].contiguous()
            sent = chunks[1 - side :: 2].contiguous()
            received = torch.empty_like(kept)
            swap(sent, received, self.group.rank ^ bit)
            chunks = kept.add_(received)
            bit *= 2
        output_tensor.copy_(chunks[0])
