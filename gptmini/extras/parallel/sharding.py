"""Shards weights, gradients and optimizer state: each rank holds some rows of every tensor.

torch's FSDP gathers the weights of a block before it computes and drops them afterwards. What is
here gives it whole matrices for Muon, and whole tensors to and from rank 0. Gradients are added in
the order that suits the network, so results agree with those of one process up to rounding.

Letters: N matrices, R rows, C columns.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gptmini.config.settings import ModelConfig
from gptmini.machine import Compute
from gptmini.model.gpt import GPT, create_undrawn
from gptmini.model.optim import orthogonalize
from gptmini.train.gradients import Gradients

NORM_MODULES = (nn.LayerNorm, nn.RMSNorm)


class Shards:
    """Makes what trains a sharded model; each rank holds the rows that torch.chunk gives it."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.mesh = init_device_mesh(device.type, (world_size,))
        # Silence its warning that gloo gathers what it could exchange.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)

    def create_blank(self, config: ModelConfig, compute: Compute) -> GPT:
        """Create a sharded model whose weights are whatever lies in memory.

        Ranks gather each block when it is used, its matrices in the type of their products, and add
        gradients in float32.
        """
        model = create_undrawn(config)  # of which torch moves a block at a time to the device
        matrices = MixedPrecisionPolicy(compute.dtype, torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            if compute.dtype != torch.float32:  # norms compute in it, so they are gathered apart
                norms: list[nn.Module] = [
                    module for module in block.modules() if isinstance(module, NORM_MODULES)
                ]
                fully_shard(norms, mesh=self.mesh)
            fully_shard(block, mesh=self.mesh, mp_policy=matrices)
        fully_shard(model, mesh=self.mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are weighted by their rows, so gradients are added, where FSDP takes their
                # mean. The second call keeps NCCL from scaling within the sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # FSDP gathers when `forward` is called. Evaluating calls `forward_hidden`, which must
        # gather, too. So the forward pass of a step drops what is beside the blocks after it and
        # gathers it again for the backward pass: more traffic, but less memory at the peak.
        register_fsdp_forward_method(model, "forward_hidden")
        return model

    def create_gradients(self, model: GPT) -> Gradients:
        """Return the way of adding gradients, which is FSDP's for any number of micro-batches."""
        return ShardedGradients(model.parameters())

    def orthogonalize(self, matrices: Tensor) -> Tensor:
        """Orthogonalize sharded matrices: each rank computes its share of whole ones.

        Muon needs whole matrices. Sharding the batch by matrices instead of by rows gives each rank
        some of them, and sharding it by rows again returns the results.
        """
        assert isinstance(matrices, DTensor)  # (N, R, C)
        by_matrix = matrices.redistribute(placements=[Shard(0)])
        result = DTensor.from_local(
            orthogonalize(by_matrix.to_local()),
            self.mesh,
            [Shard(0)],
            shape=matrices.shape,
            stride=by_matrix.stride(),
        )
        return result.redistribute(placements=matrices.placements)  # (N, R, C)

    def keep_rows(self, whole: Tensor) -> Tensor:
        """Keep this rank's rows of a tensor that rank 0 sends; the others' may hold anything."""
        return distribute_tensor(whole, self.mesh, [Shard(0)])

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the whole of a sharded tensor on every rank."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedGradients(Gradients):
    """FSDP adds the gradients of all ranks after each micro-batch; each keeps its rows."""

    def clip(self, limit: float) -> Tensor:
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor()
