"""Check gptmini on a GPU in at most nine minutes; everything found goes to one JSON file.

python scripts/gpu_check.py [--out gpu_check.json] [--parts setup,tests,...]
python scripts/gpu_check.py --small --device cpu   # the same on a small model, in seconds

Each part runs in a process of its own under a time limit. One that fails or runs out of time is
recorded with the end of its output and whatever it had found, and the next part follows. Nothing
needs the network: with the files of gpt2 in TIKTOKEN_CACHE_DIR that is the tokenizer, else pairs of
bytes in a vocabulary of the same size.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch

from gptmini import files, fit, load, machine
from gptmini.config import yamlfile
from gptmini.config.load import find_config_file, validate
from gptmini.config.settings import Config
from gptmini.data.corpus import prepare_corpus
from gptmini.errors import Stopped
from gptmini.plan.cluster import ACCELERATORS
from gptmini.plan.cost import count_training_flops
from gptmini.plan.timing import time_step
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.train import trainer
from gptmini.train.step import train_step

TOTAL_SECONDS = 525  # seconds for all parts, so that starting and writing still fit in nine minutes
SMALL_MODEL = {"n_layer": 2, "n_head": 4, "d_model": 64, "context_length": 64}
Facts = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Check:
    """The options of the command, and a folder that all parts share."""

    device: str
    small: bool
    folder: Path

    def build_config(self, model: dict[str, Any] | None = None, **train: Any) -> Config:
        """configs/gpt2-124m.yaml, or a small model of its kind, with some settings changed."""
        stated, _ = yamlfile.read_file(find_config_file("gpt2-124m"))
        size = load_tokenizer(self.write_tokenizer()).vocab_size
        short = {"batch_size": 8, "micro_batch_size": 4, "steps": 6} if self.small else {}
        text = {"path": "builtin:python-docs", "validation": 0.005} if self.small else {}
        given = {"device": self.device, "steps": 100, "compile": "off", **short, **train}
        intervals = {"log_every": 1, "eval_every": given["steps"], "save_every": given["steps"]}
        changed = {
            "model": {**(SMALL_MODEL if self.small else {}), "vocab_size": size, **(model or {})},
            "tokenizer": {"kind": str(self.write_tokenizer())},
            "data": {"validation": 0.02, **text},
            "train": {**given, **intervals, "patience": None},
            "sample": {"max_new_tokens": 8},
        }
        return validate({key: {**stated.get(key, {}), **changed[key]} for key in changed}, {})

    def fit(self, config: Config, name: str) -> list[dict[str, Any]]:
        """Train a run of this name; return its metrics."""
        fit(config, self.folder / name, self.folder / "cache")
        return list(read_metrics(self.folder / name / "metrics.jsonl"))

    def write_tokenizer(self) -> Path:
        """Write a tokenizer, gpt2 if its files are here, else pairs of bytes; return the path."""
        path = self.folder / "tokenizer.json"
        known = os.environ.get("TIKTOKEN_CACHE_DIR")
        if not path.exists():
            if known and any(Path(known).glob("*")) and not self.small:
                made = create_tokenizer("gpt2")
            else:
                count = 743 if self.small else 50_000
                pairs = sorted(product(range(256), repeat=2), key=max)[:count]  # ASCII first
                spelled = [bytes(numbers) for numbers in [*zip(range(256)), *pairs]]
                ranks = {spelling: rank for rank, spelling in enumerate(spelled)}
                special = {"<|endoftext|>": len(ranks)}
                made = create_bpe_tokenizer("pairs", bpe.WORD_PATTERN, ranks, special)
            files.atomic_write_bytes(path, made.to_json().encode())
        return path


def find_peak_flops() -> float | None:
    """Dense bfloat16 operations a second of this GPU by its maker, if we know it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = [each for each in ACCELERATORS if each.name in name.lower().replace(" ", "")]
    named = max(known, key=lambda each: len(each.name), default=None)  # l40s, not l4
    return None if named is None else 1e12 * named.teraflops


def compute_speed(config: Config, seconds: float) -> dict[str, Any]:
    """Tokens per second and the share of the GPU's peak, for the seconds of one step."""
    tokens = config.train.batch_size * config.seq_len / seconds
    peak = find_peak_flops()
    share = count_training_flops(config.model, config.seq_len) * tokens / peak if peak else None
    return {"seconds_per_step": seconds, "tokens_per_second": tokens, "mfu": share}


