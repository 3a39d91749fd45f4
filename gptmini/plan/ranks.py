"""Training on many accelerators, planned without any: memory and communication of one rank, time.

A sharded rank is run dry: training's own shards on tensors without storage, and PyTorch's fake
process group in place of the other ranks. Blocks are alike, so a few are run and the rest is
multiplied.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gptmini.config.settings import Config, TrainConfig
from gptmini.distributed.gradients import odd_part
from gptmini.distributed.sharding import wrap
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.model.gpt import GPT, loss
from gptmini.model.optim import Optimizer
from gptmini.plan import cost
from gptmini.plan.decide import in_shares
from gptmini.plan.fit import alike
from gptmini.plan.memory import Memory, StorageCounter, dry_run


class Accelerator(NamedTuple):
    """What the makers state, and what trainings reach of it."""

    name: str
    teraflops: int  # dense bfloat16
    gigabytes: int
    link: int  # GB/s in each direction to the others in its machine
    network: float  # Gbit/s to other machines
    utilization: float = 0.4  # share of the peak


# Links are NVLink, Infinity Fabric, or PCIe 4 where there is neither. Networks are those of servers
# with eight: DGX, AWS g6 and g6e, AMD's platform; 100 Gbit/s shared by eight for the rtx4090.
# Utilization is near the median of the trainings in scripts/README.md for a100 and h100, and the
# same as the latter for those without a published one.
ACCELERATORS = (
    Accelerator("l4", 121, 24, 32, 12.5),
    Accelerator("l40s", 362, 48, 32, 50),
    Accelerator("rtx4090", 165, 24, 32, 12.5),
    Accelerator("a100", 312, 80, 300, 200, 0.55),
    Accelerator("h100", 989, 80, 450, 400),
    Accelerator("h200", 989, 141, 450, 400),
    Accelerator("b200", 2250, 180, 900, 400),
    Accelerator("mi300x", 1307, 192, 448, 400),
)
COMPUTE = Compute(torch.device("cpu"), torch.bfloat16)  # of the dry run
MACHINE = 8  # accelerators in one
REACHED = 0.8  # of a bandwidth
# Times that each rank sends a tensor's bytes (less its own share): nccl-tests, PERFORMANCE.md.
SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
OPERATORS = {"_allgather_base_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1)}
FEW = 3  # blocks that are run; with three, FSDP has gathered, used and freed one

Measure = Callable[[Config], tuple[Memory, dict[str, int]]]


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds in bytes, what a step's collectives carry, and the seconds of a step.

    `traffic` has the bytes of whole tensors by kind of collective. `bandwidth` is what one rank
    can send, in bytes per second.
    """

    config: Config  # of the rank, with its rows of a step and of a pass
    memory: Memory
    memory_otherwise: int  # the peak with gradient checkpointing turned round
    traffic: dict[str, int]
    bandwidth: float
    compute: float
    communication: float

    @property
    def seconds(self) -> float:
        """Communication overlaps with compute, so the slower of the two counts."""
        return max(self.compute, self.communication)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class RankCounter(StorageCounter):
    """Counts what one rank of a sharded model holds, and the bytes of its collectives.

    FSDP frees and refills the tensors that it gathers by resizing their storages. No operator
    shows that, so what FSDP's own operators have touched is measured again before each operator.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self._resized: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in (*model.parameters(), *model.buffers()):
            self._count(tensor)

    def restart(self) -> int:
        """Begin to count peak and traffic; the bytes held now."""
        self.traffic = dict.fromkeys(SENT, 0)
        self.peak = 0
        self._refresh()
        return self.bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("fsdp", "c10d"):
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._resized.update(tensor.untyped_storage() for tensor in tensors)
        self._refresh()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._opname in OPERATORS:
            kind, whole = OPERATORS[func._opname]
            self.traffic[kind] += args[whole].nbytes
        return result

    def _refresh(self) -> None:
        for storage in self._resized:
            self._measure(storage)

    def _count(self, tensor: Tensor) -> None:
        super()._count(_local(tensor))


def accelerator(name: str, utilization: float | None, network: float | None) -> Accelerator:
    """The accelerator of this name, with what is known better; ConfigError for an unknown one."""
    known = {each.name: each for each in ACCELERATORS}
    if name.lower() not in known:
        raise ConfigError(f"--accelerator {name}: unknown; use one of {', '.join(known)}")
    found = known[name.lower()]
    return found._replace(
        utilization=utilization or found.utilization, network=network or found.network
    )


def plan(
    config: Config, on: Accelerator, ranks: int = 1, shard: bool = False, choose: bool = False
) -> RankPlan:
    """A step of `train.batch_size` rows on these ranks, which share out the rows.

    A pass takes `micro_batch_size` rows, or the rank's share of the batch if that is less; with
    `choose` it takes what fits, and with exact sums what 1 to 8 ranks can take. ConfigError if the
    ranks cannot share the batch equally.
    """
    config = in_shares(config, ranks, None if choose else config.train.micro_batch_size)
    train, rows = config.train, config.train.batch_size // ranks
    shared = train.batch_size // max(alike(config, ranks))
    other = not train.gradient_checkpointing
    with one_rank(config, ranks, shard) as measure:
        config = _with_rows(config, rows, 1 if choose else train.micro_batch_size or rows)
        memory, traffic = measure(config)
        free = on.gigabytes * 1e9 - memory.peak
        if choose and free > memory.activations and shared > 1:
            most = min(shared, 1 + int(free / memory.activations))
            size = max(n for n in range(1, most + 1) if shared % n == 0)
            config = _with_rows(config, rows, size)
            memory, traffic = measure(config)
        otherwise, _ = measure(config.with_train(gradient_checkpointing=other))
    flops = cost.training_flops(config.model, config.seq_len, train.gradient_checkpointing)
    peak = on.teraflops * 1e12 * on.utilization
    bandwidth = REACHED * bus(on, ranks)
    sent = sum(SENT[kind] * size for kind, size in traffic.items()) * (ranks - 1) / ranks
    return RankPlan(
        config=config,
        memory=memory,
        memory_otherwise=otherwise.peak,
        traffic=traffic,
        bandwidth=bandwidth,
        compute=flops * rows * config.seq_len / peak,
        communication=sent / bandwidth,
    )


def _with_rows(config: Config, rows: int, most: int) -> Config:
    """The training of one rank, whose passes take the largest divisor of its rows up to `most`."""
    size = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return config.with_train(batch_size=rows, micro_batch_size=size)


def _with_model(config: Config, **settings: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=settings)})


def bus(on: Accelerator, ranks: int) -> float:
    """Bytes per second that each rank can send in a collective of all, at best.

    A ring enters each machine once, over all its network adapters together.
    """
    link = on.link * 1e9
    return link if ranks <= MACHINE else min(link, MACHINE * on.network * 1e9 / 8)


@contextmanager
def one_rank(config: Config, ranks: int, shard: bool) -> Iterator[Measure]:
    """Measures one rank: its memory, and the bytes of a step's collectives by kind."""
    attention = config.model.attention
    if attention.backend == "auto":  # on a CPU this may not be the fused kernel
        attention = attention.model_copy(update={"backend": "sdpa"})
    config = _with_model(config, attention=attention)

    def measure(training: Config) -> tuple[Memory, dict[str, int]]:
        training = training.model_copy(update={"model": config.model})
        memory = dry_run(training, COMPUTE)
        whole = {"all_reduce": 4 * cost.parameter_count(config.model)} if ranks > 1 else {}
        return replace(memory, saving=0), whole  # a GPU's memory is not what saving takes

    if not shard:
        yield measure
        return
    distributed.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield _sharded(config, init_device_mesh("cpu", (ranks,)))
    finally:
        distributed.destroy_process_group()


