"""Kill training runs at random moments and compare how they end: python scripts/torture.py RUNS

Each run is killed (SIGKILL) and restarted until it reaches its last step. Its weights and metrics
must then equal those of an undisturbed run. PyTorch is imported once and every attempt is a fork
of this process, so an attempt takes a fraction of a second. With --ranks N, N processes train each
run, and one of them is killed.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # the optimizer imports it, which takes longer than a run

from gptmini.config.settings import Config
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from gptmini.train.group import join_group

STEPS = 24


def build_config(folder: Path) -> Config:
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


def start_training(config: Config, folder: Path, name: str, n_ranks: int) -> list[int]:
    """Train in forks; their process ids."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    pids = []
    for rank in range(n_ranks):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, sys.stderr.fileno())
            if n_ranks > 1:  # as torchrun does
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"WORLD_SIZE": str(n_ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            run = RunDirectory(folder / name)
            with join_group() as group:
                started = time.perf_counter()
                plan = group.make_plan(config, run, started)
                loop.train(plan, run.path, group=group)
            code = 0
        finally:
            os._exit(code)
    return pids


def hash_result(run: Path) -> str:
    """A hash of the final weights and of every metric that does not depend on the clock."""
    weights = run / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"
    hashed = hashlib.sha256(weights.read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        clock = ("seconds", "wall_time", "tokens_per_second", "peak_memory")
        figures = {key: metrics[key] for key in sorted(metrics) if key not in clock}
        hashed.update(json.dumps(figures).encode())
    return hashed.hexdigest()


def kill_or_finish(pids: list[int], seconds: float, victim: int = 0) -> int | None:
    """Kill one process after some seconds; the others then end by themselves.

    Returns None, or the highest exit code if all finished first.
    """
    end = time.monotonic() + seconds
    running = dict.fromkeys(pids)
    codes: list[int] = []
    while running and time.monotonic() < end:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                codes.append(os.waitstatus_to_exitcode(status))
        time.sleep(0.002)
    if pids[victim] in running:
        os.kill(pids[victim], signal.SIGKILL)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
    return None if -signal.SIGKILL in codes else max(codes)


def main() -> None:
    """Kill and resume runs; exit with 1 if one was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int)
    parser.add_argument("--ranks", type=int, default=1, metavar="N")
    args = parser.parse_args()
    n_runs = args.runs
    n_ranks = args.ranks
    torch.set_num_threads(1)
    chance = random.Random(1337)  # noqa: S311 - not a secret
    kills = equal = lost = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(500)))
        config = build_config(folder)
        started = time.monotonic()
        if kill_or_finish(start_training(config, folder, "undisturbed", n_ranks), 600) != 0:
            sys.exit("the undisturbed run failed")
        expected = hash_result(folder / "undisturbed")
        seconds = time.monotonic() - started
        for run in range(n_runs):
            status = None
            while status is None:
                pids = start_training(config, folder, f"run-{run}", n_ranks)
                victim = chance.randrange(n_ranks)
                status = kill_or_finish(pids, seconds * chance.uniform(0.05, 0.8), victim)
                kills += status is None
            if status == 0 and hash_result(folder / f"run-{run}") == expected:
                equal += 1
            else:
                lost += 1
                print(f"run {run}: exit code {status}, or different bits", file=sys.stderr)
    print(f"{n_runs} runs, {kills} kills and resumes, {equal} equal ends, {lost} lost")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
