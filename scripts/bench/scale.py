"""What two minutes of training predict, beside compressors: python scripts/bench scale

Bits per byte of the ninth tenth of four texts, kept as `data.test`, after `gptmini train --minutes
2` on the first eight, and by xz and PPMd (pip install pyppmd) that have read the same eight. A text
that is too long for the compressors has no figures of theirs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.results import SHAKESPEARE, Extent, Table, check_text


def run_gptmini(*words: str) -> str:
    """Run a command; return what it prints."""
    command = [sys.executable, "-m", "gptmini", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(process.stderr)
    return process.stdout


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, default=SHAKESPEARE)


def measure(extent: Extent, text: Path = SHAKESPEARE) -> Iterator[Table]:
    texts = {
        "Tiny Shakespeare": str(check_text(text).resolve()),
        "Python's manual": "builtin:python-docs",
        "Python's library": "builtin:python-code",
        "numpy's sources": f"{Path(np.__file__).parent}/**/*.py",
    }
    names = ["gptmini", "xz", "PPMd"]
    table = Table("scale", "bits per byte", [*names, "gptmini - xz", "gptmini - PPMd"], 4)
    length = ["--steps", "3"] if extent == "trial" else ["--minutes", "2"]
    for seed in (1337, 1338, 1339) if extent == "full" else (1337,):
        for name, path in list(texts.items())[: 1 if extent == "trial" else None]:
            with tempfile.TemporaryDirectory() as folder:
                run = f"{folder}/run"
                words = [f"--data={path}", f"--out={run}", "--set=data.test=0.1", *length]
                run_gptmini("train", *words, f"--set=train.seed={seed}")
                found = json.loads(run_gptmini("evaluate", run, "--split=test", "--json"))
            table.append(name, "gptmini", found["bits_per_byte"])
            for compressor, figure in found["compressors"].items():
                table.append(name, compressor, figure)
    yield table
