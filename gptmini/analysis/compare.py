"""Trains variants in turn and measures them all in the same way.

    OUT/NAME/seed-1337.yaml   the configuration of one training run
    OUT/NAME/seed-1337/       its directory
    OUT/compare.json          all figures
    OUT/compare.md, .png      tables and a picture of them
    OUT/compare.html          both on one page

Each run has a process of its own, so its memory and speed do not depend on those before it.
"""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmini import files, machine
from gptmini.analysis import page, plots
from gptmini.analysis.measure import measure_variants
from gptmini.analysis.variants import (
    TABLE_LEGEND,
    Variant,
    build_histories,
    build_rows,
    compare_means,
    format_table,
    to_json,
    write_verdicts,
)
from gptmini.config import load, yamlfile
from gptmini.config.settings import Config
from gptmini.console import say, warn
from gptmini.errors import ConfigError, GptminiError, MachineError
from gptmini.plan.decide import reuse_choices
from gptmini.runs.directory import RunDirectory


@dataclass(frozen=True)
class TrainingRun:
    """One training run: a variant with a seed, and its directory."""

    variant: str
    config: Config
    out: Path


def compare(
    variants: dict[str, Config],
    finished: list[Path],
    seeds: int,
    data: list[str] | None,
    out: Path,
    cache: Path,
) -> list[Variant]:
    """Train variants, measure them and finished runs, and write the figures to `out`.

    `data` is another text to measure finished runs on. Variants are measured on held-out text.
    """
    trained = train_all(plan_runs(variants, seeds, out), cache) if variants else {}
    groups = group_runs(finished)
    named = {str(runs[0]) if name in trained else name: runs for name, runs in groups.items()}
    text = None if variants else data
    measured = measure_variants(named | trained, text, cache, out / "compare.json")
    write_results(measured, out)
    return measured


def plan_runs(variants: dict[str, Config], seeds: int, out: Path) -> list[TrainingRun]:
    """The training runs in rounds, one seed of every variant per round.

    Taking turns spreads other load on the machine over all variants. All see the same number of
    tokens, or train for `train.minutes`, and none stops early.
    """
    tokens = _count_tokens(next(iter(variants.values())))
    planned = []
    for n in range(seeds):
        for name, base in variants.items():
            config = base
            settings: dict[str, Any] = {"seed": base.train.seed + n, "patience": None}
            if base.train.minutes is not None:  # the plan keeps n_head, which n_kv_head divides
                config = load.fill_open_settings(base, {"model": {"n_head": base.model.n_head}})
            elif _count_tokens(config) != tokens:
                per_step = config.train.batch_size * config.seq_len
                settings["steps"] = max(1, round(tokens / per_step))
            folder = re.sub(r"[^\w.-]", "", name.replace("/", "-"))
            path = out / folder / f"seed-{settings['seed']}"
            planned.append(TrainingRun(name, config.with_train(**settings), path))
    return planned


def _count_tokens(config: Config) -> int:
    return config.train.steps * config.train.batch_size * config.seq_len


def _dump_settings(config: Config) -> bytes:
    """The keys a configuration sets explicitly; `train` decides the rest."""
    return yamlfile.dump(config.model_dump(exclude_unset=True)).encode()


def train_all(planned: list[TrainingRun], cache: Path) -> dict[str, list[Path]]:
    """Train or resume every run to its end; returns the run directories of each variant.

    Choices that the first run makes for itself apply to all. If a run fails, the error has its
    exit code.
    """
    paths: dict[str, list[Path]] = {}
    first = planned[0].config
    seeds = len({job.config.train.seed for job in planned})
    say(
        f"compare: training {', '.join(dict.fromkeys(job.variant for job in planned))} in turn, "
        f"{seeds} seed{'s' * (seeds > 1)} each, {_describe_length(first)}; Ctrl-C stops, the same command "
        f"resumes"
    )
    for number, job in enumerate(planned, 1):
        config = job.config
        if number > 1:
            config = reuse_choices(
                config, RunDirectory(planned[0].out).load_config(), same_run=False
            )
        title = f"compare: run {number} of {len(planned)}: {job.variant}, seed {config.train.seed}"
        _train(job.out, config, cache, title)
        paths.setdefault(job.variant, []).append(job.out)
    return paths


def _describe_length(config: Config) -> str:
    """How long a training is."""
    minutes, steps = config.train.minutes, config.train.steps
    if minutes is not None:
        return f"{minutes:g} minute{'s' * (minutes != 1)} per run"
    return f"{steps:,} step{'s' * (steps != 1)} per run"


