"""Compare kinds of attention on text that nothing was chosen on: python scripts/bench compare

`gptmini compare` with five seeds of a model of 4 layers of width 128, batches of 8 x 256 characters
and 600 steps; bits per byte of the test part of Tiny Shakespeare and of Python's manual, by seed.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.results import SHAKESPEARE, Extent, Table, check_text
from bench.scale import run_gptmini

KINDS = ("mha", "gqa:2", "mqa", "window:64")
SETTINGS = ("data.test=0.1", "model.d_model=128", "train.batch_size=8", "train.compile=off")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, default=SHAKESPEARE)


def measure(extent: Extent, text: Path = SHAKESPEARE) -> Iterator[Table]:
    trial = extent == "trial"
    differences = [f"{kind} - mha" for kind in KINDS[1:]]
    table = Table("compare", "bits per byte", [*KINDS, *differences], 5)
    texts = {"Tiny Shakespeare": str(check_text(text)), "Python's manual": "builtin:python-docs"}
    for name, path in list(texts.items())[: 1 if trial else None]:
        words = [f"--attention={','.join(KINDS)}", f"--seeds={2 if trial else 5}", "--split=test"]
        words += [f"--set={setting}" for setting in SETTINGS]
        words += ["--steps=2"] if trial else []
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "compare")
            run_gptmini("compare", "shakespeare-char", *words, f"--data={path}", f"--out={out}")
            found = json.loads((out / "compare.json").read_text())
        for kind, variant in zip(KINDS, found["variants"], strict=True):
            for run in variant["runs"]:
                table.append(name, kind, run["bits_per_byte"])
    yield table
