"""Time training on several processes of this machine: python scripts/bench processes

Each row is a number of processes and a way of adding gradients (train.reduce): seconds per step,
the median over rounds in which all of them take turns, and the ratio to one process. `exact` and
`fast` differ only in how gradients travel. Processes share the cores of the machine, so this shows
what adding gradients costs, not how training scales.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = {"3M": (4, 256, 4), "85M": (12, 768, 12)}  # layers, width, heads
LAUNCH = ("-m", "torch.distributed.run", "--standalone")


def measure_step(size: str, ranks: int, reduce: str, options: argparse.Namespace) -> float:
    """Train a new model; the first step, which allocates, is not counted."""
    layers, width, heads = SIZES[size]
    settings = {
        "model.n_layer": layers,
        "model.d_model": width,
        "model.n_head": heads,
        "model.context_length": 128,
        "tokenizer.kind": "byte",
        "train.batch_size": options.rows,
        "train.micro_batch_size": options.rows // 4,
        "train.steps": options.steps,
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
        command += ["--no-sample", f"--data={text}", f"--out={folder}/run", f"--cache={folder}"]
        command += [f"--set={key}={value}" for key, value in settings.items()]
        subprocess.run(command, capture_output=True, check=True)
        metrics = Path(folder, "run/metrics.jsonl").read_text()
        lines = [json.loads(line) for line in metrics.splitlines()]
    return float((lines[-1]["seconds"] - lines[0]["seconds"]) / (len(lines) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="3M,85M")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rows", type=int, default=16, help="rows of 128 tokens in a batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = [(1, "fast"), (1, "exact")]
    cases += [(int(n), way) for n in options.ranks.split(",") for way in ("exact", "fast")]
    print("| parameters | processes | reduce | s per step | to one |")
    print("|---|---|---|---|---|")
    for size in options.sizes.split(","):
        times: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
        for _ in range(options.rounds):
            for case in cases:
                times[case].append(measure_step(size, *case, options))
        alone = statistics.median(times[1, "fast"])
        for (ranks, reduce), seconds in times.items():
            middle = statistics.median(seconds)
            row = (size, str(ranks), reduce, f"{middle:.3f}", f"{middle / alone:.2f}")
            print(f"| {' | '.join(row)} |", flush=True)
