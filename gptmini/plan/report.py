"""What a training will take, before it starts: parameters, operations, memory, data, time.

Everything but the minutes on this machine is computed without making any weights.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptmini import machine
from gptmini.config.load import fill_open_settings
from gptmini.config.settings import Config, ModelConfig
from gptmini.console import format_count, format_table
from gptmini.data.token_file import Corpus
from gptmini.machine import Compute
from gptmini.plan import cost
from gptmini.plan.decide import decide
from gptmini.plan.memory import Memory, estimate_memory
from gptmini.plan.timing import (
    COMPILE_SPEEDUP,
    estimate_evaluation_seconds,
    is_worth_compiling,
    make_proxy,
    predict_step_time,
)

if TYPE_CHECKING:
    from gptmini.plan.cluster import Accelerator

STARTUP_SECONDS = (
    5  # seconds of a command before its steps: imports, text, timing, the first kernels
)
COMPILE_SECONDS = 12  # seconds, on two cores
INDENT = " " * 12


def estimate_training(
    requested: Config,
    cache: Path,
    accelerator: "Accelerator | None",
    world_size: int = 1,
    shard: bool = False,
) -> dict[str, Any]:
    """Everything as JSON data; times are for this machine or for `world_size` accelerators.

    With an accelerator and `model.vocab_size`, the text is needed only for a tokenizer that is
    named; without it there are no epochs to count. `train.shard` has the effect of `shard`.
    """
    choose = requested.train.micro_batch_size is None
    textless = requested.model.vocab_size is not None and requested.tokenizer.kind == "auto"
    corpus = None
    if accelerator is None:
        compute = machine.pick_compute(requested.train.device, requested.train.dtype)
        decision = decide(requested, None, cache, compute=compute, here=False)
        config, corpus = decision.config, decision.corpus
        found = _estimate_on_this_machine(config, corpus, compute)
    else:
        if textless:
            config = fill_open_settings(
                requested, {"model": {"dropout": requested.model.dropout or 0.0}}
            )
        else:
            compute = Compute(torch.device("cpu"), torch.bfloat16)
            first = requested.with_train(micro_batch_size=requested.train.micro_batch_size or 1)
            decision = decide(
                first, None, cache, compute=compute, here=False, world_size=world_size
            )
            config, corpus = decision.config, decision.corpus
        shard = shard or (config.train.shard and world_size > 1)
        found = _estimate_on_accelerators(config, accelerator, world_size, shard, choose)
    model, train = config.model, config.train
    tokens = train.steps * train.batch_size * config.seq_len
    count = cost.count_parameters(model)
    return {
        "parameters": {"all": count, **cost.count_parameters_by_part(model)},
        "flops_per_token": {
            "forward": sum(cost.count_forward_flops(model, config.seq_len).values()),
            "training": cost.count_training_flops(
                model, config.seq_len, train.gradient_checkpointing
            ),
            "six_times_parameters": 6 * count,
        },
        "checkpointing": train.gradient_checkpointing,
        "cache": _list_cache_sizes(model),
        "tokens": {
            "seen": tokens,
            "compute_optimal": cost.CHINCHILLA_TOKENS_PER_PARAMETER * count,
            **({} if corpus is None else _describe_text(config, corpus)),
        },
        "steps": train.steps,
        **found,
    }


def _describe_text(config: Config, corpus: Corpus) -> dict[str, float]:
    """The tokens of a text, and how often training reads them."""
    train = config.train
    epochs = corpus.count_epochs(config.seq_len, train.batch_size, train.steps, config.data.weights)
    return {
        "an_epoch": sum(map(len, corpus.training)),
        "held_out": corpus.held_out,
        "epochs": epochs,
    }


def _estimate_on_accelerators(
    config: Config, accelerator: "Accelerator", world_size: int, shard: bool, choose: bool
) -> dict[str, Any]:
    """The memory of one accelerator, and the time that `world_size` of them take."""
    from gptmini.plan import cluster as planning  # noqa: PLC0415 - takes a second, for nothing else

    plan = planning.plan_rank(config, accelerator, world_size, shard, choose)
    tokens = config.train.batch_size * config.seq_len / plan.seconds
    return {
        "memory": _memory_to_dict(plan.memory, 0, 1.0),
        "memory_otherwise": plan.memory_otherwise,
        "micro_batch_size": plan.config.train.micro_batch_size,
        "time": {
            "on": f"{world_size:,} x {accelerator.name}{', sharded' * shard}",
            "ranks": world_size,
            "sharded": shard,
            "minutes": config.train.steps * plan.seconds / 60,
            "seconds_per_step": plan.seconds,
            "compute_seconds": plan.compute_seconds,
            "communication_seconds": plan.communication_seconds,
            "tokens_per_second": tokens,
            "tokens_per_second_per_rank": tokens / world_size,
            "collectives": plan.traffic,
            "teraflops": accelerator.teraflops,
            "utilization": accelerator.utilization,
            "bandwidth": plan.bandwidth,
            "reached": planning.BANDWIDTH_EFFICIENCY,
            "machine": planning.ACCELERATORS_PER_NODE,
            "link": accelerator.link_gb_per_second,
            "network": accelerator.network_gbit_per_second,
            "memory": f"the {accelerator.gigabytes} GB of one {accelerator.name}",
            "fits": plan.memory.peak < accelerator.gigabytes * 1e9,
        },
    }


def _memory_to_dict(memory: Memory, program: int, waste: float) -> dict[str, int]:
    """The memory with that of Python and torch, and activations as the allocator holds them."""
    held = replace(memory, activations=int(waste * memory.activations))
    return {**vars(held), "program": program, "peak": held.peak + program}


def _list_cache_sizes(model: ModelConfig) -> list[dict[str, Any]]:
    """The KV cache for every possible number of KV heads, at the context length and beyond."""
    rows = []
    for n in range(model.n_head, 0, -1):
        if model.n_head % n == 0:
            name = {model.n_head: "mha", 1: "mqa"}.get(n, f"gqa:{n}")
            if model.attention.window:
                name += f", window {model.attention.window}"
            attention = model.attention.model_copy(update={"variant": "gqa", "n_kv_head": n})
            sizes = {}
            for context in (model.context_length * times for times in (1, 4, 16)):
                changes = {"attention": attention, "context_length": context}
                sizes[context] = cost.count_cache_bytes(model.model_copy(update=changes), context)
            token = cost.count_cache_bytes(model.model_copy(update={"attention": attention}), 1)
            rows.append({"variant": name, "bytes_per_token": token, "bytes": sizes})
    return rows


def _estimate_on_this_machine(config: Config, corpus: Corpus, compute: Compute) -> dict[str, Any]:
    """Memory and time of this machine."""
    train = config.train
    memory = estimate_memory(config, compute)
    other = estimate_memory(
        config.with_train(gradient_checkpointing=not train.gradient_checkpointing), compute
    )
    if memory.peak > machine.get_total_memory(compute.device):
        program, waste = 0, 1.0
        when = {"memory": f"the memory of this machine, {compute.device.type}", "fits": False}
    else:
        program, waste, when = _measure_steps(config, corpus, compute)
    return {
        "memory": _memory_to_dict(memory, program, waste),
        "memory_otherwise": _memory_to_dict(other, program, waste)["peak"],
        "micro_batch_size": train.micro_batch_size,
        "time": when,
    }


def _measure_steps(
    config: Config, corpus: Corpus, compute: Compute
) -> tuple[int, float, dict[str, Any]]:
    """Measure steps of this shape on this machine.

    Returns the bytes of the program, the factor by which activations grow in the allocator (glibc's
    heap keeps what is freed and gets up to twice as large as its content), and the times.
    """
    train, small = config.train, make_proxy(config)
    predict_step_time(small.with_train(batch_size=1, micro_batch_size=1), compute)
    program = machine.get_resident_memory(compute.device)
    step = predict_step_time(config, compute)
    memory = estimate_memory(small, compute)
    grown = (
        machine.get_resident_memory(compute.device) - program - memory.weights - memory.gradients
    )
    waste = max(1.0, grown / memory.activations)
    compiled = is_worth_compiling(config, step.passes * train.steps)
    per_step = step.passes / (COMPILE_SPEEDUP if compiled else 1) + step.update
    once = estimate_evaluation_seconds(config, step.passes, corpus.held_out)
    first = config.base.run is not None  # before the first step
    evaluations = math.ceil(train.steps / train.eval_every) + first
    # The first step allocates for all the others and takes twice the time.
    seconds = (
        STARTUP_SECONDS
        + (train.steps + 1) * per_step
        + evaluations * once
        + COMPILE_SECONDS * compiled
    )
    when = {
        "on": f"this machine, {compute.device.type}",
        "seconds_per_step": per_step,
        "compiled": compiled,
        "evaluations": evaluations,
        "seconds_per_evaluation": once,
        "minutes": seconds / 60,
    }
    return program, waste, when


def format_report(facts: dict[str, Any]) -> list[str]:
    """The facts of `size` for people."""
    parts, flops, data = facts["parameters"], facts["flops_per_token"], facts["tokens"]
    when = facts["time"]
    short = {name: f"{_format_si(count)}FLOP" for name, count in flops.items()}
    mib = {name: f"{size / 2**20:,.0f}" for name, size in facts["memory"].items()}
    other = "without" if facts["checkpointing"] else "with"
    shares = [
        (f"  {part:10}", f"{count:,}", f"{count / parts['all']:.1%}")
        for part, count in parts.items()
        if part != "all"
    ]
    caches = [("KV cache", "bytes per token", *(f"at {n:,}" for n in facts["cache"][0]["bytes"]))]
    for row in facts["cache"]:
        sizes = (row["bytes_per_token"], *row["bytes"].values())
        caches.append((f"  {row['variant']:10}", *(f"{size:,}" for size in sizes)))
    seen = f"{data['seen']:,} seen in {format_count(facts['steps'], 'step')}"
    if "an_epoch" in data:
        epoch = f"{data['an_epoch']:,} tokens per epoch, {data['held_out']:,} held out"
        seen = f"{epoch}\n{INDENT}{seen}: {data['epochs']:.1f} epochs"
    more = f", saving {mib['saving']}, program {mib['program']}" if "ranks" not in when else ""
    rank = " per rank" if when.get("ranks", 1) > 1 else ""
    return f"""\
{format_table([("parameters", f"{parts['all']:,}", ""), *shares])}
compute     {short["training"]} per token, {short["forward"]} of it forward
            (6 per parameter would be {short["six_times_parameters"]})
