"""Estimate memory, traffic and step time of training on N accelerators without having them.

A sharded rank is run dry: training's own shards on tensors without storage, and PyTorch's fake
process group in place of the other ranks. Blocks are alike, so a few are run and the rest is
multiplied.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gptmini.config.settings import Config, TrainConfig
from gptmini.console import show_elapsed
from gptmini.distributed.sharding import apply_fsdp
from gptmini.errors import ConfigError
from gptmini.extras.cluster.dry_run import StorageCounter, estimate_memory
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan import cost
from gptmini.plan.cost import Memory
from gptmini.plan.timing import list_equivalent_world_sizes, split_batch


class Accelerator(NamedTuple):
    """An accelerator: what its maker states, and the share of it that training runs reach."""

    name: str
    teraflops: int  # dense bfloat16
    gigabytes: int
    link_gb_per_second: int  # GB/s in each direction to the others in its machine
    network_gbit_per_second: float  # Gbit/s to other machines
    utilization: float = 0.4  # share of the peak


# Links are NVLink, Infinity Fabric, or PCIe 4 where there is neither. Networks are those of servers
# with eight: DGX, AWS g6 and g6e, AMD's platform; 100 Gbit/s shared by eight for the rtx4090.
# Utilization is near the median of published runs for a100 and h100, and that of the h100 for the
# others (scripts/LOG.md, 2026-11-22).
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
SIMULATED_COMPUTE = Compute(torch.device("cpu"), torch.bfloat16)
ACCELERATORS_PER_NODE = 8
# The share of a bandwidth that collectives reach.
BANDWIDTH_EFFICIENCY = 0.8
# How often each rank sends a tensor's bytes (less its own share): nccl-tests, PERFORMANCE.md.
SENDS_PER_COLLECTIVE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
# The collective behind an operator, and which of the operator's arguments is the whole tensor.
COLLECTIVE_OPERATORS = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
}
# Blocks that are run; with three, FSDP has gathered, used and freed one.
SIMULATED_BLOCKS = 3

# Takes one rank of a run; returns its memory, and the bytes of a step's collectives by kind.
MeasureRank = Callable[[Config], tuple[Memory, dict[str, int]]]


@dataclass(frozen=True)
class RankPlan:
    """The bytes that one rank holds and that a step's collectives carry, and a step's seconds.

    `traffic` has the bytes of whole tensors by kind of collective. `bandwidth` is what one rank
    can send, in bytes per second.
    """

    config: Config  # of the rank, with its rows of a step and of a pass
    memory: Memory
    memory_otherwise: int  # the peak with gradient checkpointing switched
    traffic: dict[str, int]
    bandwidth: float
    compute_seconds: float
    communication_seconds: float

    @property
    def seconds(self) -> float:
        """Communication overlaps with compute, so the slower of the two counts."""
        return max(self.compute_seconds, self.communication_seconds)


def _get_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class RankCounter(StorageCounter):
    """Counts what one rank of a sharded model holds, and the bytes of its collectives.

    FSDP frees and refills the tensors that it gathers by resizing their storages. No operator
    shows that, so every storage that FSDP's operators have touched is measured again before each
    operator.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self._resized: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for parameter in model.parameters():
            self._count(parameter)
        for buffer in model.buffers():
            self._count(buffer)

    def restart(self) -> int:
        """Start to count peak and traffic anew; returns the bytes held now."""
        self.traffic = dict.fromkeys(SENDS_PER_COLLECTIVE, 0)
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
        if func._opname in COLLECTIVE_OPERATORS:
            kind, position = COLLECTIVE_OPERATORS[func._opname]
            self.traffic[kind] += args[position].nbytes
        return result

    def _refresh(self) -> None:
        for storage in self._resized:
            self._measure(storage)

    def _count(self, tensor: Tensor) -> None:
        super()._count(_get_local(tensor))


def find_accelerator(name: str, utilization: float | None, network: float | None) -> Accelerator:
    """Find an accelerator by name; `utilization` and `network` replace what is assumed of it.

    Raises ConfigError for an unknown one.
    """
    known = {each.name: each for each in ACCELERATORS}
    if name.lower() not in known:
        raise ConfigError(f"--accelerator {name}: unknown; use one of {', '.join(known)}")
    found = known[name.lower()]
    return found._replace(
        utilization=utilization or found.utilization,
        network_gbit_per_second=network or found.network_gbit_per_second,
    )


