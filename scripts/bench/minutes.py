"""Compare what --minutes makes of a text with what other configurations make of it in that time.

python scripts/bench/minutes.py --shakespeare FILE --chinese FOLDER [--minutes 0.5,1] [--runs 2]
    [--texts ...] [--arms plan,default,3x128] [--cores 0,1]

Trains each text for each number of minutes by
  plan           gptmini train --data TEXT --minutes M
  default        the sizes, batch and vocabulary of the default configuration
  3x128 ...      as many layers of that width, chosen by hand, 8 rows if they are 128 wide, else 16
and reports bits per byte on the tenth of the text that `data.test` keeps from all of them: means
over runs, each with a seed of its own. All are given M minutes for the whole command, text
preparation included (each starts with an empty cache but for the compiled decoder), and fit their
steps to them.

--shakespeare is Tiny Shakespeare, one file. --chinese is the folder of manual pages of Debian's
manpages-zh: apt-get download manpages-zh; dpkg -x manpages-zh_*.deb zh; zh/usr/share/man/zh_CN.
Texts that are not given are left out. Results are added to a JSON file (--out); what is there
already is not measured again, so an interrupted benchmark resumes. --cores 0,1 makes one run
at a time on each of these cores, with one thread, instead of one on the whole machine.
"""

import argparse
import gzip
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gptmini.config.load import DEFAULT_CONFIG_FILE, load_config
from gptmini.config.settings import DataConfig
from gptmini.data import sources
from gptmini.tokenizer.choose import choose_tokenizer

ARMS = ("plan", "default", "3x128", "4x192", "4x256", "6x384")
Trial = tuple[str, str, str, int]  # text, minutes, arm, run
Results = dict[str, dict[str, Any]]  # by these four, with a slash between them
FIRST_SEED = 1337
# What --minutes chooses, and the other configurations therefore state.
PLANNED = {"model": ("n_layer", "n_head", "d_model"), "train": ("batch_size",)}


@dataclass(frozen=True)
class BenchText:
    """A text, and the settings that belong to it."""

    paths: list[str]
    settings: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """On the command line."""
        words = [word for path in self.paths for word in ("--data", path)]
        return words + [word for each in self.settings for word in ("--set", each)]


def find_texts(
    shakespeare: Path | None, chinese: Path | None, folder: Path
) -> dict[str, BenchText]:
    """The texts that can be had: python's own, and those that are given."""
    found = {}
    if shakespeare is not None:
        path = str(shakespeare.resolve())
        found["shakespeare-char"] = BenchText([path], ("tokenizer.kind=char",))
        found["shakespeare"] = BenchText([path])
    found["python-docs"] = BenchText(["builtin:python-docs"])
    found["python-code"] = BenchText(["builtin:python-code"])
    if chinese is not None:
        pages = [gzip.decompress(page.read_bytes()) for page in sorted(chinese.rglob("*.gz"))]
        if not pages:
            sys.exit(f"--chinese {chinese}: has no manual pages (*.gz)")
        path = str(folder / "chinese.txt")
        Path(path).write_bytes(b"\n".join(pages))
        found["chinese"] = BenchText([path])
    if shakespeare is not None:
        paths = [*found["shakespeare"].paths, "builtin:python-docs"]
        found["mix"] = BenchText(paths, ("data.weights=[1, 1]",))
    return found


class Bench:
    """Runs gptmini in child processes, each on one of `cores` if there are any."""

    def __init__(self, folder: Path, cores: list[str]) -> None:
        self.folder = folder
        self.cores: queue.Queue[str] = queue.Queue()
        for core in cores or [""]:
            self.cores.put(core)

    def run_gptmini(self, *words: str, core: str = "") -> tuple[str, float]:
        """The output of a command, and its seconds; RuntimeError if it fails."""
        pinned = ["taskset", "-c", core] if core else []
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if core else {})
        command = [*pinned, sys.executable, "-m", "gptmini", *words]
        started = time.perf_counter()
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        if process.returncode:
            raise RuntimeError(process.stderr.strip()[-500:])
        return process.stdout, time.perf_counter() - started

    def measure(self, text: BenchText, minutes: float, arm: str, run: int) -> dict[str, Any]:
        """Train, then evaluate on the test part."""
        core = self.cores.get()
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            cache = folder / "cache"
            out = folder / "run"
            shutil.copytree(self.folder / "native", cache / "native")  # no g++: empty
            settings = ["data.test=0.1", f"train.seed={FIRST_SEED + run}"]
            if arm == "default":
                settings += list_default_settings(text)
            elif arm != "plan":
                settings += list_settings_of_size(arm)
            words = [*text.words, "--minutes", str(minutes), "--cache", str(cache)]
            for setting in settings:
                words += ["--set", setting]
            _, seconds = self.run_gptmini("train", *words, "--out", str(out), core=core)
            words = ["--split", "test", "--json", "--cache", str(cache)]
            facts = json.loads(self.run_gptmini("evaluate", str(out), *words, core=core)[0])
            metrics = [json.loads(line) for line in (out / "metrics.jsonl").open()]
            config = load_config(out / "config.yaml", [])
        finally:
            shutil.rmtree(folder)
            self.cores.put(core)
        return {
            "bits": facts["bits_per_byte"],
            "error": facts["bits_per_byte_error"],
            "loss": facts["loss"],
            "seconds": seconds,
            "steps": metrics[-1]["step"],
            "sizes": f"{config.model.n_layer} x {config.model.d_model}, {config.tokenizer.kind} "
            f"{config.model.vocab_size}, {config.train.batch_size} rows",
        }

    def warm_up(self) -> None:
        """Compile the decoder, as anybody's first command does."""
        (self.folder / "native").mkdir()
        (self.folder / "first.txt").write_text("the cat sat on the mat. " * 200)
        words = ["--set", "model={n_layer: 1, n_head: 1, d_model: 8, context_length: 16}"]
        words += ["--data", str(self.folder / "first.txt"), "--cache", str(self.folder)]
        self.run_gptmini("train", *words, "--steps", "1", "--out", str(self.folder / "first"))


