"""The first run: training. Ceilings of the machine, speed and its causes, equal bits, tests.

Each part yields what it finds, as it finds it.
"""

import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.data.corpus import prepare_corpus
from gptmini.errors import Stopped
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.kernels import overwrite_by_softmax_
from gptmini.plan.fit import compile_blocks, time_step
from gptmini.plan.memory import estimate_memory
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from gptmini.train.step import train_step
from gpu_check.check import (
    SMALL_MODEL,
    Check,
    Facts,
    Settings,
    compute_speed,
    describe_error,
    find_peak_flops,
    free_memory,
    list_kernels,
    time_repeats,
)

ROOT = Path(__file__).parents[2]
PROFILED_STEPS = 3
KERNELS_SHOWN = 25
# nanoGPT's bench.py divides by the peak of an A100; its time per iteration is what we compare.
NANOGPT_RESULT = re.compile(r"time per iteration: ([\d.]+)ms")


def setup(check: Check) -> Facts:
    """The machine, and the text in tokens."""
    yield "Python", platform.python_version()
    yield "torch", torch.__version__
    yield "CUDA", torch.version.cuda
    yield "type", str(check.compute.dtype)
    yield "GPU", machine.describe_device(check.compute.device)
    yield "memory", machine.get_total_memory(check.compute.device)
    yield "peak FLOP/s", find_peak_flops()
    started = time.perf_counter()
    corpus = prepare_corpus(check.build_config(), check.cache)
    yield "seconds to prepare", time.perf_counter() - started
    kind = corpus.tokenizer.kind
    if kind == "pairs":
        kind = "pairs of bytes, for want of gpt2"
    yield "tokenizer", f"{kind}, {corpus.tokenizer.vocab_size:,} tokens"
    yield "training tokens", sum(map(len, corpus.training))


def ceilings(check: Check) -> Facts:
    """What the machine can do at best: products, copies, launches, waits."""
    compute = check.compute
    size = 256 if check.small else 8192
    repeats = 3 if check.small else 20
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(size, size, device=compute.device, dtype=dtype)
        b = torch.randn(size, size, device=compute.device, dtype=dtype)
        seconds = time_repeats(compute, lambda a=a, b=b: a @ b, repeats)  # type: ignore[misc]
        yield f"product of {size} x {size} in {dtype}, TFLOP/s", 2 * size**3 / seconds / 1e12
    source = torch.empty(size * size * 4, device=compute.device)
    target = torch.empty_like(source)
    seconds = time_repeats(compute, lambda: target.copy_(source), repeats)
    yield "copy, read and written, GB/s", 2 * source.nbytes / seconds / 1e9
    one = torch.ones(1, device=compute.device)

    def launch_thousand() -> None:
        for _ in range(1000):
            one.mul_(1)

    yield "launch of a kernel, µs", 1e3 * time_repeats(compute, launch_thousand, 3)
    yield "wait for the device, µs", 1e6 * time_repeats(compute, one.item, 100)


