"""Time training on several processes of this machine: python scripts/bench processes

Seconds per step by number of processes and way of adding gradients (train.reduce), all in turns.
`exact` and `fast` differ only in how gradients travel. Processes share the cores of the machine, so
this shows what adding gradients costs, not how training scales.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.results import Extent, Table

SIZES = {"3M": (4, 256, 4), "85M": (12, 768, 12)}  # layers, width, heads
LAUNCH = ("-m", "torch.distributed.run", "--standalone")


def measure_step(size: str, ranks: int, reduce: str, rows: int, steps: int) -> float:
    """Train a new model; the first step, which allocates, is not counted."""
    layers, width, heads = SIZES[size]
    settings = {
        "model.n_layer": layers,
        "model.d_model": width,
        "model.n_head": heads,
        "model.context_length": 128,
        "tokenizer.kind": "byte",
        "train.batch_size": rows,
        "train.micro_batch_size": rows // 4,
        "train.steps": steps,
        "train.warmup_steps": 0,
        "train.log_every": 1,
        "train.eval_tokens": 128,
        "train.compile": "off",
        "train.reduce": reduce,
    }
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("All happy families are alike. " * 4000)
        command = [sys.executable, *LAUNCH, f"--nproc-per-node={ranks}", "-m", "gptmini", "train"]
        command += [f"--data={text}", f"--out={folder}/run"]
        command += [f"--set={key}={value}" for key, value in settings.items()]
        subprocess.run(command, stdout=subprocess.PIPE, check=True)
        metrics = Path(folder, "run/metrics.jsonl").read_text()
        lines = [json.loads(line) for line in metrics.splitlines()]
    return float((lines[-1]["seconds"] - lines[0]["seconds"]) / (len(lines) - 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rows", type=int, default=16, help="rows of 128 tokens in a batch")


def measure(
    extent: Extent, size: str = "3M", ranks: str = "2,4", rows: int = 16
) -> Iterator[Table]:
    names = {1: "1 process"} | {int(n): f"{n} processes" for n in ranks.split(",")}
    shown = [*names.values(), *(f"1 process / {name}" for n, name in names.items() if n > 1)]
    table = Table("processes", "seconds a step", shown)
    for _ in range({"trial": 1, "quick": 2, "full": 3}[extent]):
        for n_ranks, name in names.items():
            for reduce in ("exact", "fast"):
                seconds = measure_step(size, n_ranks, reduce, rows, 3 if extent == "trial" else 8)
                table.append(f"{size}, {reduce}", name, seconds)
    yield table