def list_default_settings(text: BenchText) -> Iterator[str]:
    """List the settings that the plan would choose, as the default configuration has them."""
    config = load_config(DEFAULT_CONFIG_FILE, [])
    for section, keys in PLANNED.items():
        for key in keys:
            yield f"{section}.{key}={getattr(getattr(config, section), key)}"
    if not any(each.startswith("tokenizer.") for each in text.settings):
        size = sources.find_source(text.paths, DataConfig(path=text.paths)).text_bytes
        kind, vocab_size = choose_tokenizer("auto", size, config.model.d_model)
        yield f"tokenizer.kind={kind}"
        if vocab_size is not None:
            yield f"tokenizer.vocab_size={vocab_size}"


def list_settings_of_size(size: str) -> Iterator[str]:
    """List the settings of a model made by hand: layers x width, with heads of 64."""
    n_layer, d_model = map(int, size.split("x"))
    yield f"model.n_layer={n_layer}"
    yield f"model.d_model={d_model}"
    yield f"model.n_head={d_model // 64}"
    yield f"train.batch_size={8 if d_model == 128 else 16}"


def format_table(results: Results) -> Iterator[str]:
    """Format a row for each text and number of minutes: the plan, and how far others are from it.

    Means over the runs that both have.
    """
    others = list(dict.fromkeys(key.split("/")[2] for key in results))
    if "plan" in others:
        others.remove("plan")
    headings = ["text", "minutes", "runs", "plan", "its sizes, steps", "seconds", *others]
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for text, minutes in dict.fromkeys(tuple(key.split("/")[:2]) for key in results):
        by_arm: dict[str, dict[str, dict[str, Any]]] = {arm: {} for arm in ("plan", *others)}
        for key, result in results.items():
            if key.startswith(f"{text}/{minutes}/"):
                arm, run = key.split("/")[2:]
                by_arm[arm][run] = result
        plans = by_arm["plan"]
        cells = [text, minutes, str(len(plans))]
        cells.append(f"{average(plans, 'bits'):.4f}" if plans else "")
        found = dict.fromkeys(f"{run['sizes']}, {run['steps']:,}" for run in plans.values())
        cells.append("; ".join(found))
        cells.append(f"{average(plans, 'seconds'):.0f}" if plans else "")
        for arm in others:
            both = plans.keys() & by_arm[arm].keys()
            if not both:
                cells.append("")
                continue
            ours = average({run: plans[run] for run in both}, "bits")
            theirs = average({run: by_arm[arm][run] for run in both}, "bits")
            cells.append(f"{theirs:.4f} ({100 * (ours / theirs - 1):+.1f} %)")
        yield f"| {' | '.join(cells)} |"


def average(runs: dict[str, dict[str, Any]], key: str) -> float:
    """Compute the mean of a figure over runs."""
    return fmean(run[key] for run in runs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shakespeare", type=Path)
    parser.add_argument("--chinese", type=Path)
    parser.add_argument("--minutes", default="0.5,1,2,5")
    parser.add_argument("--runs", type=int, default=1, help="of each, by different seeds")
    parser.add_argument("--texts", help="names of texts, as in the table")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--out", type=Path, default=Path("bench_minutes.json"))
    parser.add_argument("--cores", default="")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    cores = list(filter(None, options.cores.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        known = find_texts(options.shakespeare, options.chinese, Path(folder))
        names = options.texts.split(",") if options.texts else list(known)
        if missing := [name for name in names if name not in known]:
            sys.exit(f"{', '.join(missing)}: not there; choose from {', '.join(known)}")
        jobs = [
            (text, minutes, arm, run)
            for run in range(options.runs)
            for minutes in options.minutes.split(",")
            for text in names
            for arm in options.arms.split(",")
        ]
        new = [job for job in jobs if "/".join(map(str, job)) not in results]
        bench = Bench(Path(folder), cores)
        if new:
            bench.warm_up()
        measure_all(bench, known, new, results, options.out)
    print(*format_table(results), sep="\n")


def measure_all(
    bench: Bench, known: dict[str, BenchText], jobs: list[Trial], results: Results, out: Path
) -> None:
    """Measure in order, on as many cores as there are, and save every result at once."""
    writing = threading.Lock()

    def add(job: Trial) -> None:
        text, minutes, arm, run = job
        key = "/".join(map(str, job))
        try:
            measured = bench.measure(known[text], float(minutes), arm, run)
        except RuntimeError as error:  # the others go on; the same command tries this again
            print(f"{key}: {error}", file=sys.stderr, flush=True)
            return
        with writing:
            results[key] = measured
            partial = out.with_suffix(".tmp")
            partial.write_text(json.dumps(results, indent=1))
            partial.replace(out)
            print(f"{key}: {measured['bits']:.4f}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(bench.cores.qsize()) as pool:
        list(pool.map(add, jobs))


if __name__ == "__main__":
    main()