@show_elapsed("simulating a rank")
def plan_rank(
    config: Config,
    accelerator: Accelerator,
    world_size: int = 1,
    shard: bool = False,
    choose_micro_batch: bool = False,
) -> RankPlan:
    """Plan a step of `train.batch_size` rows on these ranks, which share out the rows.

    A pass takes `micro_batch_size` rows, or the rank's share of the batch if that is less. With
    `choose_micro_batch` it takes what fits, and with exact sums what 1 to 8 ranks can take. Raises
    ConfigError if the ranks cannot share the batch equally.
    """
    config = config.with_train(shard=shard)
    config = split_batch(config, world_size, is_micro_batch_stated=not choose_micro_batch)
    train = config.train
    rows = train.batch_size // world_size
    otherwise = {"gradient_checkpointing": not train.gradient_checkpointing}
    with simulate_rank(config, world_size, shard) as measure:
        if choose_micro_batch:
            capacity = accelerator.gigabytes * 1e9
            shared_rows = train.batch_size // max(list_equivalent_world_sizes(config, world_size))
            size = _choose_rows_per_pass(
                _with_rows(config, rows, 1), measure, capacity, shared_rows
            )
        else:
            size = train.micro_batch_size or rows
        config = _with_rows(config, rows, size)
        memory, traffic = measure(config)
        memory_otherwise, _ = measure(config.with_train(**otherwise))
    flops = cost.count_training_flops(config.model, config.seq_len, train.gradient_checkpointing)
    peak = accelerator.teraflops * 1e12 * accelerator.utilization
    bandwidth = BANDWIDTH_EFFICIENCY * get_collective_bandwidth(accelerator, world_size)
    carried = sum(SENDS_PER_COLLECTIVE[kind] * size for kind, size in traffic.items())
    sent = carried * (world_size - 1) / world_size
    return RankPlan(
        config=config,
        memory=memory,
        memory_otherwise=memory_otherwise.peak,
        traffic=traffic,
        bandwidth=bandwidth,
        compute_seconds=flops * rows * config.seq_len / peak,
        communication_seconds=sent / bandwidth,
    )


def _choose_rows_per_pass(
    config: Config, measure: MeasureRank, capacity: float, shared_rows: int
) -> int:
    """Choose the largest divisor of `shared_rows` that fits, from the memory of a single row."""
    if shared_rows == 1:
        return 1
    memory, _ = measure(config)
    free = capacity - memory.peak
    if free <= memory.activations:
        return 1
    most = min(shared_rows, 1 + int(free / memory.activations))
    return max(size for size in range(1, most + 1) if shared_rows % size == 0)


def _with_rows(config: Config, rows: int, most: int) -> Config:
    """Give one rank its rows, and its passes the largest divisor of them up to `most`."""
    size = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return config.with_train(batch_size=rows, micro_batch_size=size)


def _with_model(config: Config, **settings: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=settings)})


def get_collective_bandwidth(accelerator: Accelerator, world_size: int) -> float:
    """Return the bytes per second that each rank can send in a collective of all, at best.

    A ring enters each machine once, over all its network adapters together.
    """
    link = accelerator.link_gb_per_second * 1e9
    if world_size <= ACCELERATORS_PER_NODE:
        return link
    network = ACCELERATORS_PER_NODE * accelerator.network_gbit_per_second * 1e9 / 8
    return min(link, network)


@contextmanager
def simulate_rank(config: Config, world_size: int, shard: bool) -> Iterator[MeasureRank]:
    """Simulate one rank, and yield a function that measures it."""
    attention = config.model.attention
    if attention.backend == "auto":  # on a CPU this may not be the fused kernel
        attention = attention.model_copy(update={"backend": "sdpa"})
    config = _with_model(config, attention=attention)
    if not shard:
        yield _simulate_replica(config, world_size)
        return
    distributed.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield _simulate_sharded_rank(config, init_device_mesh("cpu", (world_size,)))
    finally:
        distributed.destroy_process_group()


def _simulate_replica(config: Config, world_size: int) -> MeasureRank:
    """Simulate a rank that holds the whole model and adds its gradients to those of the others."""
    traffic = {}
    if world_size > 1:
        traffic["all_reduce"] = 4 * cost.count_parameters(config.model)

    def measure(training: Config) -> tuple[Memory, dict[str, int]]:
        training = training.model_copy(update={"model": config.model})
        return estimate_memory(training, SIMULATED_COMPUTE), traffic

    return measure


