"""Time attention by variant, length and window: python scripts/bench attention [--quick]

The variants take turns in one process, because a machine's speed drifts. The table gives medians
and the ratio to MHA, which travels better than milliseconds. Width 768, 12 query heads of size 64,
float32: a layer of GPT-2 small; trainings take 4 rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from gptmini.config.settings import ModelConfig
from gptmini.machine import keep_freed_memory
from gptmini.model.attention import Attention, attend
from gptmini.model.cache import KVCache

VARIANTS = {
    "mha": {"variant": "mha"},
    "gqa:3": {"variant": "gqa", "n_kv_head": 3},
    "mqa": {"variant": "mqa"},
    "window 128": {"variant": "mha", "window": 128},
}


def build_config(name: str, context_length: int) -> ModelConfig:
    """A model with a single layer of that variant."""
    return ModelConfig.model_validate(
        {
            "n_layer": 1,
            "n_head": 12,
            "d_model": 768,
            "context_length": context_length,
            "position": "none",
            "attention": VARIANTS[name],
        }
    )


def time_in_turns(
    calls: dict[str, Callable[[], object]], rounds: int, repeat: int
) -> dict[str, float]:
    """Median seconds per call; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            if turn:  # the first turn warms up
                times[name].append((time.perf_counter() - started) / repeat)
    return {name: statistics.median(values) for name, values in times.items()}


def make_training_call(name: str, length: int, rows: int) -> Callable[[], object]:
    """Forward and backward of an attention module, products in bfloat16."""
    module = Attention(build_config(name, length))
    x = torch.randn(rows, length, 768, requires_grad=True)  # (B, T, D)

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        out.float().sum().backward()

    return call


def make_decode_call(name: str, length: int) -> tuple[Callable[[], object], int]:
    """One query on a full cache, as when generating a token, and the cache's bytes."""
    config = build_config(name, length)
    cache = KVCache(config, 1, torch.device("cpu"), torch.float32)
    layer = cache.layers[0]
    torch.nn.init.normal_(layer.keys)
    torch.nn.init.normal_(layer.values)
    q = torch.randn(1, 12, 1, 64)  # (B, H, T, K)
    return torch.inference_mode()(lambda: attend(q, layer.keys, layer.values)), cache.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short length, one row, few rounds")
    quick = parser.parse_args().quick
    keep_freed_memory()
    torch.manual_seed(0)
    rounds = 3 if quick else 15
    training_rounds = 1 if quick else 5
    rows = 1 if quick else 4
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(
        "| length | variant | training ms | to MHA | decode µs | to MHA | cache bytes | formula |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for length in (128,) if quick else (256, 1024, 4096):
        decodes = {name: make_decode_call(name, length) for name in VARIANTS}
        training: dict[str, float] = {}
        if length <= 1024:
            steps = {name: make_training_call(name, length, rows) for name in VARIANTS}
            training = time_in_turns(steps, training_rounds, 1)
        decoding = time_in_turns({name: call for name, (call, _) in decodes.items()}, rounds, 200)
        for name, (_, size) in decodes.items():
            config = build_config(name, length)
            formula = 2 * config.n_kv_head * 64 * config.get_cache_length(0) * 4
            milliseconds = ""
            ratio = ""
            if training:
                milliseconds = f"{training[name] * 1e3:.1f}"
                ratio = f"{training['mha'] / training[name]:.2f} x"
            print(
                f"| {length} | {name} | {milliseconds} | {ratio} | {decoding[name] * 1e6:.0f} | "
                f"{decoding['mha'] / decoding[name]:.2f} x | {size:,} | {formula:,} |"
            )