def _sharded(config: Config, mesh: DeviceMesh) -> Measure:
    """Measures a rank that has its share of every weight, gradient and moment."""
    layers, period = config.model.n_layer, config.model.attention.full_every or 1
    few = FEW + (layers - FEW) % period
    depths = [layers] if layers <= few + period else [few, few + period]
    fake = FakeTensorMode()
    with fake:
        models = [GPT(_with_model(config, n_layer=n).model).train() for n in depths]
        for model in models:
            wrap(model, mesh, config.train.reduce, COMPUTE.dtype)
    counters = [RankCounter(model) for model in models]

    def measure(training: Config) -> tuple[Memory, dict[str, int]]:
        with fake:
            pairs = zip(models, counters, strict=True)
            runs = [_run(model, held, training.train, config.seq_len) for model, held in pairs]
        times = (layers - few) // period
        weights, state, *peaks, gathered, scattered = (
            run[0] + (run[-1] - run[0]) * times for run in zip(*runs, strict=True)
        )
        activations = max(0, max(peaks) - 2 * weights)
        passes, groups = _passes(training.train)
        sums = 1  # that are kept; `Exact` has one for each level of its tree
        if training.train.reduce == "exact":
            sums = max(1, groups.bit_length() - 1)
        return Memory(weights, sums * weights, state, activations, 0), {
            "all_gather": passes * gathered,
            "reduce_scatter": groups * scattered,
        }

    return measure


def _passes(train: TrainConfig) -> tuple[int, int]:
    """The passes of a step, and how often their gradients are added over the ranks."""
    n = train.batch_size // (train.micro_batch_size or train.batch_size)
    return n, n // odd_part(n) if train.reduce == "exact" else n


def _run(model: GPT, held: RankCounter, train: TrainConfig, seq_len: int) -> tuple[int, ...]:
    """Run a few passes and return figures that are each linear in the number of layers:

    bytes of the weights and of the optimizer's state; the peaks until the last block's gradients
    are there, and after; bytes gathered in one pass, and scattered at one sum over the ranks.
    """
    size = train.micro_batch_size or train.batch_size
    passes, groups = _passes(train)
    # A pass may find the sum of a group before, and gradients of its own group.
    synced = [True] * (groups > 1) + [False] * (groups < passes) + [True]
    sums: list[list[Tensor | None]] = []
    moments = Optimizer(model, train, COMPUTE.dtype).state_like().values()
    state = sum(_local(tensor).nbytes for tensor in moments)
    model.gradient_checkpointing = train.gradient_checkpointing
    weights, peaks = held.restart(), [0, 0]

    def keep(part: int) -> None:
        peaks[part], held.peak = max(peaks[part], held.peak), 0

    def at_gradient(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        output.register_hook(lambda _: keep(0))

    hook = model.blocks[max(0, len(model.blocks) - 2)].register_forward_hook(at_gradient)
    with held:
        for sync in synced:
            model.set_requires_gradient_sync(sync)  # type: ignore[operator]
            tokens = torch.zeros(size, seq_len, dtype=torch.long)
            with COMPUTE.autocast():
                mean = loss(model, tokens, tokens)
            mean.backward()
            keep(1)
            if sync and train.reduce == "exact":
                sums.append([parameter.grad for parameter in model.parameters()])
                model.zero_grad()
    hook.remove()
    model.zero_grad()
    moved = held.traffic
    scattered = moved["reduce_scatter"] // sum(synced)
    return weights, state, *peaks, moved["all_gather"] // len(synced), scattered
