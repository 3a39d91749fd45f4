"""Run a benchmark: python scripts/bench NAME [options]

  all        those whose figures pages have; keep their runs, and rewrite the tables

  first      the commands of the README
  generate   tokens per second beside transformers on the same weights
  gpu        training and generation on a GPU, beside nanoGPT
  learning   what recipes learn from the same tokens
  llama      tokens per second beside llama.cpp on the same weights
  serve      the server under concurrent clients, beside llama.cpp's
  train      training beside plain PyTorch that follows nanoGPT's recipes

`python scripts/bench NAME --help` lists the options of one. Each prints Markdown tables; with
--full it measures more, with --trial it only shows that it runs.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# A checkout need not be installed, nor for the processes that a benchmark starts.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

# Each is imported only when it runs, as what it needs differs.
BENCHMARKS = ("first", "generate", "gpu", "learning", "llama", "serve", "train")


def run_benchmark(bench: Any, name: str, words: list[str]) -> None:
    """Print the tables of a benchmark, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(
        prog=f"bench {name}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    extents = parser.add_mutually_exclusive_group()
    extents.add_argument("--full", dest="extent", action="store_const", const="full")
    extents.add_argument("--trial", dest="extent", action="store_const", const="trial")
    extents.add_argument("--extent", help=argparse.SUPPRESS)
    parser.set_defaults(extent="quick")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    if hasattr(bench, "add_options"):
        bench.add_options(parser)
    options = vars(parser.parse_args(words))
    out = options.pop("json")
    tables = []
    for table in bench.measure(**options):
        tables.append(table)
        print("\n".join(table.draw()), end="\n\n", flush=True)
    if out is not None:
        out.write_text(json.dumps({table.name: table.draw() for table in tables}), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=["all", *BENCHMARKS], metavar="NAME")
    name = parser.parse_args(sys.argv[1:2]).name
    bench = importlib.import_module(f"bench.{name}")
    if name in BENCHMARKS:
        run_benchmark(bench, name, sys.argv[2:])
    else:
        bench.main(sys.argv[2:])


if __name__ == "__main__":
    main()
