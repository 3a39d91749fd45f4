"""`gptmini train`: train a model on a text, or resume a run.

What can be wrong with the command line is checked before torch is loaded and the text is prepared.
"""

import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptmini.cli.options import (
    Assignments,
    AttentionName,
    Base,
    Cache,
    ConfigName,
    Data,
    Errors,
    Minutes,
    Steps,
    Threads,
    build_config,
    choose_out,
    find_run,
    option,
    resolve_run,
)
from gptmini.cli.pretrained import import_once, locate_run
from gptmini.errors import ConfigError
from gptmini.files import DEFAULT_CACHE_DIR

if TYPE_CHECKING:
    from gptmini.generate.run import Run
    from gptmini.plan.plan import Plan

FEW_STEPS = 20  # after which a new model writes noise


def train(
    config: ConfigName = None,
    data: Data = None,
    base: Base = None,
    errors: Errors = None,
    out: Path | None = option(
        None,
        "DIR",
        "Run directory to create or resume.",
        show_default="runs/ and the name of the configuration or text",
    ),
    attention: AttentionName = None,
    steps: Steps = None,
    minutes: Minutes = None,
    device: str | None = option(
        None, "DEVICE", "auto, cpu, cuda, mps or xpu.", show_default="auto"
    ),
    threads: Threads = None,
    assignments: Assignments = None,
    no_sample: Annotated[bool, typer.Option("--no-sample", hidden=True)] = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Train a model on a text, or resume a run.

    Without CONFIG and --data, train configs/default.yaml: a small model for 400 steps on the
    language reference that comes with Python. Running the same command again resumes a stopped
    run; so does gptmini train with the run's directory.
    """
    started = time.perf_counter()
    from gptmini.config.load import find_request
    from gptmini.data import corpus

    base, source = locate_run(base)
    resumed = None if config is None else find_run(config)
    out = out or resumed
    if resumed is not None and out == resumed:
        config = str(find_request(resumed))  # as if the command that began it were typed again
    train_options = {"--steps": steps, "--minutes": minutes, "--device": device}
    settings = build_config(config, data, errors, attention, train_options, assignments, base)
    out = out or choose_out(config, settings.data.path[0], attention, base)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file, not a directory; choose another --out")
    is_new = not (out / "config.yaml").exists()
    if base is not None and source is None and is_new:
        resolve_run(base)  # answers a wrong name with the nearest
    for paths in (settings.data.path, settings.data.validation_path or []):
        if "-" not in paths:
            corpus.check_paths(paths, settings.data)
    from gptmini import console
    from gptmini.generate.run import load_run
    from gptmini.plan.minutes import FINAL_SAMPLE_SECONDS
    from gptmini.runs import log
    from gptmini.runs.directory import RunDirectory
    from gptmini.train import loop
    from gptmini.train.group import join_group

    log.check_installed(settings.train.log_to)
    if base is not None and source is not None and is_new:
        import_once(base, source)
    with join_group() as group:
        plan = group.make_plan(settings, RunDirectory(out), cache, started)
        trained = loop.train(plan, out, group=group)
    if not trained or no_sample or group.rank:
        return
    run = load_run(out, settings.train.device, cache=cache)
    end = math.inf
    if plan.request.steps_follow_minutes and settings.train.minutes is not None:
        end = started + 60 * settings.train.minutes
        end = max(end, time.perf_counter() + FINAL_SAMPLE_SECONDS)
    _show_sample(run, plan, end)
    steps = run.config.train.steps
    if steps < FEW_STEPS and run.config.base.run is None:
        option = "--minutes" if plan.request.steps_follow_minutes else "--steps"
        console.say(
            f"\n{console.format_count(steps, 'step')}: too few for a model, so this is noise; "
            f"pass a larger {option}"
        )
        return
    ask = "continue your own prompt with"
    chat = ""
    if plan.corpus.has_ignored:  # it learned to answer
        ask = "ask it with"
        chat = "--chat "
    console.say(f"\n{ask}: gptmini generate {console.quote(out)} {chat}--prompt TEXT")


def _show_sample(run: "Run", plan: "Plan", end: float) -> None:
    """Print what the model writes until a moment of `time.perf_counter`."""
    from gptmini.console import say, stream_to_stdout

    corpus = plan.corpus
    question = corpus.read_question() if corpus.has_ignored else []
    sample = "an answer" if question else "sample"
    say(f"\n{sample} from the best checkpoint, step {run.step}:\n")
    special = run.tokenizer.special_tokens.values()
    shown = run.decode([token for token in question if token not in special])
    texts = (characters for _, characters in run.start([question]))
    stream_to_stdout(chain([shown], _take_until(end, texts), ["\n"]))


def _take_until(end: float, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts up to the first that comes after a moment of `time.perf_counter`."""
    for text in texts:
        yield text
        if time.perf_counter() >= end:
            return
