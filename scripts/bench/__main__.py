"""Run a benchmark: python scripts/bench NAME [options]

  attention  a layer by variant, length and window: training, decoding, cache
  generate   tokens per second beside transformers on the same weights
  learning   what recipes learn from the same tokens
  llama      tokens per second beside llama.cpp on the same weights
  memory     a step with and without gradient checkpointing
  processes  a step on several processes of this machine
  serve      the server under concurrent clients
  train      training beside plain PyTorch that follows nanoGPT's recipes

`python scripts/bench NAME --help` lists the options of one. Each prints Markdown tables.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # a checkout need not be installed

# Each is imported only when it runs, as what it needs differs.
BENCHMARKS = ("attention", "generate", "learning", "llama", "memory", "processes", "serve", "train")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    name = parser.parse_args(sys.argv[1:2]).name
    sys.argv[:2] = [f"bench {name}"]  # the options that are left are the benchmark's own
    importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
