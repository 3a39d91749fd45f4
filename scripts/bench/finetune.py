"""Time a step of fine-tuning beside transformers: python scripts/bench/finetune.py RUN

Needs `pip install -e '.[bench]'`. RUN is an imported model, or any that `gptmini export` writes.
Both train the same weights on the same tokens, all rows in one pass: gptmini by its fused AdamW and
by Muon, transformers by torch's AdamW, with its parameters in float32, and products in float32 or
bfloat16. The losses of the first step are compared before anything is timed. Everything takes
turns; the table gives medians.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import gptmini
from gptmini.config.load import validate
from gptmini.files import DEFAULT_CACHE_DIR
from gptmini.machine import Compute, keep_freed_memory, pick_compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer

LR = 1e-5  # small: what is timed does not depend on it
Step = Callable[[], float]  # returns the loss before its update


def prepare_gptmini(path: Path, optimizer_name: str, compute: Compute, tokens: Tensor) -> Step:
    """Load a run and return a step on the tokens (B, T + 1)."""
    model: GPT = gptmini.load(path, "cpu", "float32").model.train()
    config = validate({"train": {"optimizer": optimizer_name, "lr": LR, "muon_lr": LR}}, {})
    optimizer = Optimizer(model, config.train, compute.dtype)
    inputs = tokens[:, :-1].contiguous()  # (B, T)
    targets = tokens[:, 1:].contiguous()  # (B, T)

    def step() -> float:
        with compute.autocast():
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step(LR)
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


def prepare_transformers(folder: Path, compute: Compute, tokens: Tensor) -> Step:
    """Load an exported run and return a step on the tokens (B, T + 1)."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step() -> float:
        with compute.autocast():
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    keep_freed_memory()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        gptmini.export_run(options.run, folder, "hf", "f16", DEFAULT_CACHE_DIR)
        vocab_size = transformers.AutoConfig.from_pretrained(folder).vocab_size
        tokens = torch.randint(vocab_size, (options.rows, options.length + 1))
        steps: dict[str, Step] = {}
        for dtype in ("float32", "bfloat16"):
            compute = pick_compute("cpu", dtype)
            for name in ("adamw", "muon"):
                steps[f"gptmini {name}, {dtype}"] = prepare_gptmini(
                    options.run, name, compute, tokens
                )
            steps[f"transformers, {dtype}"] = prepare_transformers(folder, compute, tokens)
    losses = {name: step() for name, step in steps.items()}
    reference = losses["transformers, float32"]
    for name, loss in losses.items():
        tolerance = 1e-4 if "float32" in name else 2e-2
        assert abs(loss - reference) < tolerance * reference, losses
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{options.rows} x {options.length} tokens, {torch.get_num_threads()} threads\n")
    print("| | seconds a step | of transformers |\n|---|---|---|")
    for name, median in medians.items():
        other = medians[f"transformers, {name.split(', ')[1]}"]
        print(f"| {name} | {median:.2f} | {other / median:.2f} x |")


if __name__ == "__main__":
    main()
