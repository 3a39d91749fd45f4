"""Variants side by side: trained in turns, measured alike, and what their differences are worth.

    OUT/NAME/seed-1337.yaml   the configuration of a training
    OUT/NAME/seed-1337/       its run
    OUT/compare.json          everything that was measured
    OUT/compare.md, .png      the table and the picture of it

Each training is a process of its own, so that its memory and speed do not depend on those before.
"""

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmini import files, machine
from gptmini.config import load, yamlfile
from gptmini.config.settings import Config
from gptmini.console import say
from gptmini.errors import ConfigError, GptminiError
from gptmini.evidence.measure import (
    Variant,
    as_json,
    difference,
    spread,
)
from gptmini.runs.directory import RunDirectory

# What the first training chooses for all: how it computes, and with `train.minutes` the sizes.
CHOSEN = {"model": ["dropout"], "train": ["compile"]}
SIZED = {
    "model": [*CHOSEN["model"], "n_layer", "d_model", "head_dim", "d_ff"],
    "train": [*CHOSEN["train"], "batch_size"],
}


@dataclass(frozen=True)
class Job:
    """One training: a variant with a seed, and the directory of its run."""

    variant: str
    config: Config
    out: Path


def jobs(variants: dict[str, Config], seeds: int, out: Path) -> list[Job]:
    """The trainings in rounds, a seed of every variant in each.

    Whatever the machine does meanwhile, it does to all. All see equally many tokens, or take
    `train.minutes`, and none ends before its last step.
    """
    tokens = _tokens_of(next(iter(variants.values())))
    made = []
    for n in range(seeds):
        for name, base in variants.items():
            config = base
            settings: dict[str, Any] = {"seed": base.train.seed + n, "patience": None}
            if base.train.minutes is not None:  # the plan keeps the heads, which KV heads divide
                config = load.completed(base, {"model": {"n_head": base.model.n_head}})
            elif _tokens_of(config) != tokens:
                per_step = config.train.batch_size * config.seq_len
                settings["steps"] = max(1, round(tokens / per_step))
            folder = re.sub(r"[^\w.-]", "", name.replace("/", "-"))
            path = out / folder / f"seed-{settings['seed']}"
            made.append(Job(name, config.with_train(**settings), path))
    return made


def _tokens_of(config: Config) -> int:
    return config.train.steps * config.train.batch_size * config.seq_len


def _yaml(config: Config) -> bytes:
    """What a configuration states; the rest is left to train."""
    return yamlfile.dump(config.model_dump(exclude_unset=True)).encode()


def train(jobs: list[Job], cache: Path) -> dict[str, list[Path]]:
    """Train every run to its end, from where it stands; the run directories of each variant.

    What the first one chose for itself is the choice of all. An error has the exit code of the
    process that failed.
    """
    paths: dict[str, list[Path]] = {}
    for number, job in enumerate(jobs, 1):
        config = job.config
        if number > 1:
            config = _as_chosen(config, RunDirectory(jobs[0].out).config())
        which = f"{number} of {len(jobs)}, {job.variant}, seed {config.train.seed}"
        title = f"compare: training {which}"
        _train(job.out, config, cache, title)
        paths.setdefault(job.variant, []).append(job.out)
    return paths


def _as_chosen(config: Config, first: Config) -> Config:
    """A configuration with the choices of the first one where it states nothing."""
    keys = dict(CHOSEN if config.train.minutes is None else SIZED)
    if config.train.minutes is not None and not config.tokenizer.model_fields_set:
        keys["tokenizer"] = ["kind", "vocab_size"]
    chosen = first.model_dump()
    wanted = {name: {key: chosen[name][key] for key in keys[name]} for name in keys}
    return load.completed(config, wanted)


