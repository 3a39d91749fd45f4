"""Time training and generation on a GPU: python scripts/bench gpu

60 steps of configs/gpt2-124m.yaml with and without `train.deterministic`, then texts of that model.
With --nanogpt FOLDER, nanoGPT's own bench.py times the same model and batch. Without a network,
TIKTOKEN_CACHE_DIR names a folder that has the files of the tokenizer gpt2.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gptmini
from bench.results import ROOT, Extent, Table
from gptmini.config import yamlfile
from gptmini.plan.cost import count_training_flops
from gptmini.runs.log import read_metrics

ROWS = 16  # of a pass, in nanoGPT's bench.py too
# nanoGPT divides by the peak of an A100; the time of a pass is what we compare.
NANOGPT_RESULT = re.compile(r"time per iteration: ([\d.]+)ms")
SMALL_MODEL = {"n_layer": 2, "n_head": 4, "d_model": 64, "context_length": 64}
SMALL_TRAINING = {"steps": 6, "batch_size": ROWS, "compile": "off", "device": "cpu"}
PROMPT = "def read(self):"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nanogpt", type=Path, help="the folder of a checkout of nanoGPT")
    parser.add_argument(
        "--teraflops", type=float, default=989, help="the peak; an H100's by default"
    )


def measure(extent: Extent, nanogpt: Path | None = None, teraflops: float = 989) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as folder:
        yield measure_training(Path(folder), extent, nanogpt, teraflops)
        yield measure_generation(Path(folder) / "off", extent)


def build_settings(extent: Extent, deterministic: str) -> dict[str, Any]:
    """The settings of gpt2-124m, or of a small model on a CPU for a trial."""
    settings, _ = yamlfile.read_file(ROOT / "configs" / "gpt2-124m.yaml")
    settings["train"] |= {"steps": 60, "compile": "on", "device": "cuda"}
    if extent == "trial":
        settings["model"] |= SMALL_MODEL
        settings["train"] |= SMALL_TRAINING
        settings |= {"tokenizer": {"kind": "byte"}, "data": {"path": "builtin:python-docs"}}
    steps = settings["train"]["steps"]
    settings["train"] |= {"deterministic": deterministic, "log_every": 1, "eval_every": steps}
    return settings


def measure_training(folder: Path, extent: Extent, nanogpt: Path | None, teraflops: float) -> Table:
    shown = ["off", "on", "on / off"] + (["nanoGPT", "nanoGPT / off"] if nanogpt else [])
    table = Table("gpu training", "train.deterministic", shown)
    name = f"ms for {ROWS} rows"
    for deterministic in ("off", "on"):
        settings = build_settings(extent, deterministic)
        gptmini.fit(settings, folder / deterministic)
        lines = list(read_metrics(folder / deterministic / "metrics.jsonl"))
        settled = [line["tokens_per_second"] for line in lines[len(lines) // 3 :]]
        speed = statistics.median(settled)
        config = gptmini.load(folder / deterministic, "cpu").config
        flops = count_training_flops(config.model, config.seq_len) * speed
        table.append(name, deterministic, ROWS * config.seq_len / speed * 1e3)
        table.append("tokens/s", deterministic, speed)
        table.append("% of the peak", deterministic, flops / teraflops / 1e10)
    if nanogpt:
        table.append(name, "nanoGPT", time_nanogpt(nanogpt))
    return table


def time_nanogpt(folder: Path) -> float:
    """Return the milliseconds of a pass and update of nanoGPT's bench.py."""
    command = [sys.executable, "bench.py", f"--batch_size={ROWS}", "--real_data=False"]
    command += ["--bias=True"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    (found,) = NANOGPT_RESULT.findall(done.stdout)
    return float(found)


def measure_generation(run_path: Path, extent: Extent) -> Table:
    n_new = 8 if extent == "trial" else 256
    table = Table("gpu generation", "texts at a time", ["float32", "bfloat16"])
    device = "cpu" if extent == "trial" else "cuda"
    for weights in ("float32", "bfloat16"):
        run = gptmini.load(run_path, device, weights)
        for rows in (1, 32):
            for use in range(4):
                generation = run.start([PROMPT] * rows, max_new_tokens=n_new)
                generation.finish()
                seconds = generation.seconds - generation.time_to_first_token
                if use:  # the first loads kernels and records graphs
                    speed = (generation.n_tokens - rows) / seconds
                    table.append(f"{rows}, tokens/s", weights, speed)
        long = run.decode(run.encode(PROMPT * 512)[: run.config.seq_len // 2])
        for use in range(4):
            generation = run.start([long], max_new_tokens=1)
            generation.finish()
            if use:
                first = generation.time_to_first_token * 1e3
                table.append("1, ms to read half a context", weights, first)
    return table
