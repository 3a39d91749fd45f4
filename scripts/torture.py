"""Kill training runs at random moments and compare how they end: python scripts/torture.py RUNS

Each run is killed (SIGKILL) and restarted until it reaches its last step. Its weights and metrics
must then equal those of an undisturbed run. PyTorch is imported once and every attempt is a fork
of this process, so an attempt takes a fraction of a second.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # the optimizer imports it, which takes longer than a run

from gptmini.config.settings import Config
from gptmini.plan.decide import decide
from gptmini.runs.directory import RunDirectory
from gptmini.train import trainer

STEPS = 24


def config_of(folder: Path) -> Config:
    """A small run with dropout, gradient accumulation and many checkpoints."""
    return Config.model_validate(
        {
            "model": {
                "n_layer": 2,
                "n_head": 2,
                "d_model": 32,
                "context_length": 32,
                "dropout": 0.1,
            },
            "tokenizer": {"kind": "byte"},
            "data": {"path": str(folder / "text.txt")},
            "train": {
                "steps": STEPS,
                "batch_size": 8,
                "micro_batch_size": 4,
                "save_every": 3,
                "eval_every": 8,
                "log_every": 1,
            },
        }
    )


def attempt(config: Config, folder: Path, name: str) -> int:
    """Train in a fork; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, sys.stderr.fileno())
            run = RunDirectory(folder / name)
            trainer.train(decide(config, run, folder / "cache"), run.path)
            code = 0
        finally:
            os._exit(code)
    return pid


def result(run: Path) -> str:
    """A hash of the final weights and of every metric that does not depend on the clock."""
    weights = run / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"
    hashed = hashlib.sha256(weights.read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        figures = {
            key: metrics[key]
            for key in sorted(metrics)
            if "second" not in key and "memory" not in key
        }
        hashed.update(json.dumps(figures).encode())
    return hashed.hexdigest()


def killed_or_done(pid: int, seconds: float) -> int | None:
    """Kill a process after some seconds: None, or its exit code if it finished first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if status == -signal.SIGKILL else status


def main() -> None:
    """Exits with 1 if a run was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int)
    n_runs = parser.parse_args().runs
    torch.set_num_threads(1)
    chance = random.Random(1337)  # noqa: S311 - not a secret
    kills = equal = lost = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(500)))
        config = config_of(folder)
        started = time.monotonic()
        if killed_or_done(attempt(config, folder, "undisturbed"), 600) != 0:
            sys.exit("the undisturbed run failed")
        expected, seconds = result(folder / "undisturbed"), time.monotonic() - started
        for run in range(n_runs):
            status = None
            while status is None:
                pid = attempt(config, folder, f"run-{run}")
                status = killed_or_done(pid, seconds * chance.uniform(0.05, 0.8))
                kills += status is None
            if status == 0 and result(folder / f"run-{run}") == expected:
                equal += 1
            else:
                lost += 1
                print(f"run {run}: exit code {status}, or different bits", file=sys.stderr)
    print(f"{n_runs} runs, {kills} kills and resumes, {equal} equal ends, {lost} lost")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
