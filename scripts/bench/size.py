"""Compare the plans of `gptmini size` with real runs: python scripts/bench/size.py [--quick]

Every case is planned and then trained through the command line, on the built-in corpora, whose
tokens are prepared beforehand. Memory is the peak of the process, time that of the whole command.
--quick runs one case of a few seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

CASES = {
    "the default": [],
    "6 x 6 x 384, 64 windows": [
        "--set",
        "model={n_layer: 6, n_head: 6, d_model: 384}",
        "--set",
        "train={steps: 45, batch_size: 64}",
    ],
    "the same, not compiled, checkpointing": [
        "--set",
        "model={n_layer: 6, n_head: 6, d_model: 384}",
        "--set",
        "train={steps: 15, batch_size: 64, compile: off}",
        "--set",
        "train.gradient_checkpointing=true",
    ],
    "context 1024, gqa:2, width 256": [
        "--attention",
        "gqa:2",
        "--set",
        "model={d_model: 256, context_length: 1024}",
        "--set",
        "train={steps: 60, batch_size: 8}",
    ],
    "python-code": ["python-code"],
    "124M, AdamW, bytes": [
        "gpt2-124m",
        "--set",
        "tokenizer.kind=byte",
        "--set",
        "model.context_length=256",
        "--set",
        "train={steps: 12, batch_size: 16, micro_batch_size: 8}",
        "--set",
        "data.validation=0.005",
    ],
}
QUICK = {
    "quick": [
        "--set",
        "model={n_layer: 2, d_model: 64, context_length: 64}",
        "--set",
        "train={steps: 10, batch_size: 4}",
        "--set",
        "tokenizer.kind=byte",
    ]
}


def run_gptmini(*words: str) -> str:
    """Run a gptmini command; return its standard output."""
    command = [sys.executable, "-m", "gptmini", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def train(*words: str) -> tuple[float, float]:
    """Train in a child process; return seconds, and peak memory in bytes."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "gptmini", "train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, words
    return time.monotonic() - started, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    cases = QUICK if parser.parse_args().quick else CASES
    print("| training | parameters | MiB planned | MiB | | minutes planned | minutes | |")
    print("|---|---|---|---|---|---|---|---|")
    for name, words in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            # One step first, so that the tokens are prepared.
            run_gptmini("train", *words, "--steps", "1", "--out", f"{folder}/first")
            plan = json.loads(run_gptmini("size", *words, "--json"))
            seconds, peak = train(*words, "--out", f"{folder}/run")
        memory = plan["memory"]["peak"]
        planned = plan["time"]["minutes"]
        minutes = seconds / 60
        print(
            f"| {name} | {plan['parameters']['all']:,} | {memory / 2**20:,.0f} "
            f"| {peak / 2**20:,.0f} | {memory / peak - 1:+.0%} | {planned:.2f} | {minutes:.2f} "
            f"| {planned / minutes - 1:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
