"""Run every bench that a table of the pages rests on: python scripts/bench all

Each runs in a process of its own, one after another, and its tables are written to the results
file when it ends. Run again, what is there already is skipped, as long as gptmini/ and the machine
are those of the file: so a kill loses one bench at most. One that fails is named, the others go on,
and the exit code is 1. At the end it writes the tables of scripts/RESULTS.md and of README.md.
--full takes a night.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.results import RESULTS, ROOT, Extent, Results
from bench.servers import LLAMA_CPP, read_llama_version
from gptmini.files import atomic_write_bytes

# The minutes that each takes on two cores with bfloat16, quick and full.
MINUTES: dict[str, tuple[float, float]] = {
    "first": (3, 3),
    "generate": (8, 25),
    "llama": (5, 5),
    "serve": (5, 12),
    "learning": (8, 45),
    "train": (20, 70),
}
COMMAND = (sys.executable, str(Path(__file__).parent))
PACKAGES = ("torch", "transformers", "xllamacpp", "gguf", "numpy", "pyppmd")


def describe_machine() -> dict[str, Any]:
    """Describe the machine; only runs of the same one are kept together."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
        processor = next(names, processor).replace("(R)", "")
    if torch.cpu._is_amx_tile_supported():
        processor += " with AMX"
    elif torch.cpu._is_avx512_bf16_supported():
        processor += " with AVX512-BF16"
    return {
        "processor": processor,
        "cores": psutil.cpu_count(),
        "memory GiB": round(psutil.virtual_memory().total / 2**30),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }


def list_versions() -> dict[str, str]:
    """List the versions of Python and of the packages that take part."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if LLAMA_CPP:
        versions.pop("xllamacpp", None)
        versions["llama.cpp"] = read_llama_version()
    return versions


def run_git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"bench all: needs a checkout; {done.stderr.strip()}")
    return done.stdout.strip()


def open_results(path: Path, commit: str, changed: bool) -> dict[str, Any]:
    """Read what is measured already, or begin anew; how long a bench took stays known."""
    machine = describe_machine()
    old: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not changed and old.get("machine") == machine:
        return old
    return {
        "machine": machine,
        "commit": commit,
        "date": "",
        "versions": list_versions(),
        "minutes": old.get("minutes", {}),
        "benches": {},
    }


def find_commit(path: Path) -> tuple[str, bool]:
    """Find the commit, and whether gptmini/ differs from that of the results."""
    left = run_git("status", "--porcelain", "--", "gptmini", "scripts/bench")
    if left:
        sys.exit(f"bench all: commit or remove what has changed first\n{left}")
    changed = True
    if path.exists():
        measured = json.loads(path.read_text("utf-8"))["commit"]
        command = ["git", "-C", str(ROOT), "diff", "--quiet", measured, "--", "gptmini"]
        changed = subprocess.run(command, capture_output=True, check=False).returncode != 0
    return run_git("rev-parse", "--short", "HEAD"), changed


def guess_minutes(results: dict[str, Any], name: str, extent: Extent) -> float:
    """Guess how long a bench takes, from the last time if there is one."""
    if extent == "trial":
        return 1.0
    quick, full = MINUTES[name]
    stated = full if extent == "full" else quick
    return float(results["minutes"].get(f"{name} {extent}", stated))


def measure_all(path: Path, results: dict[str, Any], names: list[str], extent: Extent) -> list[str]:
    """Measure what is not there yet, and write the results after each; return what failed."""
    done = results["benches"]
    waiting = [name for name in names if done.get(name, {}).get("extent") not in (extent, "full")]
    for name in names:
        if name not in waiting:
            say(f"{name}: is there already")
    failed = []
    for n, name in enumerate(waiting):
        minutes = [guess_minutes(results, other, extent) for other in waiting[n:]]
        say(f"{name}: about {minutes[0]:.0f} min; {sum(minutes):.0f} min left in all")
        started = time.perf_counter()
        tables, problem = run_bench(name, extent)
        taken = (time.perf_counter() - started) / 60
        if problem:
            failed.append(name)
            say(f"{name}: failed after {taken:.1f} min: {problem}")
            continue
        done[name] = {"extent": extent, "tables": tables}
        results["minutes"][f"{name} {extent}"] = round(taken, 2)
        results["date"] = str(date.today())
        atomic_write_bytes(path, json.dumps(results, indent=1).encode() + b"\n")
        say(f"{name}: {taken:.1f} min")
    return failed


def run_bench(name: str, extent: Extent) -> tuple[dict[str, Any], str]:
    """Run a bench in a process of its own; its tables, or the last line of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tables.json"
        command = [*COMMAND, name, f"--extent={extent}", f"--json={out}"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            return {}, said[-1] if said else f"exit code {done.returncode}"
        return json.loads(out.read_text("utf-8")), ""


def say(line: str) -> None:
    print(time.strftime("%H:%M"), line, flush=True)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    extents = parser.add_mutually_exclusive_group()
    extents.add_argument("--full", dest="extent", action="store_const", const="full")
    extents.add_argument("--trial", dest="extent", action="store_const", const="trial")
    parser.set_defaults(extent="quick")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--only", metavar="NAME,...", help="some of: " + ", ".join(MINUTES))
    options = parser.parse_args(words)
    names = options.only.split(",") if options.only else list(MINUTES)
    unknown = set(names) - set(MINUTES)
    if unknown:
        parser.error(f"--only: not {', '.join(sorted(unknown))} but {', '.join(MINUTES)}")
    commit, changed = find_commit(options.out)
    results = open_results(options.out, commit, changed)
    failed = measure_all(options.out, results, names, options.extent)
    if options.out == RESULTS:
        Results(results).write_pages()
    if failed:
        say(f"failed: {', '.join(failed)}; python scripts/bench NAME shows why")
    sys.exit(1 if failed else 0)