memory      {mib["peak"]} MiB{rank} at the peak, micro-batch {facts["micro_batch_size"]}
            weights {mib["weights"]}, gradients {mib["gradients"]}, optimizer {mib["optimizer"]}
            activations {mib["activations"]}{more}
            {other} gradient checkpointing {facts["memory_otherwise"] / 2**20:,.0f} MiB
{format_table(caches)}
data        {seen}
            compute-optimal: {data["compute_optimal"]:,}, 20 per parameter (Hoffmann 2022)
time        {_format_time(facts)}""".splitlines()


def _format_time(facts: dict[str, Any]) -> str:
    """A few lines."""
    when = facts["time"]
    if not when.get("fits", True):
        return f"the training does not fit in {when['memory']};\n{INDENT}{_suggest_savings(facts)}"
    first = f"{_format_long_duration(60 * when['minutes'])} on {when['on']}\n{INDENT}"
    if "fits" in when:
        return first + f"\n{INDENT}".join(_format_speed(when))
    return (
        f"{first}{when['seconds_per_step']:.3f} s per step{', compiled' * when['compiled']}; "
        f"{when['seconds_per_evaluation']:.1f} s per evaluation, {when['evaluations']} in all"
    )


def _suggest_savings(facts: dict[str, Any]) -> str:
    """What would take less memory; at most two things, the most effective first."""
    when = facts["time"]
    ways = {
        "add --shard": when.get("ranks", 1) > 1 and not when["sharded"],
        "lower train.micro_batch_size": facts["micro_batch_size"] > 1,
        "set train.gradient_checkpointing=true": not facts["checkpointing"],
        "lower model.d_model or model.n_layer": True,
    }
    return " or ".join([way for way, possible in ways.items() if possible][:2])


def _format_speed(when: dict[str, Any]) -> list[str]:
    """The speed of accelerators, and what it assumes."""
    speed = f"{when['seconds_per_step']:.3g} s per step, {when['tokens_per_second']:,.0f} tokens/s"
    compute = f"at {when['utilization']:.0%} of {when['teraflops']} TFLOP/s"
    fits = f"the training fits in {when['memory']}"
    if when["ranks"] == 1:
        return [fits, f"{speed}, {compute}"]
    moved = ", ".join(
        f"{_format_si(size)}B {kind.replace('_', '-').removesuffix('e')}ed"
        for kind, size in when["collectives"].items()
    )
    return [
        fits,
        f"{speed}, {when['tokens_per_second_per_rank']:,.0f} per rank",
        f"compute {when['compute_seconds']:.3g} s, {compute}",
        f"meanwhile communication {when['communication_seconds']:.3g} s, "
        f"at {when['bandwidth'] / 1e9:,.0f} GB/s:",
        moved,
        f"({when['reached']:.0%} of {when['link']} GB/s within a machine of {when['machine']}, "
        f"{when['network']:g} Gbit/s per rank between)",
    ]


def _format_long_duration(seconds: float) -> str:
    """In the largest unit of which there are two, but minutes from 60 seconds on."""
    if seconds < 1.5:
        return "about a second"
    if seconds < 60:
        return f"{seconds:.0f} seconds"
    for unit, length in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds / 60:.1f} minutes"


def _format_si(number: float) -> str:
    """A number with three digits and an SI prefix."""
    power = min(4, max(0, int(math.log10(max(number, 1)) // 3)))
    digits = f"{number / 1000**power:#.3g}".rstrip(".") if power else f"{number:.3g}"
    return f"{digits} {['', 'k', 'M', 'G', 'T'][power]}"
