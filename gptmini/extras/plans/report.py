"""Estimate what a training run will take before it starts, and print it, for `gptmini size`.

No weights are made: the minutes follow from the operations, at the speed of a matrix product here.
The estimates are JSON data, which `--json` prints as it is and `format_report` writes for people.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from gptmini import machine
from gptmini.config.settings import Config, ModelConfig
from gptmini.console import format_bytes, format_count, format_duration, format_table
from gptmini.plan import cost
from gptmini.plan.minutes import count_evaluation_in_steps
from gptmini.plan.recipe import count_epochs
from gptmini.plan.settle import Plan, make_plan
from gptmini.plan.timing import Machine, is_worth_compiling

# The best use of compute (Hoffmann et al. 2022).
CHINCHILLA_TOKENS_PER_PARAMETER = 20
INDENT = " " * 12


def estimate_training(requested: Config) -> dict[str, Any]:
    """Estimate everything for this machine, as JSON data."""
    plan = make_plan(requested, None, dry_run=True)
    return describe_training(plan.config, plan) | _estimate_on_this_machine(plan)


def describe_training(config: Config, plan: Plan | None) -> dict[str, Any]:
    """Count what does not depend on the machine; epochs only with a plan, which has the text."""
    model = config.model
    train = config.train
    divisors = [n for n in range(model.n_head, 0, -1) if model.n_head % n == 0]
    count = cost.count_parameters(model)
    forward_flops = cost.count_forward_flops(model, config.seq_len)
    training_flops = cost.count_training_flops(model, config.seq_len, train.gradient_checkpointing)
    tokens: dict[str, float] = {
        "seen": train.steps * train.batch_size * config.seq_len,
        "compute_optimal": CHINCHILLA_TOKENS_PER_PARAMETER * count,
    }
    if plan is not None:
        tokens |= {
            "an_epoch": plan.text_size.total,
            "held_out": plan.corpus.held_out,
            "epochs": count_epochs(plan.config, plan.text_size),
        }
    return {
        "parameters": {"all": count} | cost.count_parameters_by_part(model),
        "flops_per_token": {"forward": sum(forward_flops.values()), "training": training_flops},
        "cache": [_describe_cache(model, n) for n in divisors],
        "tokens": tokens,
        "steps": train.steps,
    }


def describe_memory(memory: cost.Memory, program: int) -> dict[str, int]:
    """Add the bytes of Python and torch."""
    return {**asdict(memory), "program": program, "peak": memory.peak + program}


def _describe_cache(model: ModelConfig, n_kv_head: int) -> dict[str, Any]:
    """Describe the KV cache that the model would need with `n_kv_head` KV heads."""
    attention = model.attention.model_copy(update={"variant": "gqa", "n_kv_head": n_kv_head})
    grouped = model.model_copy(update={"attention": attention})
    names = {model.n_head: "mha", 1: "mqa"}
    name = names.get(n_kv_head, f"gqa:{n_kv_head}")
    if model.attention.window:
        name += f", window {model.attention.window}"
    return {
        "variant": name,
        "bytes_per_token": cost.count_cache_bytes(grouped, 1),
        "context": model.context_length,
        "bytes": cost.count_cache_bytes(grouped, model.context_length),
    }


def _estimate_on_this_machine(plan: Plan) -> dict[str, Any]:
    """Estimate the memory and the time that this machine takes."""
    config = plan.config
    compute = plan.machine.compute
    train = config.train
    memory = cost.estimate_memory(config, compute)
    program = machine.get_resident_memory(compute.device)
    if memory.peak > plan.machine.get_total_memory():
        time = {"memory": f"the memory of this machine, {compute.device.type}", "fits": False}
    else:
        time = _estimate_time(config, plan.corpus.held_out, plan.machine)
    return {
        "memory": describe_memory(memory, program),
        "micro_batch_size": train.micro_batch_size,
        "time": time,
    }


def _estimate_time(config: Config, held_out: int, here: Machine) -> dict[str, Any]:
    """Estimate how long training takes, with its evaluations."""
    train = config.train
    per_step = here.estimate_seconds_per_step(config)
    per_evaluation = per_step * count_evaluation_in_steps(config, held_out)
    evaluations = math.ceil(train.steps / train.eval_every)
    if config.base.run is not None:
        evaluations += 1  # of the base, before the first step
    compiled = is_worth_compiling(config, per_step * train.steps, here)
    seconds = evaluations * per_evaluation + train.steps * per_step
    return {
        "on": f"this machine, {here.compute.device.type}",
        "seconds_per_step": per_step,
        "compiled": compiled,
        "evaluations": evaluations,
        "seconds_per_evaluation": per_evaluation,
        "minutes": seconds / 60,
    }


# -- the report in words ---------------------------------------------------------------------------


def format_report(facts: dict[str, Any], speed: list[str] | None = None) -> list[str]:
    """Write the estimates for people, in lines; `speed` are those of another machine than this."""
    parts = facts["parameters"]
    mflop = {name: f"{n / 1e6:,.1f} MFLOP" for name, n in facts["flops_per_token"].items()}
    memory = {name: format_bytes(size) for name, size in facts["memory"].items()}
    optimal = facts["tokens"]["compute_optimal"]
    time = facts["time"]
    rank = " per rank" if time.get("ranks", 1) > 1 else ""
    more = "" if "ranks" in time else f", program {memory['program']}"
    return f"""\
{_format_parameters(parts)}
compute     {mflop["training"]} per token, {mflop["forward"]} of it forward
memory      about {memory["peak"]}{rank} at the peak, micro-batch {facts["micro_batch_size"]}
            weights {memory["weights"]}, gradients {memory["gradients"]}
            optimizer {memory["optimizer"]}, activations {memory["activations"]}{more}
{_format_caches(facts["cache"])}
data        {_format_tokens(facts)}
            compute-optimal: {optimal:,}, 20 per parameter (Hoffmann 2022)
