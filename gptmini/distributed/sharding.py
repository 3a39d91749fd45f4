"""Weights, gradients and optimizer state sharded over the ranks: of every tensor, each has some
rows.

torch's FSDP gathers the weights of a block before it computes and drops them afterwards. What is
here makes that the training of one process: initial weights, sums and norms of gradients to the
same bits, whole matrices for Muon, and pieces for checkpoints.

Letters: N matrices, R rows, C columns; n micro-batches of a rank, W ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from gptmini.config.settings import ModelConfig, TrainConfig
from gptmini.distributed.gradients import Exact, Fast, Gradients, swap
from gptmini.distributed.ranks import Ranks
from gptmini.model.gpt import GPT
from gptmini.model.layers import Rotary
from gptmini.model.optim import Optimizer, orthogonal
from gptmini.runs.tensors import Part, Piece

LINE = 16  # numbers of float32
MEANS = ("exp_avg", "exp_avg_sq")


class Shards:
    """Which rows a rank has: those that torch.chunk gives it."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.mesh = init_device_mesh(device.type, (ranks.size,))
        self.part = Part(self.rows, self.tensor)  # what to read of a checkpoint

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

    def model(self, config: ModelConfig) -> GPT:
        """A sharded model with the initial weights of one process, one tensor whole at a time."""
        with torch.device("meta"), _Drawing(self) as drawing:
            model = GPT(config)
        drawn = [drawing.drawn[id(parameter)] for parameter in model.parameters()]
        for module in (*model.blocks, model):
            fully_shard(module, mesh=self.mesh)
        register_fsdp_forward_method(model, "hidden")  # which evaluating calls
        model.to_empty(device=self.device)
        for parameter, rows in zip(model.parameters(), drawn, strict=True):
            parameter.detach().to_local().copy_(rows)  # type: ignore[attr-defined]
        if model.rotary is not None:
            model.rotary = Rotary(config).to(self.device)
        return model

    def optimizer(self, model: GPT, config: TrainConfig, dtype: torch.dtype) -> Optimizer:
        """The optimizer of one process on the rows of this rank."""
        optimizer = Optimizer(model, config, dtype, self._turn)
        if config.reduce == "exact" and self.device.type == "cpu":
            _Aligned(optimizer.parts[0][0], self)
        return optimizer

    def _turn(self, matrices: Tensor) -> Tensor:
        """`orthogonal` for sharded matrices (N, R, C): each rank turns its share of whole ones."""
        assert isinstance(matrices, DTensor)
        whole = matrices.redistribute(placements=[Shard(0)]).to_local()
        turned = self.tensor(orthogonal(whole), matrices.shape)
        return turned.redistribute(placements=matrices.placements)


class _Drawing(TorchDispatchMode):
    """Fills what has no memory for real, one tensor after the other, and keeps a rank's rows.

    The random generator passes through the same states as without it.
    """

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.shards, self.drawn = shards, dict[int, Tensor]()  # by the id of the parameter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__.split(".")[0] in ("normal_", "uniform_", "fill_", "zero_"):
            whole = torch.empty(args[0].shape, device="cpu")
            func(whole, *args[1:], **(kwargs or {}))
            self.drawn[id(args[0])] = whole[self.shards.rows(len(whole))].clone()
        return func(*args, **(kwargs or {}))


class _Aligned:
    """Makes AdamW round a rank's rows as it rounds the whole tensor on a CPU.

    torch's kernel takes numbers in lines of 16, and rounds those of a last, shorter line in another
    way. Rows that begin or end within a line are computed again, with zeros in place of the rest.
    """

    def __init__(self, adamw: torch.optim.Optimizer, shards: Shards) -> None:
        self.shards, self.cut = shards, list[tuple[Any, Any, Any, list[Tensor]]]()
        adamw.register_step_pre_hook(self._keep)
        adamw.register_step_post_hook(self._correct)

    def _keep(self, adamw: Any, *_: Any) -> None:
        self.cut = []
        for group in adamw.param_groups:
            for each in group["params"]:
                count, columns = each.numel(), each.numel() // len(each)
                rows, state = self.shards.rows(len(each)), adamw.state[each]
                first, last = rows.start * columns, rows.stop * columns
                if first < last and (first % LINE or (last % LINE and last < count)):
                    means = [state.get(key, torch.zeros_like(each)) for key in MEANS]
                    old = [tensor.detach().to_local().flatten() for tensor in (each, *means)]
                    padding = (first % LINE, min(-last % LINE, count - last))
                    self.cut.append((group, each, padding, [F.pad(own, padding) for own in old]))

    def _correct(self, adamw: Any, *_: Any) -> None:
        for group, each, padding, (new, *means) in self.cut:
            state, beta = adamw.state[each], group["betas"]
            gradient = F.pad(each.grad.to_local().flatten(), padding)
            names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
            lists: Any = [new], [gradient], [means[0]], [means[1]], [], [state["step"]]
            options = {name: group[name] for name in names}
            torch._fused_adamw_(*lists, beta1=beta[0], beta2=beta[1], **options)
            for tensor, right in zip((each, *map(state.get, MEANS)), (new, *means), strict=True):
                own = tensor.detach().to_local()
                own.copy_(right[padding[0] :][: own.numel()].view_as(own))


def gradients(reduce: str, model: GPT, ranks: Ranks, n: int, sharded: bool) -> Gradients:
    """The way of `train.reduce`, once decided, for n micro-batches of each rank."""
    if sharded:
        return ShardedExact(model, ranks, n) if reduce == "exact" else ShardedFast(model)
    if reduce == "exact":
        return Exact(model.parameters(), ranks, n)
    return Fast(model.parameters(), ranks, n) if ranks.size > 1 else Gradients(model.parameters())


def own_micro_batches(n: int, ranks: Ranks, sharded: bool) -> list[int]:
    """The micro-batches of a rank, by their number in the step: a stretch, or if sharded, every
    W-th group that autograd adds, so that the same group of all ranks is a subtree of `Exact`."""
    group = n // (n & -n) if sharded else n
    return [m for m in range(n * ranks.size) if m // group % ranks.size == ranks.rank]


class ShardedFast(Gradients):
    """FSDP adds the gradients of all ranks after each micro-batch; each keeps its rows."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model.parameters())
        _sum_gradients(model)

    def clip(self, limit: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor().item()  # type: ignore[attr-defined]


class ShardedExact(Exact):
    """The tree of `Exact`, whose branches over the ranks FSDP adds; each keeps its rows."""

    def __init__(self, model: GPT, ranks: Ranks, n: int) -> None:
        super().__init__(model.parameters(), ranks, n)
        _sum_gradients(model, _TreeSum(ranks))
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


def _sum_gradients(model: GPT, reduce_scatter: Any = None) -> None:
    """Make FSDP add gradients, in place of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if reduce_scatter is not None:
                module.set_custom_reduce_scatter(reduce_scatter)
