"""Time attention by variant, length and window: python scripts/bench attention

The variants take turns in one process, because a machine's speed drifts. Width 768, 12 query heads
of size 64, float32: a layer of GPT-2 small; trainings take 4 rows.
"""

import time
from collections.abc import Callable, Iterator

import torch

from bench.results import Extent, Table
from gptmini.config.settings import ModelConfig
from gptmini.machine import keep_freed_memory
from gptmini.model.attention import Attention, attend
from gptmini.model.cache import KVCache, NoCache

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
    table: Table, row: str, calls: dict[str, Callable[[], object]], rounds: int, repeat: int
) -> None:
    """Add the seconds of calls, in the unit of the table, to a row; the calls take turns."""
    scale = {"ms": 1e3, "µs": 1e6}[table.unit.split(", ")[-1]]
    for turn in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            if turn:  # the first turn warms up
                table.append(row, name, (time.perf_counter() - started) / repeat * scale)


def make_training_call(name: str, length: int, rows: int) -> Callable[[], object]:
    """Forward and backward of an attention module, products in bfloat16."""
    module = Attention(build_config(name, length))
    x = torch.randn(rows, length, 768, requires_grad=True)  # (B, T, D)

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x, None, NoCache(x.device))
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


def measure(extent: Extent) -> Iterator[Table]:
    keep_freed_memory()
    torch.manual_seed(0)
    trial = extent == "trial"
    factors = [f"mha / {name}" for name in VARIANTS if name != "mha"]
    training = Table("attention training", "length, ms", [*VARIANTS, *factors])
    decoding = Table("attention decoding", "length, µs", [*VARIANTS, *factors])
    caches = Table("attention cache", "length, bytes", [*VARIANTS])
    for length in (128,) if trial else (256, 1024, 4096):
        row = f"{length:,}"
        decodes = {}
        for name in VARIANTS:
            decodes[name], size = make_decode_call(name, length)
            config = build_config(name, length)
            assert size == 2 * config.n_kv_head * 64 * config.get_cache_length(0) * 4
            caches.append(row, name, size)
        if length <= 1024:
            steps = {name: make_training_call(name, length, 1 if trial else 4) for name in VARIANTS}
            time_in_turns(training, row, steps, 1 if trial else 5, 1)
        time_in_turns(decoding, row, decodes, 3 if trial else 15, 200)
    yield from (training, decoding, caches)
