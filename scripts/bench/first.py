"""Run the first commands of the README in an empty folder: python scripts/bench first

Seconds by the clock of `gptmini train`, of its updates, of `gptmini generate`, of that until the
first word of the text, and of `gptmini --help`; and what the training ends at, beside PPMd.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.learning import measure_ppmd
from bench.results import Extent, Table
from gptmini.generate.run import load_run
from gptmini.train.evaluate_run import load_corpus, read_bytes

PROMPT = "Ella had five plums."
GENERATE = ("generate", "--prompt", PROMPT, "--max-new-tokens", "60")
SMALL = ["--steps", "3", "--set", "model={n_layer: 1, n_head: 2, d_model: 32}"]
SMALL += ["--set", "tokenizer.kind=byte", "--set", "train.eval_tokens=1024"]


def time_command(folder: str, *words: str, until: str | None = None) -> float:
    """Seconds of a command, or until it has written more than a text to stdout."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "gptmini", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        said = b""
        while until is not None and not said.partition(until.encode())[2]:
            piece = process.stdout.read(4096)
            if not piece:
                break
            said += piece
        first = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        sys.exit(f"gptmini {words[0]} failed")
    return time.perf_counter() - started if until is None else first


def measure(extent: Extent) -> Iterator[Table]:
    rounds = 1 if extent == "trial" else 5
    table = Table("first", "", ["seconds"])
    shown = ["loss", "bits per byte", "PPMd", "PPMd-reading-on"]
    ratios = [f"{name} / bits per byte" for name in shown[2:]]
    ends = Table("first quality", "", [*shown, *ratios], 4)
    with tempfile.TemporaryDirectory() as folder:
        train = time_command(folder, "train", *(SMALL if extent == "trial" else []))
        lines = Path(folder, "runs/stories/metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        last = [line for line in metrics if "val_loss" in line][-1]
        table.append("gptmini train", "seconds", train)
        table.append("its updates", "seconds", metrics[-1]["seconds"])
        ends.append("gptmini train", "loss", last["val_loss"])
        ends.append("gptmini train", "bits per byte", last["val_bpb"])
        run = load_run(Path(folder, "runs/stories"))
        corpus = load_corpus(run)
        parts = (corpus.training, corpus.validation)
        training, held_out = (read_bytes(part, run.tokenizer) for part in parts)
        n_windows = sum(map(len, corpus.validation)) / run.config.seq_len
        windows = (round(len(held_out) / n_windows), len(held_out))
        for name, window in zip(shown[2:], windows, strict=True):
            ends.append("gptmini train", name, measure_ppmd(training, held_out, window)[0])
        for _ in range(rounds):
            table.append("gptmini generate", "seconds", time_command(folder, *GENERATE))
            first = time_command(folder, *GENERATE, until=PROMPT)
            table.append("its first word", "seconds", first)
            table.append("gptmini --help", "seconds", time_command(folder, "--help"))
    yield from (table, ends)