def _train(out: Path, config: Config, cache: Path, title: str) -> None:
    file, text = out.with_suffix(".yaml"), _dump_settings(config)
    run = RunDirectory(out)
    if run.exists and file.exists() and file.read_bytes() != text:
        raise ConfigError(
            f"{file}: belongs to a different comparison; choose another directory with --out"
        )
    if run.exists and max(run.list_steps(), default=-1) >= run.load_config().train.steps:
        say(f"{title}: already finished")
        return
    say(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.atomic_write_bytes(file, text)
    command = [sys.executable, "-m", "gptmini", "train", str(file), "--out", str(out)]
    command += ["--cache", str(cache), "--no-sample"]
    # In its own session the child gets each signal only once, from here; a second Ctrl-C would end
    # it without saving.
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command, stdout=subprocess.DEVNULL, start_new_session=True
    )
    code = _wait(process)
    if code:
        code = 128 - code if code < 0 else code
        remedy = "run the same command again to resume" if code > 128 else "see the error above"
        error = GptminiError(f"{out}: training stopped early; {remedy}")
        error.exit_code = code
        raise error


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a process; signals that arrive meanwhile are passed on to it."""
    forwarded = None
    try:
        with machine.catch_signals() as received:
            while process.poll() is None:
                if received.save:
                    process.send_signal(signal.SIGUSR1)
                    received.save = False
                if received.stop is not None and forwarded is None:
                    forwarded = received.stop
                    process.send_signal(forwarded)
                time.sleep(0.1)
    except KeyboardInterrupt:  # the second Ctrl-C
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    return process.returncode or (128 + forwarded if forwarded else 0)


def group_runs(paths: list[Path]) -> dict[str, list[Path]]:
    """Finished runs by variant: runs whose configurations differ only by seed belong together."""
    groups: dict[tuple[Any, ...], list[Path]] = {}
    taken = set()
    for path in paths:
        run = RunDirectory(path)
        config, step = run.load_config(), max(run.list_steps(), default=0)
        # With `train.minutes` the number of steps is an outcome, not a setting.
        steps = config.train.steps if config.train.minutes is None else 1
        ignored = {"seed": 0, "micro_batch_size": None, "compile": "auto", "steps": steps}
        key: tuple[Any, ...] = (_dump_settings(config.with_train(**ignored)), step == 0)
        if (key, config.train.seed) in taken:  # the same seed twice: something else must differ
            key = (path,)
        taken.add((key, config.train.seed))
        groups.setdefault(key, []).append(path)
    firsts = [runs[0] for runs in groups.values()]
    names = [(p.parent if re.fullmatch(r"seed-\d+", p.name) else p).name for p in firsts]
    return {
        name if names.count(name) == 1 else str(runs[0]): runs
        for name, runs in zip(names, groups.values(), strict=True)
    }


def write_results(variants: list[Variant], out: Path) -> None:
    """Write the figures as JSON, Markdown, a page, and a picture if matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    files.atomic_write_bytes(out / "compare.json", json.dumps(to_json(variants), indent=1).encode())
    lines = "".join(f"- {line}\n" for line in write_verdicts(variants))
    markdown = f"{format_table(variants, full=True)}\n\n{TABLE_LEGEND}\n\n{lines}"
    files.atomic_write_bytes(out / "compare.md", markdown.encode())
    files.atomic_write_bytes(out / "compare.html", build_page(variants))
    try:
        plots.save_figure(plots.draw_comparison(variants), out / "compare.png")
    except MachineError as error:
        warn(f"{out / 'compare.png'}: not drawn; {error}")


def build_page(variants: list[Variant]) -> bytes:
    """The page of a comparison: the table, the differences with their intervals, the curves."""
    first, *others = variants
    head, *figures = build_rows(variants, full=True)
    parts = [page.build_table(head, figures)]
    if others:
        baseline = first.figures("bits_per_byte")
        gaps = [(each, compare_means(each.figures("bits_per_byte"), baseline)) for each in others]
        against = []
        for each, gap in gaps:
            half = "" if gap.half is None else f"± {gap.half:.4f}"
            name = f"{each.name} vs {first.name}"
            against.append([name, f"{gap.gap:+.4f}", half, gap, gap.verdict])
        note = (
            "The bar is the 95 % interval. If it crosses 0, these runs do not tell the two apart."
        )
        head = ["", "bits per byte", "95 %", "", ""]
        parts.append(page.build_table(head, against, "Differences", note))
    colored = list(enumerate(variants))
    cache = [
        page.build_series(
            each.name,
            [(each.cache_bytes / 1024, bits) for bits in each.figures("bits_per_byte")],
            "dots",
            color,
        )
        for color, each in colored
    ]
    x, histories = build_histories(variants)
    curves = [
        # The first quarter is steep and would flatten the rest.
        page.build_series(each.name, points[len(points) // 4 :], "line", color)
        for color, each in colored
        for points in histories[each.name]
    ]
    panels = [
        page.build_chart(
            "Quality and KV cache", "KiB at full context", "bits per byte", cache, "x"
        ),
        page.build_chart("Quality while training", x, "bits per byte", curves),
    ]
    parts.append(page.build_charts(panels, "Curves (one dot or line per seed)"))
    title = f"{', '.join(each.name for each in variants)} compared"
    return page.render_page(title, TABLE_LEGEND, parts)
