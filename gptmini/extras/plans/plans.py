"""Compute memory, traffic and step time of training on N accelerators, without having them.

By formulas alone. Blocks of a sharded rank (FSDP) gather their weights before each pass: matrices
in bfloat16, the type of their products, and norms, embeddings and head in float32.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gptmini.config.settings import Config
from gptmini.console import format_bytes
from gptmini.doors import load_replicas
from gptmini.errors import ConfigError
from gptmini.extras.plans.report import describe_memory, describe_training
from gptmini.machine import Compute
from gptmini.plan import cost
from gptmini.plan.cost import Memory
from gptmini.plan.settle import Plan, make_plan

MIN_SECONDS_PER_STEP = 0.01  # a thousand kernels take about as long to start


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
    replicas = load_replicas()
    config = replicas.split_batch(config, world_size, is_micro_batch_stated=not choose_micro_batch)
    train = config.train
    rows = train.batch_size // world_size
    shards = world_size if shard else 1
    if choose_micro_batch:
        most = train.batch_size // max(replicas.list_equivalent_world_sizes(config, world_size))
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


# -- what `gptmini size` prints of them ------------------------------------------------------------


def estimate_on_accelerators(
    requested: Config, accelerator: Accelerator, world_size: int, shard: bool
) -> dict[str, Any]:
    """Estimate everything for `world_size` accelerators, as JSON data.

    With `model.vocab_size`, the text is needed only for a tokenizer that is named; without it there
    are no epochs to count. Setting `train.shard` does the same as `shard`.
    """
    shard = shard or (requested.train.shard and world_size > 1)
    config, settled = _plan_for_accelerators(requested.with_train(shard=shard), world_size)
    is_micro_batch_open = requested.train.micro_batch_size is None
    plan = plan_rank(config, accelerator, world_size, shard, is_micro_batch_open)
    tokens_per_second = config.train.batch_size * config.seq_len / plan.seconds
    sharded = ", sharded" if shard else ""
    return describe_training(config, settled) | {
        "memory": describe_memory(plan.memory, 0),
        "micro_batch_size": plan.config.train.micro_batch_size,
        "time": {
            "on": f"{world_size:,} x {accelerator.name}{sharded}",
            "ranks": world_size,
            "sharded": shard,
            "minutes": config.train.steps * plan.seconds / 60,
            "seconds_per_step": plan.seconds,
            "compute_seconds": plan.compute_seconds,
            "communication_seconds": plan.communication_seconds,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_rank": tokens_per_second / world_size,
            "collectives": plan.traffic,
            "teraflops": accelerator.teraflops,
            "utilization": accelerator.utilization,
            "bandwidth": plan.bandwidth,
            "link": accelerator.link_gb_per_second,
            "network": accelerator.network_gbit_per_second,
            "memory": f"the {accelerator.gigabytes} GB of one {accelerator.name}",
            "fits": plan.memory.peak <= accelerator.gigabytes * 1e9,
        },
    }


def _plan_for_accelerators(requested: Config, world_size: int) -> tuple[Config, Plan | None]:
    """Settle what the accelerators leave open; without a plan where no text is needed."""
    if requested.model.vocab_size is not None and requested.tokenizer.kind == "auto":
        model = {"dropout": requested.model.dropout or 0.0}
        return requested.fill_open({"model": model}), None
    # The device is not this machine's, and an open micro-batch is left to `plan_rank`.
    elsewhere = requested.with_train(
        device="cpu", dtype="bfloat16", micro_batch_size=requested.train.micro_batch_size or 1
    )
    plan = make_plan(elsewhere, None, dry_run=True, world_size=world_size)
    return plan.config, plan


def format_speed(time: dict[str, Any]) -> list[str]:
    """Write the speed of accelerators, and what it assumes."""
    speed = f"{time['seconds_per_step']:.3g} s per step, {time['tokens_per_second']:,.0f} tokens/s"
    compute = f"at {time['utilization']:.0%} of {time['teraflops']} TFLOP/s"
    fits = f"the run fits in {time['memory']}"
    if time["seconds_per_step"] < MIN_SECONDS_PER_STEP:
        fits = "too small for this estimate: starting its kernels takes longer"
    if time["ranks"] == 1:
        return [fits, f"{speed}, {compute}"]
    collectives = [
        f"{format_bytes(size)} {kind.replace('_', '-').removesuffix('e')}ed"  # all-gathered
        for kind, size in time["collectives"].items()
    ]
    return [
        fits,
        f"{speed}, {time['tokens_per_second_per_rank']:,.0f} per rank",
        f"compute {time['compute_seconds']:.3g} s, {compute}",
        f"meanwhile communication {time['communication_seconds']:.3g} s, "
        f"at {time['bandwidth'] / 1e9:,.0f} GB/s:",
        ", ".join(collectives),
        f"({BANDWIDTH_EFFICIENCY:.0%} of {time['link']} GB/s within a machine of "
        f"{ACCELERATORS_PER_NODE}, {time['network']:g} Gbit/s per rank between)",
    ]
