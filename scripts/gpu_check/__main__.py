"""Check gptmini on a GPU in two runs of at most ten minutes.

python scripts/gpu_check training [--out gpu_check-training.json] [--parts setup,tests,...]
python scripts/gpu_check generation
python scripts/gpu_check training --small --device cpu   # the same on a small model, in seconds

Everything found goes to one JSON file, and as tables to a page beside it. Each part runs in a
process of its own under a time limit. One that fails or runs out of time is recorded with the end
of its output and whatever it had found, and the next part follows. Nothing needs the network: with
the files of gpt2 in TIKTOKEN_CACHE_DIR that is the tokenizer, else pairs of bytes in a vocabulary
of the same size.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # a checkout need not be installed

from gptmini import files
from gpu_check import generation, training
from gpu_check.check import Check, Facts
from gpu_check.page import write_page

TOTAL_SECONDS = 560  # for all parts, so that starting and writing still fit in ten minutes
LINES_OF_OUTPUT = 25  # that are kept of a part that fails

Part = Callable[[Check], Facts]
# The parts of each run with their limits in seconds, those first whose failure matters most.
RUNS: dict[str, dict[str, tuple[Part, float]]] = {
    "training": {
        "setup": (training.setup, 60),
        "ceilings": (training.ceilings, 20),
        "train": (training.train, 110),
        "nanogpt": (training.nanogpt, 110),
        "profile": (training.profile_steps, 60),
        "changes": (training.changes, 150),
        "bits": (training.equal_bits, 70),
        "tests": (training.tests, 120),
        "steps": (training.steps, 120),
    },
    "generation": {
        "setup": (training.setup, 60),
        "model": (generation.train_model, 80),
        "texts": (generation.same_texts, 60),
        "decode": (generation.decode, 110),
        "changes": (generation.changes, 60),
        "profile": (generation.profile_tokens, 40),
        "peers": (generation.peers, 60),
        "precision": (generation.precision, 60),
        "analyses": (generation.analyses, 60),
        "serve": (generation.serve, 40),
        "commands": (generation.commands, 90),
    },
}


def run_part(part: Part, name: str, check: Check) -> None:
    """In a child process: write each fact of a part as soon as it is found."""
    os.setsid()  # so that it can be killed with the processes that compile for it
    log = os.open(check.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    found: dict[str, Any] = {}
    for key, value in part(check):
        found[key] = value
        files.atomic_write_bytes(check.folder / f"{name}.json", json.dumps(found).encode())


def watch_part(part: Part, name: str, check: Check, limit: float) -> dict[str, Any]:
    """Run a part in a child process for at most `limit` seconds; return what came of it."""
    started = time.perf_counter()
    log = check.folder / f"{name}.log"
    facts = check.folder / f"{name}.json"
    # A fork needs no imports, and nothing has touched the GPU yet.
    child = multiprocessing.get_context("fork").Process(target=run_part, args=(part, name, check))
    child.start()
    child.join(limit)
    is_late = child.is_alive()
    if is_late:
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
    record: dict[str, Any] = {"ok": child.exitcode == 0 and not is_late}
    record["seconds"] = round(time.perf_counter() - started, 1)
    record["found"] = json.loads(facts.read_text()) if facts.exists() else {}
    if not record["ok"]:
        record["ended"] = f"after {limit:.0f} s" if is_late else f"with exit code {child.exitcode}"
        record["output"] = log.read_text(errors="replace").splitlines()[-LINES_OF_OUTPUT:]
    return record


def main() -> None:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("run", choices=list(RUNS))
    parser.add_argument("--out", type=Path, help="the JSON file; gpu_check-RUN.json by default")
    parser.add_argument("--parts", help="some of the parts; all by default")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a small model, few steps")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, to time its bench.py")
    options = parser.parse_args()
    parts = RUNS[options.run]
    out = options.out or Path(f"gpu_check-{options.run}.json")
    names = options.parts.split(",") if options.parts else list(parts)
    ends = time.perf_counter() + TOTAL_SECONDS
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.device, options.small, Path(folder), options.nanogpt)
        # One cache of compiled kernels: parts compile the same blocks.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(check.folder / "kernels"))
        for name in names:
            part, limit = parts[name]
            left = max(1.0, ends - time.perf_counter())
            record = watch_part(part, name, check, min(limit, left))
            records[name] = record
            print(name, "ok" if record["ok"] else "FAILED", record["seconds"], "s", flush=True)
            files.atomic_write_bytes(out, json.dumps(records, indent=1).encode())
            page = write_page(records)
            files.atomic_write_bytes(out.with_suffix(".md"), page.encode())
    sys.exit(not all(record["ok"] for record in records.values()))


if __name__ == "__main__":
    main()
