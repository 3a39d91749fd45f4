"""Shards weights, gradients and optimizer state: each rank holds some rows of every tensor.

torch's FSDP gathers the weights of a block before it computes and drops them afterwards. What is
here gives it the initial weights of one process, whole matrices for Muon, and row slices for
checkpoints. Gradients are added in the order that suits the network, so results agree with those of
one process up to rounding.

Letters: N matrices, R rows, C columns; n micro-batches of a rank.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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
from torch.utils._python_dispatch import TorchDispatchMode

from gptmini.config.settings import ModelConfig, TrainConfig
from gptmini.distributed.gradients import Gradients, list_micro_batches
from gptmini.distributed.group import Group
from gptmini.machine import Compute
from gptmini.model.attention import Attention
from gptmini.model.gpt import GPT
from gptmini.model.layers import Rotary, compute_alibi_slopes
from gptmini.model.optim import Optimizer, orthogonalize
from gptmini.runs.tensors import RowSlice, ShardSpec

NORM_MODULES = (nn.LayerNorm, nn.RMSNorm)
INIT_FUNCTIONS = ("normal_", "uniform_", "fill_", "zero_")

SliceRows = Callable[[int], slice]


class Sharded:
    """A placement in which each rank holds the rows that torch.chunk gives it."""

    is_sharded = True

    def __init__(self, group: Group, compute: Compute) -> None:
        self.group = group
        self.compute = compute
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
        apply_fsdp(model, self.mesh, self.compute.dtype)
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
        return Optimizer(model, train, self.compute.dtype, self._orthogonalize_share)

    def create_gradients(self, model: GPT, n: int) -> Gradients:
        """Return the way of adding gradients, which is FSDP's for any number of micro-batches."""
        return ShardedGradients(model.parameters())

    def list_micro_batches(self, n: int) -> list[int]:
        return list_micro_batches(n, self.group)

    def enter_inference(self) -> AbstractContextManager[object]:
        """Enter the type in which matrices are gathered, outside of a training step too."""
        return self.compute.autocast()

    def _orthogonalize_share(self, matrices: Tensor) -> Tensor:
        """Orthogonalize sharded matrices: each rank computes its share of whole ones.

        Muon needs whole matrices. Sharding the batch by matrices instead of by rows gives each
        rank some of them, and sharding it by rows again returns the results.
        """
        assert isinstance(matrices, DTensor)  # (N, R, C)
        share = matrices.redistribute(placements=[Shard(0)]).to_local()
        result = self.to_dtensor(orthogonalize(share), matrices.shape)
        return result.redistribute(placements=matrices.placements)  # (N, R, C)


class ShardedInit(TorchDispatchMode):
    """Initializes parameters on the meta device: draws each in full and keeps this rank's rows.

    One tensor is whole at a time, and the random generator passes through the same states as where
    all are. Parameters on the meta device have no memory, so the rows wait in `initial_rows`.
    """

    def __init__(self, slice_rows: SliceRows) -> None:
        super().__init__()
        self.slice_rows = slice_rows
        self.initial_rows: dict[int, Tensor] = {}  # by the id of the parameter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = func.__name__.split(".")[0]
        if name in INIT_FUNCTIONS:
            parameter, *rest = args
            whole = torch.empty(parameter.shape, device="cpu")
            func(whole, *rest, **options)
            rows = self.slice_rows(len(whole))
            self.initial_rows[id(parameter)] = whole[rows].clone()
        if name == "add_":
            parameter, change = args
            rows = self.slice_rows(len(parameter))
            self.initial_rows[id(parameter)] += change.expand(parameter.shape)[rows]
        return func(*args, **options)


def apply_fsdp(model: GPT, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a model: ranks gather each block when it is used, and add gradients in float32.

    The blocks' matrices are gathered in `dtype`, the type of their products.
    """
    matrices = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if dtype != torch.float32:  # norms compute in float32, so they are gathered apart
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


class ShardedGradients(Gradients):
    """FSDP adds the gradients of all ranks after each micro-batch; each keeps its rows."""

    def clip(self, limit: float) -> Tensor:
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor()