def train(check: Check) -> Facts:
    """A hundred steps by `gptmini.fit`, not compiled and compiled."""
    for compiled in ("off",) if check.small else ("off", "on"):
        config = check.build_config(compile=compiled)
        try:
            lines = check.fit(config, f"train-{compiled}")
        except Exception as error:
            yield f"compile {compiled}", describe_error(error)
            continue
        settled = [line["tokens_per_second"] for line in lines[len(lines) // 5 :]]
        seconds = config.train.batch_size * config.seq_len / statistics.median(settled)
        last = {key: lines[-1][key] for key in ("val_loss", "val_bpb", "peak_memory")}
        yield f"compile {compiled}", compute_speed(config, seconds) | last
        yield f"losses, compile {compiled}", [round(line["train_loss"], 4) for line in lines]


def nanogpt(check: Check) -> Facts:
    """The time of a step of nanoGPT's bench.py on the same model and batch, beside ours."""
    if check.nanogpt is None:
        yield "skipped", "give the folder of a checkout with --nanogpt"
        return
    rows = 1 if check.small else 16
    config = check.build_config(batch_size=rows, micro_batch_size=rows)
    for setting in ("auto", "off"):  # nanoGPT's bits vary as well
        changed = config.with_train(deterministic=setting)
        compute = pick_compute_of(changed)
        step = time_step(changed, compute, 3 if check.small else 20, compiled=not check.small)
        yield f"gptmini, deterministic {setting}", compute_speed(config, step.passes + step.update)
    options = [f"--batch_size={rows}", "--real_data=False", "--bias=True"]
    if check.small:
        options += ["--device=cpu", "--dtype=float32", "--compile=False", "--block_size=8"]
    done = subprocess.run(
        [sys.executable, "bench.py", *options],
        cwd=check.nanogpt,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-2000:], done.stderr[-2000:])
    found = NANOGPT_RESULT.search(done.stdout)
    if found is None:
        sys.exit("bench.py printed no time per iteration")
    yield "nanoGPT", compute_speed(config, float(found[1]) / 1e3)


def profile_steps(check: Check) -> Facts:
    """Which kernels take the time of a step, how long the GPU is idle, how often the host waits."""
    compiled = "off" if check.small else "on"
    first = 2 if check.small else 12
    config = check.build_config(compile=compiled, steps=first + PROFILED_STEPS + 2)
    activities = [ProfilerActivity.CPU]
    if check.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    stack = ExitStack()
    recorded: Settings = {}

    def profiled_step(training: Any) -> dict[str, Any]:
        if training.step == first:
            training.compute.synchronize()
            recorded["profiler"] = stack.enter_context(profile(activities=activities))
            recorded["started"] = time.perf_counter()
        metrics = train_step(training)
        if training.step == first + PROFILED_STEPS - 1:
            training.compute.synchronize()
            recorded["seconds"] = time.perf_counter() - recorded["started"]
            stack.close()
        if training.step == first + PROFILED_STEPS:
            recorded["waits"] = count_waits(training)
        return metrics

    with mock.patch.object(loop, "train_step", profiled_step):
        check.fit(config, "profile")
    kernels = list_kernels(recorded["profiler"].key_averages(), check.device)
    total = sum(microseconds for microseconds, _ in kernels)
    yield "ms per step", 1e3 * recorded["seconds"] / PROFILED_STEPS
    yield "ms of kernels per step", total / 1e3 / PROFILED_STEPS
    yield "busy", total / 1e6 / recorded["seconds"]
    yield "kernels per step", sum(event.count for _, event in kernels) / PROFILED_STEPS
    yield "host waits per step", recorded["waits"]
    for microseconds, event in kernels[:KERNELS_SHOWN]:
        row = {
            "calls": event.count / PROFILED_STEPS,
            "ms": microseconds / 1e3 / PROFILED_STEPS,
            "share": microseconds / total,
        }
        yield event.key[:90], row


def count_waits(training: Any) -> int | None:
    """Make one more step and count how often the host waits for the GPU in it."""
    if training.compute.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(training)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def time_settings(check: Check, config: Config, compiled: bool) -> Settings:
    """Time a step; compare its peak memory with the estimate."""
    compute = pick_compute_of(config)
    free_memory(check.device)
    try:
        took = time_step(config, compute, 3 if check.small else 10, compiled)
    except Exception as error:
        return dict(describe_error(error))
    found = {"passes": took.passes, "update": took.update}
    found |= compute_speed(config, took.passes + took.update)
    found["peak_memory"] = machine.get_peak_memory(compute.device)
    return found


def pick_compute_of(config: Config) -> Compute:
    train_settings = config.train
    return machine.pick_compute(
        train_settings.device, train_settings.dtype, train_settings.deterministic
    )


def steps(check: Check) -> Facts:
    """A step of several kinds of model, and the memory that `gptmini size` estimates for it."""
    compiled = not check.small
    default = {
        "attention": {"qk_norm": True},
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
    }
    gqa = {"attention": {"variant": "gqa", "n_kv_head": 2 if check.small else 4}}
    windowed = {"attention": {**gqa["attention"], "window": 32 if check.small else 256}}
    rows = 4 if check.small else 16
    one_pass: Settings = {"batch_size": rows, "micro_batch_size": rows}
    models: dict[str, tuple[Settings, Settings]] = {
        "gpt2-124m": ({}, {}),
        "not compiled": ({}, {}),
        "default architecture, Muon": (default, {"optimizer": "muon"}),
        "eager attention": ({"attention": {"backend": "eager"}}, {}),
        "dropout 0.1": ({"dropout": 0.1}, {}),
        "gqa": (gqa, {}),
        "gqa in a window": (windowed, {}),
        "gqa in a window, float32": (windowed, {"dtype": "float32"}),
    }
    if check.small:
        models = {name: models[name] for name in ("default architecture, Muon", "gqa in a window")}
    for name, (model, train_settings) in models.items():
        config = check.build_config(model, **one_pass, **train_settings)
        found = time_settings(check, config, compiled and name != "not compiled")
        try:
            found["estimated_memory"] = estimate_memory(config, pick_compute_of(config)).peak
        except Exception as error:
            found |= describe_error(error)
        yield name, found


def equal_bits(check: Check) -> Facts:
    """Whether a run that is stopped and resumed, or repeated, ends in equal bits.

    Fused attention may add in any order, unless `train.deterministic` forbids it.
    """
    different = []
    cases = [("eager", "off"), ("auto", "on"), ("auto", "off")]
    rows = 4 if check.small else 16
    for backend, deterministic in cases[:2] if check.small else cases:
        sizes = SMALL_MODEL if check.small else {"n_layer": 4, "n_head": 4, "d_model": 256}
        model = {**sizes, "dropout": 0.1, "attention": {"backend": backend}}
        config = check.build_config(
            model,
            optimizer="muon",
            steps=8,
            batch_size=rows,
            micro_batch_size=rows // 2,
            deterministic=deterministic,
        )
        name = f"attention {backend}, deterministic {deterministic}"
        straight = find_sha256(check, config, f"{name} 1")
        again = find_sha256(check, config, f"{name} 2")
        with mock.patch.object(loop, "train_step", stop_at_step_four), suppress(Stopped):
            check.fit(config, f"{name} 3")
        assert RunDirectory(check.folder / f"{name} 3").list_steps() == [4]
        resumed = find_sha256(check, config, f"{name} 3")
        yield name, {"repeated": again == straight, "resumed": resumed == straight}
        must_hold = backend == "eager" or deterministic == "on"
        if must_hold and not straight == again == resumed:
            different.append(name)
    assert not different, f"other bits with {' and '.join(different)}"


def find_sha256(check: Check, config: Config, name: str) -> str:
    """Train a run to its end; return the SHA-256 of its weights."""
    check.fit(config, name)
    return RunDirectory(check.folder / name).load_checkpoint(8).sha256


def stop_at_step_four(training: Any) -> dict[str, Any]:
    if training.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return train_step(training)


def tests(check: Check) -> Facts:
    """The tests marked `gpu`, without conftest.py, which needs more packages."""
    command = [sys.executable, "-u", "-m", "pytest", "tests/promises/test_gpu.py", "-m", "gpu"]
    command += ["--noconftest", "-p", "no:cacheprovider", "-W", "default"]
    command += ["-o", "addopts=-v --import-mode=importlib"]  # one at a time: xdist may be missing
    if check.small:
        command += ["-k", "mha or (muon and float32)"]
    environment = os.environ | {"GPTMINI_TEST_DEVICE": check.device}
    outcomes = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    failed = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found = re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", line)
            if found is None:
                continue
            outcomes[found[2]] += 1
            if found[2] in ("FAILED", "ERROR"):
                failed.append(found[1])
            yield "outcomes", dict(outcomes)
            yield "failed", list(failed)
    if process.returncode or not outcomes["PASSED"]:  # all may have been skipped
        sys.exit(1)


def compile_all_but_the_loss(model: GPT) -> None:
    """Compile the blocks alone."""
    compile_blocks(model)
    model.overwrite_by_softmax = overwrite_by_softmax_


# What each change of the step brings: the name that is patched, and its value without the change.
CHANGES: dict[str, tuple[str, Any]] = {
    "padding of the vocabulary": ("gptmini.model.kernels.VOCABULARY_MULTIPLE", 1),
    "head and loss in one": ("gptmini.model.gpt.joins_head_and_loss", lambda _: False),
    "large chunks of logits": ("gptmini.model.kernels.LOGITS_PER_CHUNK", 2**22),
    "a compiled loss": ("gptmini.plan.fit.compile_blocks", compile_all_but_the_loss),
    "q, k and v in one product": ("gptmini.model.attention.joins_projections", lambda _: False),
    "recorded passes": ("gptmini.plan.fit.create_loss", lambda model, _: model),
}


def changes(check: Check) -> Facts:
    """A compiled step of gpt2-124m with each change that was made for GPUs left out."""
    rows = 4 if check.small else 16
    config = check.build_config(batch_size=rows, micro_batch_size=rows)
    compiled = not check.small
    yield "all changes", time_settings(check, config, compiled)
    for name, (target, value) in CHANGES.items():
        with mock.patch(target, value):
            yield f"without: {name}", time_settings(check, config, compiled)
    for setting in ("on", "off"):
        strict = config.with_train(deterministic=setting)
        yield f"deterministic {setting}", time_settings(check, strict, compiled)
    yield "not compiled", time_settings(check, config, compiled=False)
