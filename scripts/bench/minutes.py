"""Compare what --minutes makes of a text with what other configurations make of it in that time.

python scripts/bench/minutes.py --shakespeare FILE --chinese FOLDER [--minutes 0.5,1] [--texts ...]

Trains each text for each number of minutes by
  plan      gptmini train --data TEXT --minutes M
  default   the sizes, batch and vocabulary of the default configuration
  hand      those of the hand-made configuration whose own steps take nearest to M minutes here
and reports bits per byte on the tenth of the text that `data.test` keeps from all of them, ± the
standard error. All are given M minutes for the whole command, text preparation included (each
starts with an empty cache but for the compiled decoder), and fit their steps to them.

--shakespeare is Tiny Shakespeare, one file. --chinese is the folder of manual pages of Debian's
manpages-zh: apt-get download manpages-zh; dpkg -x manpages-zh_*.deb zh; zh/usr/share/man/zh_CN.
Texts that are not given are left out. Results are added to a JSON file (--out); what is there
already is not measured again, so an interrupted benchmark resumes. --cores 0,1 makes one run
at a time on each of these cores, with one thread, instead of one on the whole machine.
"""

import argparse
import gzip
import json
import math
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
from itertools import product
from pathlib import Path
from typing import Any

from gptmini.config.load import DEFAULT_CONFIG_FILE, find_config_file, load_config
from gptmini.config.settings import DataConfig
from gptmini.data import sources
from gptmini.tokenizer.choose import choose_tokenizer

ARMS = ("plan", "default", "hand")
Trial = tuple[str, str, str]  # text, minutes, arm
Results = dict[str, dict[str, Any]]  # by these three, with a slash between them
# What --minutes chooses, and the other configurations therefore state.
PLANNED = {"model": ("n_layer", "n_head", "d_model"), "train": ("batch_size",)}
# What follows the epochs unless a configuration states it.
RECIPE = {
    "model": ("dropout", "tie_embeddings"),
    "train": ("lr", "embed_lr", "muon_lr", "weight_decay"),
}


@dataclass(frozen=True)
class BenchText:
    """A text, the settings that belong to it, and the configurations made for it by hand."""

    paths: list[str]
    settings: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()

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
        by_hand = ("shakespeare-char-small", "shakespeare-char", "shakespeare-char-best")
        found["shakespeare-char"] = BenchText([path], ("tokenizer.kind=char",), by_hand)
        found["shakespeare"] = BenchText([path])
    found["python-docs"] = BenchText(["builtin:python-docs"])
    found["python-code"] = BenchText(["builtin:python-code"], by_hand=("python-code",))
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
        self.spent: dict[str, float] = {}

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

    def find_nearest(self, text: BenchText, minutes: float, core: str) -> str:
        """The hand-made configuration of a text whose own training is nearest to the minutes."""
        for name in text.by_hand:
            if name not in self.spent:
                words = ["size", name, *text.words, "--json", "--cache", str(self.folder)]
                size = json.loads(self.run_gptmini(*words, core=core)[0])
                self.spent[name] = size["time"]["minutes"]
        return min(text.by_hand, key=lambda name: abs(math.log(self.spent[name] / minutes)))

    def measure(self, text: BenchText, minutes: float, arm: str) -> dict[str, Any]:
        """Train, then evaluate on the test part."""
        core = self.cores.get()
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            cache = folder / "cache"
            run = folder / "run"
            shutil.copytree(self.folder / "native", cache / "native")  # no g++: empty
            name = self.find_nearest(text, minutes, core) if arm == "hand" else "default"
            settings = ["data.test=0.1"]
            if arm != "plan":
                settings += list_planned_settings(name, text)
            words = [*text.words, "--minutes", str(minutes), "--cache", str(cache)]
            for setting in settings:
                words += ["--set", setting]
            _, seconds = self.run_gptmini("train", *words, "--out", str(run), core=core)
            words = ["--split", "test", "--json", "--cache", str(cache)]
            facts = json.loads(self.run_gptmini("evaluate", str(run), *words, core=core)[0])
            metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]
            config = load_config(run / "config.yaml", [])
        finally:
            shutil.rmtree(folder)
            self.cores.put(core)
        return {
            "name": name,
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


def list_planned_settings(name: str, text: BenchText) -> Iterator[str]:
    """List the settings that the plan would choose, with the values of a configuration."""
    config = load_config(DEFAULT_CONFIG_FILE if name == "default" else find_config_file(name), [])
    for section, keys in PLANNED.items():
        values = getattr(config, section)
        stated = [key for key in RECIPE[section] if key in values.model_fields_set]
        for key in (*keys, *stated):
            if (value := getattr(values, key)) is not None:
                yield f"{section}.{key}={value}"
    if config.model.context_length != 256:
        yield f"model.context_length={config.model.context_length}"
    if not any(each.startswith("tokenizer.") for each in text.settings):
        size = sources.find_source(text.paths, DataConfig(path=text.paths)).bytes
        kind, vocab_size = choose_tokenizer("auto", size, config.model.d_model)
        yield f"tokenizer.kind={kind}"
        if vocab_size is not None:
            yield f"tokenizer.vocab_size={vocab_size}"


def format_table(results: Results) -> Iterator[str]:
    yield "| text | minutes | plan | its sizes, steps | default | hand-made | seconds of plan |"
    yield "|---|---|---|---|---|---|---|"
    for text, minutes in dict.fromkeys(tuple(key.split("/")[:2]) for key in results):
        plan, default, hand = (results.get(f"{text}/{minutes}/{arm}") for arm in ARMS)
        cells = [text, minutes, "", "", "", "", ""]
        if plan:
            cells[2] = f"{plan['bits']:.4f} ± {plan['error'] or 0:.4f}"
            cells[3] = f"{plan['sizes']}, {plan['steps']:,}"
            cells[6] = f"{plan['seconds']:.0f}"
        for place, other in ((4, default), (5, hand)):
            if other:
                share = f" ({100 * (plan['bits'] / other['bits'] - 1):+.1f} %)" if plan else ""
                name = f" {other['name']}" if other is hand else ""
                cells[place] = f"{other['bits']:.4f}{share}{name}"
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shakespeare", type=Path)
    parser.add_argument("--chinese", type=Path)
    parser.add_argument("--minutes", default="0.5,1,2,5,15")
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
        jobs = product(names, options.minutes.split(","), options.arms.split(","))
        possible = [job for job in jobs if job[2] != "hand" or known[job[0]].by_hand]
        new = [job for job in possible if "/".join(job) not in results]
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
        text, minutes, arm = job
        try:
            measured = bench.measure(known[text], float(minutes), arm)
        except RuntimeError as error:  # the others go on; the same command tries this again
            print(f"{'/'.join(job)}: {error}", file=sys.stderr, flush=True)
            return
        with writing:
            results["/".join(job)] = measured
            partial = out.with_suffix(".tmp")
            partial.write_text(json.dumps(results, indent=1))
            partial.replace(out)
            print(f"{'/'.join(job)}: {measured['bits']:.4f}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(bench.cores.qsize()) as pool:
        list(pool.map(add, jobs))


if __name__ == "__main__":
    main()