# -- the parts: each yields what it finds, as it finds it ------------------------------------------


def setup(check: Check) -> Facts:
    """The machine, and the text in tokens."""
    yield "versions", [platform.python_version(), torch.__version__, torch.version.cuda]
    yield "type", str(machine.pick_compute(check.device, "auto").dtype)
    yield "gpu", torch.cuda.get_device_name() if check.device == "cuda" else None
    yield "memory", machine.get_total_memory(torch.device(check.device))
    yield "peak_flops", find_peak_flops()
    started = time.perf_counter()
    corpus = prepare_corpus(check.build_config(), check.folder / "cache")
    yield "seconds_to_prepare", time.perf_counter() - started
    kind = corpus.tokenizer.kind
    if kind == "pairs":
        kind = "pairs of bytes, for want of gpt2"
    yield "tokenizer", f"{kind}, {corpus.tokenizer.vocab_size:,} tokens"
    yield "training_tokens", sum(map(len, corpus.training))


def tests(check: Check) -> Facts:
    """The tests marked `gpu`, without conftest.py, which needs more packages."""
    command = [sys.executable, "-m", "pytest", "tests/promises/test_gpu.py", "-m", "gpu"]
    command += ["--noconftest", "-p", "no:cacheprovider", "-rfE"]
    command += ["-o", "addopts=-q --import-mode=importlib"]  # one at a time: xdist may be missing
    if check.small:
        command += ["-k", "mha or bfloat16 or muon or bits"]
    os.environ["GPTMINI_TEST_DEVICE"] = check.device
    done = subprocess.run(command, cwd=sys.path[0], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    yield "failed", [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield "outcome", (done.stdout or done.stderr).splitlines()[-1]
    if done.returncode or " passed" not in done.stdout:  # all may have been skipped
        sys.exit("\n".join(lines))


def train(check: Check) -> Facts:
    """A hundred steps by `gptmini.fit`, not compiled and compiled."""
    for compiled in ("off",) if check.small else ("off", "on"):
        config = check.build_config(compile=compiled)
        lines = check.fit(config, f"train-{compiled}")
        usual = statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 5 :])
        found = compute_speed(config, config.train.batch_size * config.seq_len / usual)
        last = {key: lines[-1][key] for key in ("val_loss", "val_bpb", "peak_memory")}
        losses = [round(line["train_loss"], 4) for line in lines]
        yield f"compile {compiled}", {**found, **last, "losses": losses}


def step(check: Check) -> Facts:
    """One step, by attention kernel, rows per pass, and compiled or not."""
    compute = machine.pick_compute(check.device, "auto")
    variants = product(("flash", "eager"), (False,) if check.small else (False, True), (16, 64))
    for backend, compiled, size in variants:
        model = {"attention": {"qk_norm": False, "backend": backend}}
        config = check.build_config(model, batch_size=64, micro_batch_size=size)
        try:
            took = time_step(config, compute, 3 if check.small else 8, compiled)
            peak = machine.get_peak_memory(compute.device)
            found = vars(took) | compute_speed(config, took.passes + took.update)
            found["peak_memory"] = peak
        except Exception as error:  # of the driver, the compiler, or memory
            found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        yield f"{backend}, {'not ' * (not compiled)}compiled, {size} rows a pass", found
        torch.compiler.reset()
        if check.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def resume(check: Check) -> Facts:
    """Whether a run that is stopped and resumed, or repeated, ends in equal bits.

    Fused attention may add in any order; with `deterministic`, torch forbids that if it can.
    """
    update = train_step

    def stopping(training: Any) -> dict[str, Any]:
        if training.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(training)

    def sha256(config: Config, name: str) -> str:
        check.fit(config, name)
        return RunDirectory(check.folder / name).load_checkpoint(8).sha256

    different = []
    cases = [("eager", False), ("auto", True), ("auto", False)]
    for backend, strict in cases[: 2 if check.small else 3]:
        torch.use_deterministic_algorithms(strict, warn_only=True)
        sizes = SMALL_MODEL if check.small else {"n_layer": 4, "n_head": 4, "d_model": 256}
        model = {**sizes, "dropout": 0.1, "attention": {"backend": backend}}
        config = check.build_config(
            model, optimizer="muon", steps=8, batch_size=16, micro_batch_size=8
        )
        name = f"{backend}, deterministic" if strict else backend
        straight = sha256(config, f"{name} 1")
        again = sha256(config, f"{name} 2")
        with mock.patch.object(trainer, "train_step", stopping), suppress(Stopped):
            check.fit(config, f"{name} 3")
        assert RunDirectory(check.folder / f"{name} 3").list_steps() == [4]
        resumed = sha256(config, f"{name} 3")
        yield name, {"repeated": again == straight, "resumed": resumed == straight}
        if again != straight or resumed != straight:
            different.append(name)
    assert not different, f"other bits with attention {' and '.join(different)}"