time        {_format_time(facts, speed or [])}""".splitlines()


def _format_parameters(parts: dict[str, int]) -> str:
    """Write a table of the parameters and the share of each part."""
    rows = [("parameters", f"{parts['all']:,}", "")]
    for part, count in parts.items():
        if part != "all":
            rows.append((f"  {part:10}", f"{count:,}", f"{count / parts['all']:.1%}"))
    return format_table(rows)


def _format_caches(caches: list[dict[str, Any]]) -> str:
    """Write a table of KV caches, a row for each variant."""
    rows = [["KV cache", "bytes per token", f"at {caches[0]['context']:,}"]]
    for cache in caches:
        name = f"  {cache['variant']:10}"
        rows.append([name, f"{cache['bytes_per_token']:,}", f"{cache['bytes']:,}"])
    return format_table(rows)


def _format_tokens(facts: dict[str, Any]) -> str:
    """Write how many tokens training sees, and how often those of the text if there is one."""
    tokens = facts["tokens"]
    seen = f"{tokens['seen']:,} seen in {format_count(facts['steps'], 'step')}"
    if "an_epoch" not in tokens:
        return seen
    return _join_lines(
        [
            f"{tokens['an_epoch']:,} tokens per epoch, {tokens['held_out']:,} held out",
            f"{seen}: {tokens['epochs']:.1f} epochs",
        ]
    )


def _format_time(facts: dict[str, Any], speed: list[str]) -> str:
    """Write how long the run takes, or that it does not fit."""
    time = facts["time"]
    if not time.get("fits", True):
        return _join_lines(
            [
                f"the run does not fit in {time['memory']};",
                "set train.micro_batch_size=1 and train.gradient_checkpointing=true,",
                "or lower model.d_model or model.n_layer",
            ]
        )
    duration = f"about {format_duration(max(1, 60 * time['minutes']))} on {time['on']}"
    if not speed:
        compiled = ", compiled" if time["compiled"] else ""
        speed = [
            f"{time['seconds_per_step']:.3f} s per step{compiled}; "
            f"{time['seconds_per_evaluation']:.1f} s per evaluation, {time['evaluations']} in all"
        ]
    return _join_lines([duration, *speed])


def _join_lines(lines: Iterable[str]) -> str:
    return f"\n{INDENT}".join(lines)
