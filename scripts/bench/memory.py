"""Measure a training step with and without gradient checkpointing: python scripts/bench memory

Each case runs in its own process, because the system reports peak memory per process.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.results import Extent, Table
from gptmini import machine
from gptmini.config.settings import ModelConfig
from gptmini.model.gpt import GPT


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens in a step")


def measure(extent: Extent, rows: int = 8) -> Iterator[Table]:
    table = Table("memory", "gradient checkpointing", ["off", "on", "on / off"])
    for _ in range(1 if extent == "trial" else 5):
        for case in ("off", "on"):
            command = [sys.executable, "-m", "bench.memory", case, str(rows)]
            words = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            peak, seconds = map(float, words.split())
            table.append("peak MiB", case, peak)
            table.append("seconds a step", case, seconds)
    yield table


def measure_step(checkpointing: bool, rows: int) -> None:
    """Run two training steps; print their peak memory in MiB above the start and seconds a step.

    What is loaded on first use does not count: a step of one row comes before.
    """
    config = ModelConfig(vocab_size=257, n_layer=8, n_head=4, d_model=256, context_length=512)
    model = GPT(config).train()
    model.gradient_checkpointing = checkpointing
    tokens = torch.randint(257, (rows, 512))  # (B, T)
    compute = machine.pick_compute("cpu", "auto")

    def make_step(batch: Tensor) -> None:
        with compute.autocast():
            value = model(batch, batch)
        value.backward()

    make_step(tokens[:1])
    before = read_peak()
    started = time.perf_counter()
    for _ in range(2):
        make_step(tokens)
    seconds = (time.perf_counter() - started) / 2
    print(f"{read_peak() - before:.0f} {seconds:.4f}")


def read_peak() -> float:
    """Peak memory of this process in MiB; that of getrusage would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


if __name__ == "__main__":
    measure_step(sys.argv[1] == "on", int(sys.argv[2]))
