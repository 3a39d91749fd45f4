"""Time training on characters, beside plain PyTorch that follows nanoGPT's published recipes.

python scripts/bench train TEXT [--parts step,share,small,large,best,ablation] [--quick]

Losses are nats per character over the whole validation split, the last tenth of the text, in
consecutive windows. Seconds are those of the updates: start-up, compilation and evaluation do not
count. Several runs are shown by their median.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config.load import find_config_file, load_config
from gptmini.machine import keep_freed_memory, pick_compute
from gptmini.plan.cost import count_training_flops
from gptmini.plan.fit import time_step

SMALL_TARGET = 1.8982  # about where the CPU recipe ends, over windows of 64
LARGE_TARGET = 1.4697  # best published loss of the GPU recipe, over windows of 256


class Baseline(nn.Module):
    """GPT-2 by the recipe: learned positions, no biases, tied head, float32."""

    def __init__(self, layers: int, heads: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, False) for _ in range(layers))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.startswith(("out", "down"))
                std = 0.02 / math.sqrt(2 * layers) if into_stream else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V)."""
        B, T = tokens.shape
        x = self.embed(tokens) + self.positions.weight[:T]  # (B, T, D)
        for layer in range(len(self.qkv)):
            heads = self.qkv[layer](self.norms[2 * layer](x)).view(B, T, 3, self.heads, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, K)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[layer](mixed.transpose(1, 2).flatten(2))
            x = x + self.down[layer](F.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        return F.linear(self.norms[-1](x), self.embed.weight)


def encode_characters(path: Path) -> tuple[Tensor, Tensor, int]:
    """The text as character numbers: training, the last tenth, and the vocabulary size."""
    text = np.array(list(path.read_text("utf-8")))
    vocabulary, numbers = np.unique(text, return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    cut = int(0.9 * len(tokens))
    return tokens[:cut], tokens[cut:], len(vocabulary)


def train_baseline(path: Path, steps: int) -> tuple[float, float]:
    """Train by the CPU recipe (4 x 4 x 128, 12 x 64 tokens a step): seconds, final loss."""
    training, held_out, vocabulary = encode_characters(path)
    torch.manual_seed(1337)
    model = Baseline(4, 4, 128, 64, vocabulary)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
    )
    seconds = 0.0
    for step in range(steps):
        started = time.perf_counter()
        share = (step - 100) / max(1, steps - 100)
        cooled = 1e-4 + 0.9e-3 * (0.5 + 0.5 * math.cos(math.pi * max(0.0, share)))
        for group in optimizer.param_groups:
            group["lr"] = min(1e-3 * (step + 1) / 101, cooled)
        starts = torch.randint(len(training) - 64, (12,))
        windows = torch.stack([training[start : start + 65] for start in starts.tolist()])
        logits = model(windows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
    with torch.no_grad():
        rows = held_out[: (len(held_out) - 1) // 64 * 64 + 1].unfold(0, 65, 64)
        logits = torch.cat([model(part[:, :-1]) for part in rows.split(64)])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return seconds, loss.item()


def time_baseline_step(path: Path) -> float:
    """Seconds a step of the GPU recipe (6 x 6 x 384, 64 x 256 tokens), in float32."""
    model = Baseline(6, 6, 384, 256, encode_characters(path)[2])
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(64, 256, dtype=torch.long)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return min(times[1:])


class Runs:
    """Runs `gptmini train` in child processes, in a temporary folder."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder, self.numbers = path, folder, count()

    def train(self, config: str | None, *settings: str) -> list[dict[str, float]]:
        """Train a configuration with some settings changed; the run's metrics."""
        out = self.folder / str(next(self.numbers))
        words = [config] if config else ["--set", "tokenizer.kind=char"]
        words += [word for setting in settings for word in ("--set", setting)]
        paths = ["--data", str(self.path), "--out", str(out), "--cache", str(self.folder / "cache")]
        command = [sys.executable, "-m", "gptmini", "train", *words, *paths]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.exit(process.stderr)
        return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def find_seconds_to(metrics: list[dict[str, float]], target: float) -> float:
    """Seconds of updates until the first evaluation at or below a loss."""
    seconds = [m["seconds"] for m in metrics if m.get("val_loss", math.inf) <= target]
    return min(seconds, default=math.nan)


def find_lowest_loss(metrics: list[dict[str, float]]) -> float:
    """Lowest validation loss of a run."""
    return min(m["val_loss"] for m in metrics if "val_loss" in m)


# The settings that replace each part of the recipe, one at a time, for equal minutes.
ABLATIONS = {
    "the recipe": [],
    "another seed": ["train.seed=1"],
    "AdamW for all": ["train.optimizer=adamw"],
    "no norm of queries and keys": ["model.attention.qk_norm=false"],
    "learned positions": ["model.position=learned"],
    "gelu": ["model.activation=gelu"],
    "rmsnorm": ["model.norm=rmsnorm"],
    "64 windows a step": ["train.batch_size=64"],
    "no cool-down": ["train.cooldown=0.0"],
    "float32": ["train.dtype=float32"],
}


def step_rows(runs: Runs, quick: bool) -> Iterator[str]:
    """Time of a step of the GPU recipe, eager and compiled."""
    shape = ["model={n_layer: 6, n_head: 6, d_model: 384}", "train.batch_size=64"]
    short = [f"train.steps={3 if quick else 9}", "train.log_every=1", "data.validation=0.01"]
    plain = time_baseline_step(runs.path)
    for mode in ("off", "on"):
        metrics = runs.train(None, *shape, *short, f"train.compile={mode}")
        seconds = statistics.median(64 * 256 / m["tokens_per_second"] for m in metrics[2:])
        name = f"seconds a step, 6 x 6 x 384, 64 x 256 tokens, compile {mode}"
        yield f"| {name} | {plain:.2f} | {seconds:.2f} | {plain / seconds:.1f} x |"


def small_rows(runs: Runs, quick: bool) -> Iterator[str]:
    """Time to the final loss of the CPU recipe."""
    repeats = 1 if quick else 3
    theirs = []
    ours = []
    for _ in range(repeats):  # in turns, because the machine's speed drifts
        theirs.append(train_baseline(runs.path, 20 if quick else 2000))
        ours.append(runs.train("shakespeare-char-small", *(["train.steps=3"] if quick else [])))
    plain = statistics.median(seconds for seconds, _ in theirs)
    seconds = statistics.median(find_seconds_to(metrics, SMALL_TARGET) for metrics in ours)
    ends = statistics.median(loss for _, loss in theirs)
    name = f"seconds to {SMALL_TARGET}, the recipe ends at {ends:.4f}"
    yield f"| {name} | {plain:.1f} | {seconds:.1f} | {plain / seconds:.1f} x |"
    yield f"| lowest loss of that run | | {statistics.median(map(find_lowest_loss, ours)):.4f} | |"


def large_rows(runs: Runs, quick: bool) -> Iterator[str]:
    """Time to the best loss of the GPU recipe, whose 5000 steps are extrapolated, not run."""
    plain = 5000 * time_baseline_step(runs.path) / 60
    metrics = runs.train("shakespeare-char", *(["train.steps=3"] if quick else []))
    minutes = find_seconds_to(metrics, LARGE_TARGET) / 60
    ratio = f"{plain / minutes:.0f} x"
    yield f"| minutes to {LARGE_TARGET} | {plain:.0f} (5000 steps) | {minutes:.1f} | {ratio} |"
    yield f"| lowest loss of that run | | {find_lowest_loss(metrics):.4f} | |"


def best_rows(runs: Runs, quick: bool) -> Iterator[str]:
    """Lowest loss of a command that takes about 15 minutes."""
    started = time.perf_counter()
    metrics = runs.train("shakespeare-char-best", *(["train.steps=3"] if quick else []))
    minutes = (time.perf_counter() - started) / 60
    lowest = find_lowest_loss(metrics)
    yield f"| lowest loss in {minutes:.1f} minutes in all | | {lowest:.4f} | |"


def ablation_rows(runs: Runs, quick: bool) -> Iterator[str]:
    """Each part of the recipe replaced in turn, for equal minutes."""
    sizes = ["model={n_layer: 4, n_head: 4, d_model: 192}", "train.batch_size=16"]
    time_given = f"train.minutes={0.2 if quick else 0.75}"
    for name, settings in list(ABLATIONS.items())[: 2 if quick else None]:
        metrics = runs.train(None, *sizes, time_given, *settings)
        yield f"| {name} | {metrics[-1]['step']} | {find_lowest_loss(metrics):.4f} |"


def share_rows(runs: Runs, quick: bool) -> Iterator[str]:
    """How much of what a large product reaches a whole step does; `runs` are not needed."""
    compute = pick_compute("auto", "auto")
    keep_freed_memory()
    size = 512 if quick else 4096
    square = torch.randn(size, size).to(compute.dtype)
    times = []
    for _ in range(2 if quick else 6):
        started = time.perf_counter()
        square @ square
        times.append(time.perf_counter() - started)
    reached = 2 * size**3 / min(times)
    large = {"n_layer": 6, "n_head": 6, "d_model": 384, "vocab_size": 257, "dropout": 0.2}
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        "`default`": ("default", {"model": {"vocab_size": 4096, "dropout": 0.1}}),
        "`shakespeare-char`": ("shakespeare-char", {"model": {"vocab_size": 257, "dropout": 0.0}}),
        "6 x 6 x 384, 64 rows": ("default", {"model": large, "train": {"batch_size": 64}}),
    }
    for name, (config, settings) in list(shapes.items())[: 1 if quick else None]:
        full = load_config(find_config_file(config), []).fill_open(settings)
        work = count_training_flops(full.model, full.seq_len) * full.train.batch_size * full.seq_len
        cells = []
        for compiled in (False, True):
            if compiled and quick:
                cells.append("not timed")
                continue
            timed = time_step(full, compute, 1 if quick else 4, compiled)
            seconds = timed.passes + timed.update
            cells.append(f"{seconds:.3f} s, {work / seconds / reached:.0%}")
        yield f"| {name}: share of {reached / 1e9:.0f} GFLOP/s | {' | '.join(cells)} |"


PARTS = {
    "step": step_rows,
    "share": share_rows,
    "small": small_rows,
    "large": large_rows,
    "best": best_rows,
    "ablation": ablation_rows,
}
HEADINGS = {"share": ["", "eager", "compiled"], "ablation": ["at equal minutes", "steps", "loss"]}
OTHER_HEADINGS = ["", "plain PyTorch", "gptmini", "ratio"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of each, to see that it runs"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options.text, Path(folder))
        headings: list[str] = []
        for name in options.parts.split(","):
            before = headings
            headings = HEADINGS.get(name, OTHER_HEADINGS)
            if headings != before:  # a new table
                print(f"\n| {' | '.join(headings)} |\n|{'---|' * len(headings)}", flush=True)
            for row in PARTS[name](runs, options.quick):
                print(row, flush=True)
