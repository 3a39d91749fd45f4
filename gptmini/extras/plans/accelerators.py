"""Estimate a training run on N accelerators, and print what `gptmini size` adds for them."""

from typing import Any

from gptmini.config.settings import Config
from gptmini.extras.plans import plans
from gptmini.extras.plans.plans import Accelerator
from gptmini.extras.plans.report import describe_memory, describe_training, format_si
from gptmini.plan.plan import Plan
from gptmini.plan.settle import make_plan

MIN_SECONDS_PER_STEP = 0.01  # a thousand kernels take about as long to start


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
    plan = plans.plan_rank(config, accelerator, world_size, shard, is_micro_batch_open)
    tokens_per_second = config.train.batch_size * config.seq_len / plan.seconds
    sharded = ", sharded" if shard else ""
    return describe_training(config, settled) | {
        "memory": describe_memory(plan.memory, 0),
        "memory_otherwise": plan.memory_otherwise,
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
        f"{format_si(size)}B {kind.replace('_', '-').removesuffix('e')}ed"  # all-gathered
        for kind, size in time["collectives"].items()
    ]
    return [
        fits,
        f"{speed}, {time['tokens_per_second_per_rank']:,.0f} per rank",
        f"compute {time['compute_seconds']:.3g} s, {compute}",
        f"meanwhile communication {time['communication_seconds']:.3g} s, "
        f"at {time['bandwidth'] / 1e9:,.0f} GB/s:",
        ", ".join(collectives),
        f"({plans.BANDWIDTH_EFFICIENCY:.0%} of {time['link']} GB/s within a machine of "
        f"{plans.ACCELERATORS_PER_NODE}, {time['network']:g} Gbit/s per rank between)",
    ]