def _train(out: Path, config: Config, cache: Path, title: str) -> None:
    file, text = out.with_suffix(".yaml"), _yaml(config)
    run = RunDirectory(out)
    if run.exists and file.exists() and file.read_bytes() != text:
        raise ConfigError(f"{file}: is of another comparison; name another directory with --out")
    if run.exists and max(run.steps(), default=-1) >= run.config().train.steps:
        say(f"{title}: is finished")
        return
    say(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.replace(file, text)
    command = [sys.executable, "-m", "gptmini", "train", str(file), "--out", str(out)]
    command += ["--cache", str(cache), "--no-sample"]
    # In a session of its own it gets no Ctrl-C from the terminal, but from here, and once.
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command, stdout=subprocess.DEVNULL, start_new_session=True
    )
    code = _wait(process)
    if code:
        code = 128 - code if code < 0 else code
        how = "the same command goes on" if code > 128 else "mend what is said above"
        error = GptminiError(f"{out}: its training ended early; {how}")
        error.exit_code = code
        raise error


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a process, which is told of signals that come meanwhile."""
    told = None
    try:
        with machine.signals() as received:
            while process.poll() is None:
                if received.save:
                    process.send_signal(signal.SIGUSR1)
                    received.save = False
                if received.stop is not None and told is None:
                    told = received.stop
                    process.send_signal(told)
                time.sleep(0.1)
    except KeyboardInterrupt:  # the second
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    return process.returncode or (128 + told if told else 0)


def grouped(paths: list[Path]) -> dict[str, list[Path]]:
    """Runs by variant: those whose configurations differ by the seed alone are one."""
    alike: dict[tuple[Any, ...], list[Path]] = {}
    taken = set()
    for path in paths:
        run = RunDirectory(path)
        config, step = run.config(), max(run.steps(), default=0)
        steps = config.train.steps if config.train.minutes is None else 1  # or as time allowed
        alike_train = {"seed": 0, "micro_batch_size": None, "compile": "auto", "steps": steps}
        same = _yaml(config.with_train(**alike_train))
        key: tuple[Any, ...] = (same, step == 0)
        if (key, config.train.seed) in taken:  # no other seed, so something else is different
            key = (path,)
        taken.add((key, config.train.seed))
        alike.setdefault(key, []).append(path)
    names = [
        runs[0].parent.name if re.fullmatch(r"seed-\d+", runs[0].name) else runs[0].name
        for runs in alike.values()
    ]
    return {
        name if names.count(name) == 1 else str(runs[0]): runs
        for name, runs in zip(names, alike.values(), strict=True)
    }


def table(variants: list[Variant]) -> str:
    """The figures as a Markdown table that is aligned to be read as it is."""
    head = ["variant", "parameters", "bits per byte", "loss", "KV bytes a token", "at full context"]
    head += ["decode tokens/s at 1/4, 1/2, 1/1 of context", "training tokens/s", "peak MiB"]
    rows = [head, ["-"] * len(head)]
    for one in variants:
        memory = [peak / 2**20 for peak in one.figures("peak_memory")]
        rows.append(
            [
                one.name,
                f"{one.parameters:,}",
                _mean(one.figures("bits_per_byte"), ".4f"),
                _mean(one.figures("loss"), ".4f"),
                f"{one.cache_bytes_per_token:,}",
                f"{one.cache_bytes:,}",
                ", ".join(f"{speed:,.0f}" for speed in one.decode_tokens_per_second.values()),
                _mean(one.figures("tokens_per_second"), ",.0f"),
                _mean(memory, ",.0f"),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    rows[1] = ["-" * width for width in widths]
    return "".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        + " |\n"
        for row in rows
    )


def _mean(values: list[float], form: str) -> str:
    """The mean, and the standard deviation over the seeds if there are several."""
    if not values:
        return ""
    deviation = spread(values)
    shown = format(statistics.mean(values), form)
    return shown if deviation is None else f"{shown} ± {deviation:{form}}"


def verdicts(variants: list[Variant]) -> list[str]:
    """What each variant's bits per byte are to those of the first, in a sentence."""
    first, *others = variants
    lines = []
    if len({run.text for one in variants for run in one.runs}) > 1:
        lines.append(
            "the runs have held out different texts: name them again, with one text as --data"
        )
    for one in others:
        found = difference(one.figures("bits_per_byte"), first.figures("bits_per_byte"))
        line = f"{one.name}: {found.gap:+.4f} bits per byte to {first.name}"
        seeds = f"{len(one.runs)} and {len(first.runs)} runs"
        if found.half is None:
            line += ", one run each: nothing is known of the spread; train more seeds"
        else:
            verdict = "worse" if found.gap > 0 else "better"
            verdict = "within the spread" if found.within_spread else verdict
            line += f", 95 % interval ± {found.half:.4f} ({seeds}): {verdict}"
        lines.append(line)
    return lines


def write(variants: list[Variant], out: Path) -> None:
    """Write the figures as JSON and Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    files.replace(out / "compare.json", json.dumps(as_json(variants), indent=1).encode())
    lines = "".join(f"- {line}\n" for line in verdicts(variants))
    files.replace(out / "compare.md", f"{table(variants)}\n{lines}".encode())