@dataclass(frozen=True)
class PassFigures:
    """Bytes that a few passes of a sharded rank take; each is linear in the number of blocks.

    The two peaks are those until the last block's gradients are there, and after. `gathered` is for
    one pass, `scattered` for one sum of gradients over the ranks.
    """

    weights: int
    optimizer: int
    peak_until_last_gradients: int
    peak_after: int
    gathered: int
    scattered: int

    def extrapolate(self, deeper: "PassFigures", times: int) -> "PassFigures":
        """Add `times` the difference to a deeper model."""
        pairs = zip(astuple(self), astuple(deeper), strict=True)
        return PassFigures(*(few + (more - few) * times for few, more in pairs))


def _simulate_sharded_rank(config: Config, mesh: DeviceMesh) -> MeasureRank:
    """Simulate a rank that holds its share of every weight, gradient and moment.

    Blocks are alike, so two models of a few blocks give the figures of any depth. Both must have
    the pattern of windows whole, of which `full_every` blocks make a period.
    """
    layers = config.model.n_layer
    period = config.model.attention.full_every or 1
    few = SIMULATED_BLOCKS + (layers - SIMULATED_BLOCKS) % period
    depths = [layers] if layers <= few + period else [few, few + period]
    fake = FakeTensorMode()
    models = []
    with fake:
        for depth in depths:
            model = GPT(_with_model(config, n_layer=depth).model).train()
            apply_fsdp(model, mesh, SIMULATED_COMPUTE.dtype)
            models.append(model)
    counters = [RankCounter(model) for model in models]

    def measure(training: Config) -> tuple[Memory, dict[str, int]]:
        train = training.train
        with fake:
            runs = [
                _run_passes(model, counter, train, config.seq_len)
                for model, counter in zip(models, counters, strict=True)
            ]
        whole = runs[0].extrapolate(runs[-1], times=(layers - few) // period)
        peak = max(whole.peak_until_last_gradients, whole.peak_after)
        activations = max(0, peak - 2 * whole.weights)
        passes = _count_passes(train)
        memory = Memory(
            weights=whole.weights,
            gradients=whole.weights,
            optimizer=whole.optimizer,
            activations=activations,
        )
        traffic = {
            "all_gather": passes * whole.gathered,
            "reduce_scatter": passes * whole.scattered,
        }
        return memory, traffic

    return measure


def _count_passes(train: TrainConfig) -> int:
    return train.batch_size // (train.micro_batch_size or train.batch_size)


def _run_passes(model: GPT, counter: RankCounter, train: TrainConfig, seq_len: int) -> PassFigures:
    """Run a pass, and a second one that finds its gradients in memory; count their bytes."""
    size = train.micro_batch_size or train.batch_size
    passes = min(2, _count_passes(train))
    moments = Optimizer(model, train, SIMULATED_COMPUTE.dtype).expected_state_dict().values()
    state = sum(_get_local(tensor).nbytes for tensor in moments)
    model.gradient_checkpointing = train.gradient_checkpointing
    weights = counter.restart()
    peak_until_last_gradients = 0
    peak_after = 0

    def split_peak() -> None:
        nonlocal peak_until_last_gradients
        peak_until_last_gradients = max(peak_until_last_gradients, counter.peak)
        counter.peak = 0

    def split_peak_at_gradient(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        output.register_hook(lambda _: split_peak())

    # The output of the block before the last gets its gradient once the last block has its own.
    block_before_last = model.blocks[max(0, len(model.blocks) - 2)]
    hook = block_before_last.register_forward_hook(split_peak_at_gradient)
    with counter:
        for _ in range(passes):
            tokens = torch.zeros(size, seq_len, dtype=torch.long)
            with SIMULATED_COMPUTE.autocast():
                mean = model(tokens, tokens)
            mean.backward()
            peak_after = max(peak_after, counter.peak)
            counter.peak = 0
    hook.remove()
    model.zero_grad()
    return PassFigures(
        weights=weights,
        optimizer=state,
        peak_until_last_gradients=peak_until_last_gradients,
        peak_after=peak_after,
        gathered=counter.traffic["all_gather"] // passes,
        scattered=counter.traffic["reduce_scatter"] // passes,
    )
