"""Trains variants in turn and measures them all in the same way.

    OUT/NAME/seed-1337.yaml   the configuration of one training run
    OUT/NAME/seed-1337/       its directory
    OUT/compare.json          all figures
    OUT/compare.md, .png      tables and a picture of them
    OUT/compare.html          tables and curves on one page

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
from gptmini.config import yamlfile
from gptmini.config.settings import Config
from gptmini.console import format_count, say, warn
from gptmini.errors import ConfigError, GptminiError, MachineError
from gptmini.extras.compare.measure import measure_variants
from gptmini.extras.compare.plots import draw_comparison
from gptmini.extras.compare.statistics import import_scipy
from gptmini.extras.compare.variants import (
    Variant,
    build_difference_rows,
    build_rows,
    describe_differences,
    describe_table,
    format_comparison,
    list_warnings,
    to_json,
)
from gptmini.figures import page
from gptmini.figures.plots import Figure, render_svg, save_figure
from gptmini.plan.reconcile import share_choices
from gptmini.runs.directory import RunDirectory
from gptmini.train.evaluate_run import Split


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
    split: Split = "validation",
) -> list[Variant]:
    """Train variants, measure them and finished runs, and write the figures to `out`.

    `data` is another text to measure finished runs on. With variants to train, it is their training
    text, and all are measured on the part held out of it that `split` names.
    """
    groups = group_runs(finished)
    if seeds > 1 or any(len(paths) > 1 for paths in groups.values()):
        import_scipy()  # if it is missing, say so before hours of training
    trained = train_all(plan_runs(variants, seeds, out), cache) if variants else {}
    runs_of: dict[str, list[Path]] = {}
    for name, paths in groups.items():
        runs_of[str(paths[0]) if name in trained else name] = paths
    runs_of |= trained
    text = None if variants else data
    measured = measure_variants(runs_of, text, cache, split)
    write_results(measured, out)
    return measured


def plan_runs(variants: dict[str, Config], seeds: int, out: Path) -> list[TrainingRun]:
    """Plan the training runs in rounds, one seed of every variant per round.

    Taking turns spreads other load on the machine over all variants. All see the same number of
    tokens, or train for `train.minutes`, and none stops early.
    """
    first = next(iter(variants.values()))
    n_tokens = _count_tokens(first)
    planned = []
    for number in range(seeds):
        for name, base in variants.items():
            config = base
            settings: dict[str, Any] = {"seed": base.train.seed + number, "patience": None}
            if base.train.minutes is not None:
                # The plan may choose other sizes, but must keep n_head, which n_kv_head divides.
                config = base.fill_open({"model": {"n_head": base.model.n_head}})
            elif _count_tokens(config) != n_tokens:
                tokens_per_step = config.train.batch_size * config.seq_len
                settings["steps"] = max(1, round(n_tokens / tokens_per_step))
            folder = re.sub(r"[^\w.-]", "", name.replace("/", "-"))
            path = out / folder / f"seed-{settings['seed']}"
            planned.append(TrainingRun(name, config.with_train(**settings), path))
    return planned


def _count_tokens(config: Config) -> int:
    return config.train.steps * config.train.batch_size * config.seq_len


def _dump_settings(config: Config) -> bytes:
    """Return the settings that a configuration states, as YAML; `train` decides the rest."""
    return yamlfile.dump(config.model_dump(exclude_unset=True)).encode()


def train_all(planned: list[TrainingRun], cache: Path) -> dict[str, list[Path]]:
    """Train or resume every run to its end; return the run directories of each variant.

    Whatever the first run chooses for itself applies to all. If a run fails, the error has its exit
    code.
    """
    first = planned[0]
    names = list(dict.fromkeys(run.variant for run in planned))
    n_seeds = len({run.config.train.seed for run in planned})
    say(
        f"compare: training {', '.join(names)} in turn, {format_count(n_seeds, 'seed')} each, "
        f"{_describe_length(first.config)}; Ctrl-C stops, the same command resumes"
    )
    paths: dict[str, list[Path]] = {}
    for number, run in enumerate(planned, 1):
        config = run.config
        if run is not first:
            config = share_choices(config, RunDirectory(first.out))
        seed = config.train.seed
        title = f"compare: run {number} of {len(planned)}: {run.variant}, seed {seed}"
        _train(run.out, config, cache, title)
        paths.setdefault(run.variant, []).append(run.out)
    return paths


def _describe_length(config: Config) -> str:
    """Say how long each run takes."""
    minutes = config.train.minutes
    if minutes is not None:
        return f"{format_count(minutes, 'minute')} per run"
    return f"{format_count(config.train.steps, 'step')} per run"


def _train(out: Path, config: Config, cache: Path, title: str) -> None:
    """Train one run to its end in a process of its own, unless it is there already."""
    config_file = out.with_suffix(".yaml")
    content = _dump_settings(config)
    run = RunDirectory(out)
    if run.exists and config_file.exists() and config_file.read_bytes() != content:
        raise ConfigError(
            f"{config_file}: belongs to a different comparison; choose another directory with --out"
        )
    if run.exists and max(run.list_steps(), default=-1) >= run.load_config().train.steps:
        say(f"{title}: already finished")
        return
    say(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.atomic_write_bytes(config_file, content)
    command = [sys.executable, "-m", "gptmini", "train", str(config_file), "--out", str(out)]
    command += ["--cache", str(cache), "--no-sample"]
    # In its own session the child gets each signal only once, from here; a second Ctrl-C would end
    # it without saving.
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command, stdout=subprocess.DEVNULL, start_new_session=True
    )
    code = _wait(process)
    if code == 0:
        return
    if code < 0:  # killed by a signal, as the shell counts it
        code = 128 - code
    remedy = "run the same command again to resume" if code > 128 else "see the error above"
    error = GptminiError(f"{out}: training stopped early; {remedy}")
    error.exit_code = code
    raise error


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process and return its exit code; pass on signals that arrive meanwhile."""
    forwarded = None
    try:
        with machine.catch_signals() as received:
            while process.poll() is None:
                if received.save:
                    _send_signal(process, signal.SIGUSR1)
                    received.save = False
                if received.stop is not None and forwarded is None:
                    forwarded = received.stop
                    _send_signal(process, forwarded)
                time.sleep(0.1)
    except KeyboardInterrupt:  # the second Ctrl-C
        _send_signal(process, signal.SIGINT)
        process.wait()
        raise
    return process.returncode or (128 + forwarded if forwarded else 0)


