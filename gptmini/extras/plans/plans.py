"""Compute memory, traffic and step time of training on N accelerators, without having them.

By formulas alone. Blocks of a sharded rank (FSDP) gather their weights before each pass: matrices
in bfloat16, the type of their products, and norms, embeddings and head in float32.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gptmini.config.settings import Config
from gptmini.errors import ConfigError
from gptmini.machine import Compute
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
# others (scripts/LOG.md: How far are plans from published runs?).
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
COMPUTE = Compute(torch.device("cuda"), torch.bfloat16)
ACCELERATORS_PER_NODE = 8
# The share of a bandwidth that collectives reach.
BANDWIDTH_EFFICIENCY = 0.8
# How often each rank sends a tensor's bytes (less its own share): nccl-tests, PERFORMANCE.md.
SENDS_PER_COLLECTIVE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class RankPlan:
    """The bytes that one rank holds and that a step's collectives carry, and a step's seconds.

    `traffic` has the bytes of whole tensors by kind of collective. `bandwidth` is what one rank
    can send, in bytes per second.
    """

    config: Config  # of the rank, with its rows of a step and of a pass
    memory: Memory
    traffic: dict[str, int]
    bandwidth: float
    compute_seconds: float
    communication_seconds: float

    @property
    def seconds(self) -> float:
        """Communication overlaps with compute, so the slower of the two counts."""
        return max(self.compute_seconds, self.communication_seconds)


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
    shards = world_size if shard else 1
    if choose_micro_batch:
        most = train.batch_size // max(list_equivalent_world_sizes(config, world_size))
        candidates = [_with_rows(config, rows, n) for n in range(1, most + 1) if most % n == 0]
        capacity = accelerator.gigabytes * 1e9
        fitting = [each for each in candidates if compute_memory(each, shards).peak <= capacity]
        config = fitting[-1] if fitting else candidates[0]
    else:
        config = _with_rows(config, rows, train.micro_batch_size or rows)
    traffic = compute_traffic(config, world_size, shard)
    flops = cost.count_training_flops(config.model, config.seq_len, train.gradient_checkpointing)
    peak = accelerator.teraflops * 1e12 * accelerator.utilization
    bandwidth = BANDWIDTH_EFFICIENCY * get_collective_bandwidth(accelerator, world_size)
    carried = sum(SENDS_PER_COLLECTIVE[kind] * size for kind, size in traffic.items())
    sent = carried * (world_size - 1) / world_size
    return RankPlan(
        config=config,
        memory=compute_memory(config, shards),
        traffic=traffic,
        bandwidth=bandwidth,
        compute_seconds=flops * rows * config.seq_len / peak,
        communication_seconds=sent / bandwidth,
    )


def _with_rows(config: Config, rows: int, most: int) -> Config:
    """Give one rank its rows, and its passes the largest divisor of them up to `most`."""
    size = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return config.with_train(batch_size=rows, micro_batch_size=size)


def count_gathered(config: Config) -> tuple[int, int]:
    """Count the numbers that are gathered in bfloat16, of the blocks' matrices, and in float32."""
    parts = cost.count_parameters_by_part(config.model)
    matrices = parts["attention"] + parts["mlp"]
    return matrices, sum(parts.values()) - matrices


def compute_memory(config: Config, shards: int) -> Memory:
    """Compute what a rank holds of the `shards` of a model, with its rows of a pass.

    A sharded rank also holds what is gathered: what lies beside the blocks, whole, and with the
    gradients in float32 that it sends; and two blocks, one of them ahead of its use. It passes
    through all blocks, but updates its share of them: Muon's temporaries are divided, too.
    """
    whole = cost.estimate_memory(config, COMPUTE)
    if shards == 1:
        return whole
    matrices, others = count_gathered(config)
    blocks = 2 * (2 + 4) * matrices // config.model.n_layer
    rows = config.train.micro_batch_size or config.train.batch_size
    kept = rows * config.seq_len * cost.count_bytes_kept_per_token(config, COMPUTE)
    at_peak = max(kept, whole.activations // shards)
    return Memory(
        weights=-(-whole.weights // shards),
        gradients=-(-whole.gradients // shards),
        optimizer=-(-whole.optimizer // shards),
        activations=at_peak + blocks + (4 + 4) * others,
    )


def compute_traffic(config: Config, world_size: int, shard: bool) -> dict[str, int]:
    """Compute the bytes of the collectives of a step.

    Replicas add their gradients once, in float32. Shards are gathered for both passes of every
    micro-batch, and its gradients scattered.
    """
    matrices, others = count_gathered(config)
    if world_size == 1:
        return {}
    if not shard:
        return {"all_reduce": 4 * (matrices + others)}
    passes = config.train.batch_size // (config.train.micro_batch_size or 1)
    return {
        "all_gather": passes * 2 * (2 * matrices + 4 * others),
        "reduce_scatter": passes * 4 * (matrices + others),
    }


def get_collective_bandwidth(accelerator: Accelerator, world_size: int) -> float:
    """Return the bytes per second that each rank can send in a collective of all, at best.

    A ring enters each machine once, over all its network adapters together.
    """
    link = accelerator.link_gb_per_second * 1e9
    if world_size <= ACCELERATORS_PER_NODE:
        return link
    network = ACCELERATORS_PER_NODE * accelerator.network_gbit_per_second * 1e9 / 8
    return min(link, network)
