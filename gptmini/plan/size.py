"""What a training will take, before it: parameters, operations, memory, data, minutes.

All but the minutes, here and as `--minutes` plans them, is reckoned without making any weights.
"""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gptmini import machine
from gptmini.config.settings import Config, ModelConfig
from gptmini.errors import ConfigError
from gptmini.plan import cost, fit
from gptmini.plan.memory import Memory, dry_run
from gptmini.text.tokens import Corpus
from gptmini.train.state import settle

# Dense bfloat16 in TFLOP/s, and memory in GB, as their makers state them.
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
START = 5  # seconds of a command beside its steps: imports, text, timing, the first kernels
COMPILING = 12  # seconds, on two cores
EVALUATING = 0.5  # seconds beside the evaluation itself: a sample, a checkpoint


def size(
    config: Config, cache: Path, accelerator: str | None, utilisation: float, devices: int
) -> dict[str, Any]:
    """Everything as JSON data; times are for this machine or for named accelerators."""
    if accelerator is not None and accelerator not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise ConfigError(f"--accelerator {accelerator}: not known; take one of {known}")
    device = machine.pick_device(config.train.device)
    dtype = machine.pick_dtype(config.train, device) if accelerator is None else torch.bfloat16
    config, corpus, rows = settle(config, None, cache, device, dtype, time.perf_counter())
    config, memory = _with_memory(config, device, dtype)
    model, train = config.model, config.train
    tokens = train.steps * train.batch_size * config.seq_len
    flops = cost.training_flops(model, config.seq_len, train.gradient_checkpointing)
    count = cost.parameter_count(model)
    if accelerator is None and memory.peak > machine.memory(device):
        program, waste, when = 0, 1.0, {"on": f"this machine, {device.type}", "fits": False}
    elif accelerator is None:
        program, waste, when = _here(config, corpus, device, dtype)
    else:
        peak, room = ACCELERATORS[accelerator]
        program, waste = 0, 1.0
        when = {
            "on": f"{devices} x {accelerator} at {utilisation:.0%} of {peak} TFLOP/s",
            "minutes": flops * tokens / (peak * 1e12 * utilisation * devices) / 60,
            "fits": memory.peak < room * 1e9,
        }
    other = config.with_train(gradient_checkpointing=not train.gradient_checkpointing)
    return {
        "parameters": {"all": count, **cost.parameters(model)},
        "flops_per_token": {
            "forward": sum(cost.forward_flops(model, config.seq_len).values()),
            "training": flops,
            "six_times_parameters": 6 * count,
        },
        "memory": _bytes(memory, program, waste),
        "memory_otherwise": _bytes(dry_run(other, device, dtype), program, waste)["peak"],
        "micro_batch_size": train.micro_batch_size,
        "checkpointing": train.gradient_checkpointing,
        "cache": _caches(model),
        "tokens": {
            "seen": tokens,
            "an_epoch": sum(map(len, corpus.training)),
            "held_out": sum(map(len, corpus.validation)),
            "epochs": rows.epochs(train.steps),
            "compute_optimal": cost.CHINCHILLA * count,
        },
        "steps": train.steps,
        "time": when,
    }


def _with_memory(config: Config, device: torch.device, dtype: torch.dtype) -> tuple[Config, Memory]:
    """The configuration with the micro-batch that train would choose, and what it holds."""
    if config.train.micro_batch_size is None:
        one = dry_run(config.with_train(micro_batch_size=1), device, dtype)
        windows = fit.windows_at_a_time(config, device, one.activations)
        config = config.with_train(micro_batch_size=windows)
    return config, dry_run(config, device, dtype)


def _bytes(memory: Memory, program: int, waste: float) -> dict[str, int]:
    """The memory with what the program takes, and activations as the allocator holds them."""
    held = replace(memory, activations=int(waste * memory.activations))
    return {**vars(held), "program": program, "peak": held.peak + program}


def _caches(model: ModelConfig) -> list[dict[str, Any]]:
    """The KV cache with as many KV heads as can be, at the context and at longer ones."""
    rows = []
    for n in range(model.n_head, 0, -1):
        if model.n_head % n == 0:
            name = {model.n_head: "mha", 1: "mqa"}.get(n, f"gqa:{n}")
            attention = model.attention.model_copy(update={"variant": "gqa", "n_kv_head": n})
            sizes = {}
            for context in (model.context_length * times for times in (1, 4, 16)):
                changes = {"attention": attention, "context_length": context}
                sizes[context] = cost.cache_bytes(model.model_copy(update=changes), context)
            token = cost.cache_bytes(model.model_copy(update={"attention": attention}), 1)
            rows.append({"variant": name, "bytes_per_token": token, "bytes": sizes})
    return rows


