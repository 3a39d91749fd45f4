"""Measure a training step with and without gradient checkpointing: python scripts/bench memory

Each case runs in its own process, because the system reports peak memory per process.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from gptmini import machine
from gptmini.config.settings import ModelConfig
from gptmini.model.gpt import GPT

COMMAND = [sys.executable, str(Path(__file__).parent), "memory"]


def measure(checkpointing: bool, rows: int) -> None:
    """Run two training steps; print their peak memory in MiB above the start and seconds a step."""
    config = ModelConfig(vocab_size=257, n_layer=8, n_head=4, d_model=256, context_length=512)
    model = GPT(config).train()
    model.gradient_checkpointing = checkpointing
    tokens = torch.randint(257, (rows, 512))  # (B, T)
    compute = machine.pick_compute("cpu", "auto")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    for _ in range(2):
        with compute.autocast():
            value = model(tokens, tokens)
        value.backward()
    seconds = (time.perf_counter() - started) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{peak / 1024:.0f} {seconds:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=["off", "on"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens in a step")
    options = parser.parse_args()
    if options.case:
        measure(options.case == "on", options.rows)
        return
    print("| gradient checkpointing | peak MiB | seconds a step |")
    print("|---|---|---|")
    for case in ("off", "on"):
        command = [*COMMAND, "--case", case, "--rows", str(options.rows)]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        print(f"| {case} | {words[0]} | {words[1]} |")
