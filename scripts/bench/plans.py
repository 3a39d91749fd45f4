"""Compare plans for many accelerators with published training runs: python scripts/bench/plans.py

Each row is planned in this process, without a text: what `gptmini size --ranks N --shard` says of
the same settings, with `train.reduce=fast`. Published are tokens per second and accelerator:

- torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (H100 limited to 500 W; the faster rows
  are compiled) and docs/performance.md (A100, 2024), github.com/pytorch/torchtitan. "selective"
  repeats some of the operations in the backward pass, which gptmini cannot; planned with none.
- llm-foundry, scripts/train/benchmarking/README.md, github.com/mosaicml/llm-foundry.

--quick plans one row.
"""

import argparse
import time
from typing import Any, NamedTuple

from gptmini.config.settings import Config
from gptmini.plan import cluster


class Case(NamedTuple):
    """`rows` per pass and rank; `published` tokens per second and rank, by `source`."""

    name: str
    shape: dict[str, Any]
    accelerator: str
    ranks: int
    rows: int
    passes: int = 1
    again: bool = False  # gradient checkpointing
    published: int | None = None
    source: str = ""


def llama(
    layers: int, heads: int, kv_heads: int, width: int, inner: int, vocabulary: int, T: int
) -> dict[str, Any]:
    """The shape of a Llama with T positions."""
    return {
        "vocab_size": vocabulary,
        "n_layer": layers,
        "n_head": heads,
        "d_model": width,
        "d_ff": inner,
        "context_length": T,
        "attention": {"variant": "gqa", "n_kv_head": kv_heads, "qk_norm": False},
        "norm": "rmsnorm",
        "activation": "swiglu",
        "tie_embeddings": False,
        "dropout": 0,
    }


def mpt(layers: int, heads: int, width: int, T: int, vocabulary: int = 50368) -> dict[str, Any]:
    """The shape of an MPT, or of GPT-2."""
    return {
        "vocab_size": vocabulary,
        "n_layer": layers,
        "n_head": heads,
        "d_model": width,
        "context_length": T,
        "attention": {"qk_norm": False},
        "position": "learned",
        "activation": "gelu",
        "dropout": 0,
    }


LLAMA_3_8B = llama(32, 32, 8, 4096, 14336, 128256, 8192)
LLAMA_3_70B = llama(80, 64, 8, 8192, 28672, 128256, 8192)
LLAMA_2_13B = llama(40, 40, 40, 5120, 13824, 32000, 4096)
LLAMA_2_70B = llama(80, 64, 8, 8192, 28672, 32000, 4096)
LLAMA_2_7B = llama(32, 32, 32, 4096, 11008, 32000, 4096)
TITAN, FOUNDRY = "torchtitan", "llm-foundry"
CASES = [
    Case("GPT-2 124M", mpt(12, 12, 768, 1024, 50257), "h100", 8, 32),
    Case("Llama 2 7B", LLAMA_2_7B, "h100", 256, 2),
    Case("Llama 3 70B", LLAMA_3_70B, "h100", 1024, 2, again=True),
    Case("Llama 3 8B, selective", LLAMA_3_8B, "h100", 8, 2, 1, False, 6667, TITAN),
    Case("Llama 3 8B, selective", LLAMA_3_8B, "h100", 128, 2, 1, False, 6514, TITAN),
    Case("Llama 3 8B, selective", LLAMA_3_8B, "a100", 64, 1, 1, False, 2973, TITAN),
    Case("Llama 3 70B", LLAMA_3_70B, "a100", 64, 1, 1, True, 331, TITAN),
    Case("Llama 2 13B", LLAMA_2_13B, "a100", 64, 2, 1, False, 2162, TITAN),
    Case("Llama 2 70B", LLAMA_2_70B, "a100", 64, 2, 1, True, 353, TITAN),
    Case("MPT 1B", mpt(24, 16, 2048, 2048), "h100", 64, 20, 1, False, 44402, FOUNDRY),
    Case("MPT 7B", mpt(32, 32, 4096, 2048), "h100", 8, 6, 1, False, 10643, FOUNDRY),
    Case("MPT 13B", mpt(40, 40, 5120, 2048), "h100", 64, 2, 1, False, 4800, FOUNDRY),
    Case("MPT 70B", mpt(80, 64, 8192, 2048), "h100", 64, 8, 4, True, 1039, FOUNDRY),
    Case("MPT 125M", mpt(12, 12, 768, 1024), "a100", 8, 64, 2, False, 156468, FOUNDRY),
    Case("MPT 7B, 40 GB each", mpt(32, 32, 4096, 2048), "a100", 128, 18, 1, True, 3623, FOUNDRY),
    Case("MPT 70B", mpt(80, 64, 8192, 2048), "a100", 64, 8, 4, True, 410, FOUNDRY),
]
QUICK = [Case("quick", mpt(4, 2, 64, 64, 256), "h100", 8, 2, 1, False, 1000, "nobody")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    cases = QUICK if parser.parse_args().quick else CASES
    print("| training | checkpointing | ranks | GiB | communication, s | step, s ", end="")
    print("| tokens/s per rank | published | | by | planned in, CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        train = {
            "optimizer": "adamw",
            "reduce": "fast",
            "batch_size": case.ranks * case.rows * case.passes,
            "micro_batch_size": case.rows,
            "gradient_checkpointing": case.again,
        }
        config = Config.model_validate({"model": case.shape, "train": train})
        on = cluster.find_accelerator(case.accelerator, None, None)
        started = time.process_time()
        plan = cluster.plan_rank(config, on, case.ranks, shard=True)
        seconds = time.process_time() - started
        tokens = case.rows * case.passes * config.seq_len / plan.seconds
        against = ["", ""]
        if case.published:
            against = [f"{case.published:,}", f"{tokens / case.published:.2f} x"]
        print(
            f"| {case.name} | {'on' if case.again else 'off'} | {case.ranks:,} x {on.name} "
            f"| {plan.memory.peak / 2**30:.1f} "
            f"| {plan.communication_seconds:.2g} | {plan.seconds:.3g} "
            f"| {tokens:,.0f} | {against[0]} | {against[1]} | {case.source} | {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
