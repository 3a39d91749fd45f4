"""What a training will take, before it starts: parameters, operations, memory, data, minutes.

Everything but the minutes on this machine is computed without making any weights.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptmini import machine
from gptmini.config.settings import Config, ModelConfig
from gptmini.console import amount, table
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.plan import cost
from gptmini.plan.decide import decide
from gptmini.plan.fit import COMPILE_GAIN, predict_step, proxy, worth_compiling
from gptmini.plan.memory import Memory, dry_run
from gptmini.text.tokens import Corpus

# Dense bfloat16 in TFLOP/s and memory in GB, as their makers state them.
ACCELERATORS = {
    "l4": (121, 24),
    "l40s": (362, 48),
    "rtx4090": (165, 24),
    "a100": (312, 80),
    "h100": (989, 80),
    "h200": (989, 141),
    "b200": (2250, 180),
    "mi300x": (1307, 192),
}
START = 5  # seconds of a command before its steps: imports, text, timing, the first kernels
COMPILING = 12  # seconds, on two cores
EVALUATING = 0.5  # seconds after an evaluation: a sample, a checkpoint


def size(
    asked: Config, cache: Path, accelerator: str | None, utilization: float, devices: int
) -> dict[str, Any]:
    """Everything as JSON data; times are for this machine or for the named accelerators."""
    accelerator = accelerator and accelerator.lower()
    if accelerator is not None and accelerator not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise ConfigError(f"--accelerator {accelerator}: unknown; use one of {known}")
    dtype = asked.train.dtype if accelerator is None else "bfloat16"
    compute = machine.pick_compute(asked.train.device, dtype)
    decision = decide(asked, None, cache, compute=compute, here=False)
    config, corpus = decision.config, decision.corpus
    memory = dry_run(config, compute)
    model, train = config.model, config.train
    tokens = train.steps * train.batch_size * config.seq_len
    flops = cost.training_flops(model, config.seq_len, train.gradient_checkpointing)
    count = cost.parameter_count(model)
    program, waste = 0, 1.0
    if accelerator is not None:
        peak, gigabytes = ACCELERATORS[accelerator]
        when = {
            "on": f"{devices} x {accelerator} at {utilization:.0%} of {peak} TFLOP/s",
            "minutes": flops * tokens / (peak * 1e12 * utilization * devices) / 60,
            "devices": devices,
            "memory": f"the {gigabytes} GB of one {accelerator}",
            "fits": memory.peak < gigabytes * 1e9,
        }
    elif memory.peak > machine.total_memory(compute.device):
        when = {"memory": f"the memory of this machine, {compute.device.type}", "fits": False}
    else:
        program, waste, when = _here(config, corpus, compute)
    other = config.with_train(gradient_checkpointing=not train.gradient_checkpointing)
    return {
        "parameters": {"all": count, **cost.parameters(model)},
        "flops_per_token": {
            "forward": sum(cost.forward_flops(model, config.seq_len).values()),
            "training": flops,
            "six_times_parameters": 6 * count,
        },
        "memory": _bytes(memory, program, waste),
        "memory_otherwise": _bytes(dry_run(other, compute), program, waste)["peak"],
        "micro_batch_size": train.micro_batch_size,
        "checkpointing": train.gradient_checkpointing,
        "cache": _caches(model),
        "tokens": {
            "seen": tokens,
            "an_epoch": sum(map(len, corpus.training)),
            "held_out": sum(map(len, corpus.validation)),
            "epochs": corpus.epochs(
                config.seq_len, train.batch_size, train.steps, config.data.weights
            ),
            "compute_optimal": cost.CHINCHILLA * count,
        },
        "steps": train.steps,
        "time": when,
    }


def _bytes(memory: Memory, program: int, waste: float) -> dict[str, int]:
    """The memory with that of Python and torch, and activations as the allocator holds them."""
    held = replace(memory, activations=int(waste * memory.activations))
    return {**vars(held), "program": program, "peak": held.peak + program}


def _caches(model: ModelConfig) -> list[dict[str, Any]]:
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
                sizes[context] = cost.cache_bytes(model.model_copy(update=changes), context)
            token = cost.cache_bytes(model.model_copy(update={"attention": attention}), 1)
            rows.append({"variant": name, "bytes_per_token": token, "bytes": sizes})
    return rows


def _here(config: Config, corpus: Corpus, compute: Compute) -> tuple[int, float, dict[str, Any]]:
    """Measure steps of this shape on this machine.

    Returns the bytes of the program, the factor by which activations grow in the allocator (glibc's
    heap keeps what is freed and gets up to twice as large as its content), and the times.
    """
    train, small = config.train, proxy(config)
    predict_step(small.with_train(batch_size=1, micro_batch_size=1), compute)
    program = machine.resident_memory(compute.device)
    step = predict_step(config, compute)
    memory = dry_run(small, compute)
    grown = machine.resident_memory(compute.device) - program - memory.weights - memory.gradients
    waste = max(1.0, grown / memory.activations)
    compiled = worth_compiling(config, step.passes * train.steps)
    per_step = step.passes / (COMPILE_GAIN if compiled else 1) + step.update
    # A pass without gradients takes a quarter of both, and evaluation is not compiled.
    tokens = sum(map(len, corpus.validation))
    once = EVALUATING + step.passes / 4 * tokens / (train.batch_size * config.seq_len)
    first = config.base.run is not None  # before the first step
    evaluations = math.ceil(train.steps / train.eval_every) + first
    # The first step allocates for all the others and takes twice the time.
    seconds = START + (train.steps + 1) * per_step + evaluations * once + COMPILING * compiled
    when = {
        "on": f"this machine, {compute.device.type}",
        "seconds_per_step": per_step,
        "compiled": compiled,
        "evaluations": evaluations,
        "seconds_per_evaluation": once,
        "minutes": seconds / 60,
    }
    return program, waste, when


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts of `size` for people."""
    parts, flops, data = facts["parameters"], facts["flops_per_token"], facts["tokens"]
    short = {name: f"{_short(count)}FLOP" for name, count in flops.items()}
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
    return f"""\
{table([("parameters", f"{parts['all']:,}", ""), *shares])}
compute     {short["training"]} per token, {short["forward"]} of it forward
            (6 per parameter would be {short["six_times_parameters"]})
memory      {mib["peak"]} MiB at the peak, micro-batch {facts["micro_batch_size"]}
            weights {mib["weights"]}, gradients {mib["gradients"]}, optimizer {mib["optimizer"]}
            activations {mib["activations"]}, saving {mib["saving"]}, program {mib["program"]}
            {other} gradient checkpointing {facts["memory_otherwise"] / 2**20:,.0f} MiB
{table(caches)}
data        {data["an_epoch"]:,} tokens per epoch, {data["held_out"]:,} held out
            {data["seen"]:,} seen in {amount(facts["steps"], "step")}: {data["epochs"]:.1f} epochs
            compute-optimal: {data["compute_optimal"]:,}, 20 per parameter (Hoffmann 2022)
time        {_time(facts["time"])}""".splitlines()


def _time(when: dict[str, Any]) -> str:
    """Two lines."""
    if not when.get("fits", True):
        return (
            f"the training does not fit in {when['memory']};\n"
            f"{'':12}lower train.micro_batch_size or set train.gradient_checkpointing=true"
        )
    seconds = 60 * when["minutes"]
    time = f"{when['minutes']:,.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
    first = f"{time if seconds >= 1.5 else 'about a second'} on {when['on']}\n{'':12}"
    if "fits" in when:
        fits = f"the training fits in {when['memory']}"
        if when["devices"] > 1:
            by = when["devices"]
            fits += f"\n{'':12}only the time is divided by {by}: gptmini trains on one device"
        return first + fits
    return (
        f"{first}{when['seconds_per_step']:.3f} s per step{', compiled' * when['compiled']}; "
        f"{when['seconds_per_evaluation']:.1f} s per evaluation, {when['evaluations']} in all"
    )


def _short(number: float) -> str:
    """A number with three digits and an SI prefix."""
    power = min(4, max(0, int(math.log10(max(number, 1)) // 3)))
    digits = f"{number / 1000**power:#.3g}".rstrip(".") if power else f"{number:.3g}"
    return f"{digits} {['', 'k', 'M', 'G', 'T'][power]}"