def _send_signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Pass on a signal; on Windows, where none can be sent, the console gives Ctrl-C to both."""
    if not files.IS_WINDOWS:
        process.send_signal(number)


def group_runs(paths: list[Path]) -> dict[str, list[Path]]:
    """Group finished runs by variant: runs whose configurations differ only by seed."""
    groups: dict[tuple[Any, ...], list[Path]] = {}
    seen = set()
    for path in paths:
        run = RunDirectory(path)
        config = run.load_config()
        is_untrained = max(run.list_steps(), default=0) == 0
        # With `train.minutes` the number of steps is an outcome, not a setting.
        steps = config.train.steps if config.train.minutes is None else 1
        comparable = config.with_train(seed=0, micro_batch_size=None, compile="auto", steps=steps)
        key: tuple[Any, ...] = (_dump_settings(comparable), is_untrained)
        if (key, config.train.seed) in seen:  # the same seed twice: something else must differ
            key = (path,)
        seen.add((key, config.train.seed))
        groups.setdefault(key, []).append(path)
    names = [_name_variant(runs[0]) for runs in groups.values()]
    return {
        name if names.count(name) == 1 else str(runs[0]): runs
        for name, runs in zip(names, groups.values(), strict=True)
    }


def _name_variant(path: Path) -> str:
    """Return the name of a run directory, or of its parent if it is one seed of several."""
    return path.parent.name if re.fullmatch(r"seed-\d+", path.name) else path.name


def write_results(variants: list[Variant], out: Path) -> None:
    """Write the figures as JSON, Markdown, a page, and a picture if matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    files.atomic_write_bytes(out / "compare.json", json.dumps(to_json(variants), indent=1).encode())
    files.atomic_write_bytes(out / "compare.md", format_comparison(variants, full=True).encode())
    figure = None
    try:
        figure = draw_comparison(variants)
        save_figure(figure, out / "compare.png")
    except MachineError as error:
        warn(f"{out / 'compare.png'}: not drawn; {error}")
    files.atomic_write_bytes(out / "compare.html", build_page(variants, figure))


def build_page(variants: list[Variant], figure: Figure | None) -> bytes:
    """Build the page of a comparison: its tables, and the figure if there is one."""
    headings, *rows = build_rows(variants, full=True)
    parts = [page.render_table(headings, rows)]
    if len(variants) > 1:
        headings, *rows = build_difference_rows(variants)
        note = "; ".join(describe_differences(variants))
        parts.append(page.render_table(headings, rows, "Differences", note))
    if figure is not None:
        parts.append(page.render_picture(render_svg(figure), "The figures of the tables."))
    title = f"{format_count(len(variants), 'variant')} compared"
    introduction = "; ".join([*describe_table(variants), *list_warnings(variants)])
    return page.render_page(title, introduction, parts)