def _here(
    config: Config, corpus: Corpus, device: torch.device, dtype: torch.dtype
) -> tuple[int, float, dict[str, Any]]:
    """What this machine adds: bytes of the program, how many times their size activations take,
    and the time of the whole command; by timing steps of this shape.

    glibc's heap, which keeps what is freed, is up to twice as large as what is in it.
    """
    train = config.train
    machine.keep_freed_memory()
    few = fit.smaller(config)
    fit.predicted_seconds(few.with_train(batch_size=1, micro_batch_size=1), device, dtype)
    program = machine.resident_memory(device)
    passes, updates = fit.predicted_seconds(config, device, dtype)
    held = dry_run(few, device, dtype)
    grown = machine.resident_memory(device) - program - held.weights - held.gradients
    waste = max(1.0, grown / held.activations)
    compiled = fit.compiles(config, passes * train.steps)
    per_step = passes / (fit.COMPILE_GAIN if compiled else 1) + updates
    # A pass without gradients takes a quarter of both, and what is evaluated is not compiled.
    tokens = sum(map(len, corpus.validation))
    once = EVALUATING + passes / 4 * tokens / (train.batch_size * config.seq_len)
    evaluations = math.ceil(train.steps / train.eval_every)
    # The first step takes the memory for all others, and twice the time.
    seconds = START + (train.steps + 1) * per_step + evaluations * once + COMPILING * compiled
    when = {
        "on": f"this machine, {device.type}",
        "seconds_per_step": per_step,
        "compiled": compiled,
        "evaluations": evaluations,
        "seconds_per_evaluation": once,
        "minutes": seconds / 60,
    }
    return program, waste, when


def lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    parts, compute, data = facts["parameters"], facts["flops_per_token"], facts["tokens"]
    found = [f"parameters  {parts['all']:,}"]
    for part, count in parts.items():
        if part != "all":
            found.append(f"  {part:10} {count:>13,}  {count / parts['all']:6.1%}")
    found += [
        f"compute     {_short(compute['training'])}FLOP a token, of which "
        f"{_short(compute['forward'])}FLOP forward (6 a parameter would be "
        f"{_short(compute['six_times_parameters'])}FLOP)",
        *_memory_lines(facts),
        *_cache_lines(facts["cache"]),
        f"data        {data['an_epoch']:,} tokens an epoch, {data['held_out']:,} held out; "
        f"{facts['steps']:,} steps see {data['seen']:,}: {data['epochs']:.1f} epochs",
        f"            compute-optimal would be {data['compute_optimal']:,} tokens, 20 a parameter "
        f"(Hoffmann et al. 2022)",
    ]
    return [*found, *_time_lines(facts["time"])]


def _memory_lines(facts: dict[str, Any]) -> list[str]:
    memory = {name: f"{size / 2**20:,.0f}" for name, size in facts["memory"].items()}
    other = f"{facts['memory_otherwise'] / 2**20:,.0f} MiB"
    return [
        f"memory      {memory['peak']} MiB at the peak of training, {facts['micro_batch_size']} "
        f"windows at a time",
        f"            weights {memory['weights']}, gradients {memory['gradients']}, optimizer "
        f"{memory['optimizer']}, activations {memory['activations']}, saving "
        f"{memory['saving']}, Python and torch {memory['program']}",
        f"            {'without' if facts['checkpointing'] else 'with'} gradient checkpointing "
        f"{other}",
    ]


def _cache_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each variant."""
    contexts = [f"at {context:,}" for context in rows[0]["bytes"]]
    found = ["KV cache    " + "".join(f"{text:>16}" for text in ["bytes a token", *contexts])]
    for row in rows:
        sizes = [row["bytes_per_token"], *row["bytes"].values()]
        found.append(f"  {row['variant']:10}" + "".join(f"{size:>16,}" for size in sizes))
    return found


def _time_lines(when: dict[str, Any]) -> list[str]:
    if not when.get("fits", True):
        return [f"time        none: it does not fit in the memory of {when['on']}"]
    found = [f"time        {when['minutes']:,.1f} minutes on {when['on']}"]
    if "fits" in when:
        return [*found, "            whose memory it fits in"]
    compiled = ", compiled" if when["compiled"] else ""
    return [
        *found,
        f"            {when['seconds_per_step']:.3f} s a step{compiled}; {when['evaluations']} "
        f"evaluations of {when['seconds_per_evaluation']:.1f} s",
    ]


def _short(number: float) -> str:
    """A number with three digits and a prefix of the SI."""
    power = min(4, max(0, int(math.log10(max(number, 1)) // 3)))
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T'][power]}"