def decode(check: Check) -> Facts:
    """Tokens per second of the trained model, at 1 and at 32 rows."""
    if not RunDirectory(check.folder / "train-off").list_steps():
        check.fit(check.build_config(steps=1), "train-off")
    run = load(check.folder / "train-off", check.device, cache=check.folder / "cache")
    for rows in (1, 32):
        prompts = ["def read(self):"] * rows
        run.start(prompts, max_new_tokens=4).finish()  # takes memory, loads kernels
        drawn = run.start(prompts, max_new_tokens=8 if check.small else 256, temperature=1.0)
        drawn.finish()
        rest = (drawn.n_tokens - rows) / (drawn.seconds - drawn.time_to_first_token)
        found = {
            "engine": drawn.engine,
            "tokens": drawn.n_tokens,
            "first_s": drawn.time_to_first_token,
        }
        yield f"{rows} rows", {"tokens_per_second": rest, **found}


def precision(check: Check) -> Facts:
    """Check that training in bfloat16 follows training in float32, step by step."""
    losses = {}
    short: dict[str, Any] = {}
    if not check.small:
        short = {"batch_size": 16, "steps": 50, "warmup_steps": 10}
    for dtype in ("float32", "bfloat16"):
        config = check.build_config(dtype=dtype, **short)
        losses[dtype] = [line["train_loss"] for line in check.fit(config, f"in {dtype}")]
        yield dtype, [round(value, 4) for value in losses[dtype]]
    differences = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    yield "largest difference", max(differences)
    assert max(differences) < 0.01 * losses["float32"][0], "bfloat16 does not follow float32"


# Seconds for each part, those first whose failure matters most.
LIMITS_SECONDS = {
    setup: 60,
    tests: 100,
    train: 120,
    step: 150,
    resume: 60,
    decode: 45,
    precision: 60,
}
PARTS = {part.__name__: part for part in LIMITS_SECONDS}


def run(name: str, check: Check) -> None:
    """In a child process: write each fact of a part as soon as it is found."""
    os.setsid()  # so that it can be killed with the processes that compile for it
    log = os.open(check.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    found = {}
    os.dup2(log, 1)
    os.dup2(log, 2)
    for key, value in PARTS[name](check):
        found[key] = value
        files.atomic_write_bytes(check.folder / f"{name}.json", json.dumps(found).encode())


def watch(name: str, check: Check, limit: float) -> dict[str, Any]:
    """Run a part in a child process for at most `limit` seconds; return what came of it."""
    started = time.perf_counter()
    log = check.folder / f"{name}.log"
    facts = check.folder / f"{name}.json"
    child = multiprocessing.get_context("fork").Process(target=run, args=(name, check))
    child.start()  # a fork needs no imports, and nothing has touched the GPU yet
    child.join(limit)
    if late := child.is_alive():
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
    record: dict[str, Any] = {"ok": child.exitcode == 0 and not late}
    record["seconds"] = round(time.perf_counter() - started, 1)
    record["found"] = json.loads(facts.read_text()) if facts.exists() else {}
    if not record["ok"]:
        record["ended"] = f"after {limit:.0f} s" if late else f"with exit code {child.exitcode}"
        record["output"] = log.read_text(errors="replace").splitlines()[-25:]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a small model, few steps")
    options = parser.parse_args()
    ends = time.perf_counter() + TOTAL_SECONDS
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.device, options.small, Path(folder))
        for name in options.parts.split(","):
            limit = max(1.0, min(LIMITS_SECONDS[PARTS[name]], ends - time.perf_counter()))
            records[name] = watch(name, check, limit)
            print(name, "ok" if records[name]["ok"] else "FAILED", records[name]["seconds"], "s")
            files.atomic_write_bytes(options.out, json.dumps(records, indent=1).encode())
    sys.exit(not all(record["ok"] for record in records.values()))


if __name__ == "__main__":
    main()
