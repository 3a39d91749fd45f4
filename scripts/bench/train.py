"""Time training on characters, beside plain PyTorch that follows nanoGPT's published recipes.

python scripts/bench train [--text data/tinyshakespeare.txt] [--parts step,share,small,large,...]

Losses are nats per character over the whole validation split, the last tenth of the text, in
consecutive windows; of a run, the lowest of its evaluations. Seconds are those of the updates:
start-up, compilation and evaluation do not count, but for the minutes of a configuration. The
recipes train in float32 and, where the processor multiplies it, by bfloat16 autocast, compiled and
not; the fastest of these counts.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.results import SHAKESPEARE, Extent, Table, check_text
from gptmini.config.load import find_config_file, load_config
from gptmini.config.settings import Config
from gptmini.machine import Compute, keep_freed_memory, multiplies_bfloat16, pick_compute
from gptmini.model.compile import compile_blocks
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import count_training_flops
from gptmini.plan.timing import Machine, choose_micro_batch_size
from gptmini.train.cuda_graph import RecordedLoss

SMALL_TARGET = 1.8982  # about where the CPU recipe ends, over windows of 64
LARGE_TARGET = 1.4697  # best published loss of the GPU recipe, over windows of 256
# The type of the recipe's products, and whether it is compiled, by what tables call them.
MODES = {
    f"plain PyTorch {name}{words}": (dtype, bool(words))
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    for words in ("", " compiled")
}


class Baseline(nn.Module):
    """GPT-2 by the recipe: learned positions, no biases, tied head."""

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

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens (B, T) and targets (B, T) -> loss."""
        B, T = tokens.shape
        x = self.embed(tokens) + self.positions.weight[:T]  # (B, T, D)
        for layer in range(len(self.qkv)):
            heads = self.qkv[layer](self.norms[2 * layer](x)).view(B, T, 3, self.heads, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, K)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[layer](mixed.transpose(1, 2).flatten(2))
            x = x + self.down[layer](F.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        logits = F.linear(self.norms[-1](x), self.embed.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def encode_characters(path: Path) -> tuple[Tensor, Tensor, int]:
    """The text as character numbers: training, the last tenth, and the vocabulary size."""
    text = np.array(list(path.read_text("utf-8")))
    vocabulary, numbers = np.unique(text, return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    cut = int(0.9 * len(tokens))
    return tokens[:cut], tokens[cut:], len(vocabulary)


def list_modes() -> list[str]:
    """List the modes that this processor has the instructions for."""
    narrow = multiplies_bfloat16(torch.device("cpu"))
    return [name for name, (dtype, _) in MODES.items() if narrow or dtype == torch.float32]


def create_baseline(
    mode: str, *shape: int
) -> tuple[Baseline, torch.optim.Optimizer, Callable[[Tensor, Tensor], None]]:
    """Create a model of the recipe, its optimizer, and what takes a step on tokens, targets."""
    torch.manual_seed(1337)
    model = Baseline(*shape)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), fused=True)
    dtype, is_compiled = MODES[mode]
    compute_loss = torch.compile(model) if is_compiled else model

    def update(tokens: Tensor, targets: Tensor) -> None:
        with Compute(torch.device("cpu"), dtype).autocast():
            loss = compute_loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, update


def train_baseline(path: Path, steps: int, mode: str) -> tuple[float, float]:
    """Train by the CPU recipe (4 x 4 x 128, 12 x 64 tokens a step): seconds, final loss."""
    training, held_out, vocabulary = encode_characters(path)
    model, optimizer, update = create_baseline(mode, 4, 4, 128, 64, vocabulary)
    zeros = torch.zeros(12, 64, dtype=torch.long)
    update(zeros, zeros)  # compiles; at a rate of 0 it changes no weight
    optimizer.state.clear()
    seconds = 0.0
    for step in range(steps):
        started = time.perf_counter()
        share = (step - 100) / max(1, steps - 100)
        cooled = 1e-4 + 0.9e-3 * (0.5 + 0.5 * math.cos(math.pi * max(0.0, share)))
        for group in optimizer.param_groups:
            group["lr"] = min(1e-3 * (step + 1) / 101, cooled)
        starts = torch.randint(len(training) - 64, (12,))
        windows = torch.stack([training[start : start + 65] for start in starts.tolist()])
        update(windows[:, :-1], windows[:, 1:])
        seconds += time.perf_counter() - started
    rows = held_out[: (len(held_out) - 1) // 64 * 64 + 1].unfold(0, 65, 64)
    with torch.no_grad():
        losses = [model(part[:, :-1], part[:, 1:]) * len(part) for part in rows.split(64)]
    return seconds, (sum(losses) / len(rows)).item()


def time_baseline_steps(path: Path, rows: int) -> dict[str, float]:
    """Seconds a step of the GPU recipe (6 x 6 x 384, rows of 256 tokens) in each mode."""
    found = {}
    tokens = torch.zeros(rows, 256, dtype=torch.long)
    for mode in list_modes():
        *_, update = create_baseline(mode, 6, 6, 384, 256, encode_characters(path)[2])
        for _ in range(2):  # the first one compiles and allocates
            started = time.perf_counter()
            update(tokens, tokens)
            found[mode] = time.perf_counter() - started
    return found


class Runs:
    """Runs `gptmini train` in child processes, in a temporary folder."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder, self.numbers = path, folder, count()

    def train(self, config: str | None, *settings: str) -> list[dict[str, float]]:
        """Train a configuration with some settings changed; the run's metrics."""
        words = [config] if config else ["--set", "tokenizer.kind=char"]
        if config is None or config.startswith("shakespeare"):
            words += ["--data", str(self.path)]
        words += [word for setting in settings for word in ("--set", setting)]
        out = self.folder / str(next(self.numbers))
        words += ["--out", str(out)]
        command = [sys.executable, "-m", "gptmini", "train", *words]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.exit(process.stderr)
        return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def find_seconds_to(metrics: list[dict[str, float]], target: float) -> float:
    """Seconds of updates until the first evaluation at or below a loss."""
    seconds = [m["seconds"] for m in metrics if m.get("val_loss", math.inf) <= target]
    return min(seconds, default=math.nan)


@dataclass
class Tables:
    """What the parts measure."""

    speed: Table
    work: Table
    configurations: Table


def measure_steps(runs: Runs, tables: Tables, extent: Extent) -> None:
    """Time of a step of the GPU recipe, eager and compiled."""
    rows = 4 if extent == "trial" else 64
    shape = ["model={n_layer: 6, n_head: 6, d_model: 384}", f"train.batch_size={rows}"]
    short = [f"train.steps={3 if extent == 'trial' else 9}", "train.log_every=1"]
    short += ["data.validation=0.01", "train.eval_tokens=256"]
    for _ in range({"trial": 1, "quick": 2, "full": 5}[extent]):
        plain = time_baseline_steps(runs.path, rows)
        for mode, name in (("off", "eager"), ("on", "compiled")):
            metrics = runs.train(None, *shape, *short, f"train.compile={mode}")
            seconds = statistics.median(rows * 256 / m["tokens_per_second"] for m in metrics[2:])
            row = f"seconds a step, 6 x 6 x 384, {rows} x 256 tokens, {name}"
            for column, value in {**plain, "gptmini": seconds}.items():
                tables.speed.append(row, column, value)


def measure_small(runs: Runs, tables: Tables, extent: Extent) -> None:
    """Time to the final loss of the CPU recipe, in the mode that is fastest for 100 steps."""
    steps = 2 if extent == "trial" else 100
    row = f"seconds of {steps} steps, 4 x 4 x 128, 12 x 64 tokens"
    for mode in list_modes():
        tables.speed.append(row, mode, train_baseline(runs.path, steps, mode)[0])
    fastest = tables.speed.find_peer(row)
    row = f"seconds to {SMALL_TARGET}"
    for _ in range(1 if extent == "trial" else 3):  # in turns, as the machine's speed drifts
        seconds, loss = train_baseline(runs.path, 20 * steps, fastest)
        metrics = measure_configuration(runs, tables, "shakespeare-char-small", extent)
        tables.speed.append(row, fastest, seconds)
        tables.speed.append(row, "gptmini", find_seconds_to(metrics, SMALL_TARGET))
        tables.configurations.append("shakespeare-char-small", "plain PyTorch's loss", loss)


def measure_large(runs: Runs, tables: Tables, extent: Extent) -> None:
    """Time to the best loss of the GPU recipe, whose 5000 steps are extrapolated, not run."""
    row = f"minutes to {LARGE_TARGET}"
    for _ in range(3 if extent == "full" else 1):
        plain = time_baseline_steps(runs.path, 4 if extent == "trial" else 64)
        metrics = measure_configuration(runs, tables, "shakespeare-char", extent)
        for mode, seconds in plain.items():
            tables.speed.append(row, mode, 5000 * seconds / 60)
        tables.speed.append(row, "gptmini", find_seconds_to(metrics, LARGE_TARGET) / 60)


def measure_configurations(runs: Runs, tables: Tables, extent: Extent) -> None:
    """What the other configurations end at."""
    names = ("shakespeare-char-best", "python-code", "attention/gqa", "attention/mqa")
    for name in names[-1:] if extent == "trial" else names:
        measure_configuration(runs, tables, name, extent)


def measure_configuration(
    runs: Runs, tables: Tables, name: str, extent: Extent
) -> list[dict[str, float]]:
    """Train a configuration; add its loss and the minutes of the whole command."""
    started = time.perf_counter()
    settings = ["train.steps=3", "train.eval_every=3"] if extent == "trial" else []
    metrics = runs.train(name, *settings)
    minutes = (time.perf_counter() - started) / 60
    best = min((m for m in metrics if "val_loss" in m), key=lambda m: m["val_loss"])
    tables.configurations.append(name, "loss", best["val_loss"])
    tables.configurations.append(name, "bits per byte", best["val_bpb"])
    tables.configurations.append(name, "minutes", minutes)
    return metrics


def time_step(config: Config, compute: Compute, compiled: bool) -> float:
    """Seconds of the faster of two steps of a new model on dummy tokens; the first allocates."""
    size = choose_micro_batch_size(config, Machine(compute), [1])
    model = GPT(config.model).to(compute.device).train()
    if compiled:
        compile_blocks(model)
    compute_loss = RecordedLoss(model) if compute.device.type == "cuda" else model
    optimizer = Optimizer(model, config.train, compute.dtype)
    tokens = torch.zeros(size, config.seq_len, dtype=torch.long, device=compute.device)
    seconds = []
    with compute.enter_training():
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(config.train.batch_size // size):
                with compute.autocast():
                    loss = compute_loss(tokens, tokens)
                loss.backward()
            optimizer.step(config.train.lr)
            compute.synchronize()
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def measure_share(runs: Runs, tables: Tables, extent: Extent) -> None:
    """How much of what a large product reaches a whole step does; `runs` are not needed."""
    trial = extent == "trial"
    compute = pick_compute("auto", "auto")
    keep_freed_memory()
    size = 512 if trial else 4096
    square = torch.randn(size, size).to(compute.dtype)
    times = []
    for _ in range(2 if trial else 6):
        started = time.perf_counter()
        square @ square
        times.append(time.perf_counter() - started)
    reached = 2 * size**3 / min(times)
    large = {"n_layer": 6, "n_head": 6, "d_model": 384, "vocab_size": 257, "dropout": 0.2}
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        "default": ("default", {"model": {"vocab_size": 4096, "dropout": 0.1}}),
        "shakespeare-char": ("shakespeare-char", {"model": {"vocab_size": 257, "dropout": 0.0}}),
        "6 x 6 x 384, 64 rows": ("default", {"model": large, "train": {"batch_size": 64}}),
    }
    for row, (config, settings) in list(shapes.items())[: 1 if trial else None]:
        full = load_config(find_config_file(config), []).fill_open(settings)
        work = count_training_flops(full.model, full.seq_len) * full.train.batch_size * full.seq_len
        tables.work.append(row, "product", reached / 1e9)
        for name in ("eager",) if trial else ("eager", "compiled"):
            seconds = time_step(full, compute, compiled=name == "compiled")
            tables.work.append(row, name, work / seconds / 1e9)


PARTS = {
    "step": measure_steps,
    "small": measure_small,
    "large": measure_large,
    "share": measure_share,  # keeps memory for the process, so it comes after the peer
    "configurations": measure_configurations,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, default=SHAKESPEARE)
    parser.add_argument("--parts", help=f"some of {', '.join(PARTS)}; the last only with --full")


def measure(extent: Extent, text: Path = SHAKESPEARE, parts: str | None = None) -> Iterator[Table]:
    modes = list_modes()
    tables = Tables(
        Table("train", "", [*modes, "peer", "gptmini", "peer / gptmini"], peers=tuple(modes)),
        Table(
            "train share",
            "GFLOP/s",
            ["product", "eager", "compiled", "eager / product", "compiled / product"],
        ),
        Table(
            "configurations", "", ["loss", "plain PyTorch's loss", "bits per byte", "minutes"], 4
        ),
    )
    names = parts.split(",") if parts else list(PARTS)[: None if extent == "full" else -1]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(check_text(text), Path(folder))
        for name in names:
            PARTS[name](runs, tables, extent)
    yield from (table for table in vars(tables).values() if table.rows)
