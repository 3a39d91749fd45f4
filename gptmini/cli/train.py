"""`gptmini train`: train a model on a text, or resume a run.

What is wrong with the settings is said before torch is loaded.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gptmini.cli.options import (
    Assignments,
    AttentionName,
    Base,
    ConfigName,
    Data,
    Minutes,
    Named,
    Steps,
    Threads,
    build_config,
    choose_out,
    flag,
    option,
    resolve,
    resolve_run,
)
from gptmini.files import check_run_folder, is_run

if TYPE_CHECKING:
    from gptmini.train.state import Training

FEW_STEPS = 20  # after which a new model writes noise


def train(
    config: ConfigName = None,
    data: Data = None,
    base: Base = None,
    out: Path | None = option(
        None,
        "DIR",
        "Run directory to create or resume.",
        show_default="runs/ and the name of CONFIG or the text",
    ),
    attention: AttentionName = None,
    steps: Steps = None,
    minutes: Minutes = None,
    device: str | None = option(
        None, "DEVICE", "auto, cpu, cuda, mps or xpu.", show_default="auto"
    ),
    threads: Threads = None,
    assignments: Assignments = None,
    verbose: bool = flag("Also show the recipe and the machine.", "--verbose", "-v"),
) -> None:
    """Train a model on a text, or resume a run.

    Without CONFIG or --data, it trains on the built-in stories for two minutes. To resume a
    stopped run, repeat the command, or give the run directory as CONFIG.
    """
    started = time.perf_counter()
    from gptmini.config.load import find_request
    from gptmini.runs import log

    named = None if config is None else resolve(config)
    if named is not None and named.run is not None and out in (None, named.run):
        out = named.run
        named = Named(find_request(out))  # as if the command that began it were typed again
    train_options = {"--steps": steps, "--minutes": minutes, "--device": device}
    settings = build_config(named, data, attention, train_options, assignments, base)
    out = out or choose_out(config, settings.data.path[0], attention, base)
    check_run_folder(out)
    log.check_installed(settings.train.log_to)
    if base is not None and not is_run(out):
        resolve_run(base)  # answers a wrong name with the nearest
    from gptmini.runs.directory import RunDirectory
    from gptmini.train import loop
    from gptmini.train.group import join_group

    is_converted = 0 in RunDirectory(out).list_steps()  # it has weights that it has not learned
    with join_group() as group:
        plan = group.make_plan(settings, RunDirectory(out), started)
        trained = loop.train(plan, out, group=group, verbose=verbose)
    if trained is not None and group.rank == 0:
        _show_sample(trained, is_converted)


def _show_sample(trained: "Training", is_converted: bool) -> None:
    """Print what the model wrote at its best evaluation, what it knows, and what comes next."""
    from gptmini.console import format_count, quote, say, stream_to_stdout
    from gptmini.data.formats import STORIES
    from gptmini.runs.log import read_metrics

    if not trained.is_better_than_base:
        return  # its sample is the base's
    assert trained.progress.best is not None
    best = trained.progress.best["step"]
    for line in read_metrics(trained.run.metrics_file):
        if line["step"] == best and "sample" in line:
            say("")
            worse = "; later steps made it worse" if best < trained.step else ""
            say(f"what the model writes (after step {best}{worse}):")
            say("")
            stream_to_stdout([line["sample"], "\n"])
    say("")
    steps = trained.config.train.steps
    if steps < FEW_STEPS and trained.config.base.run is None and not is_converted:
        longer = "--minutes" if trained.steps_follow_minutes else "--steps"
        made = format_count(steps, "step")
        say(f"{made}: too few for a model, so this is noise; pass a larger {longer}")
        return
    if STORIES in trained.config.data.path:
        _show_rules(trained)
    name = quote(trained.run.path)
    start = trained.config.sample.start or ""
    prompt = quote(start) if len(start.strip()) > 1 else "TEXT"
    use = f"chat {name}" if trained.corpus.has_ignored else f"generate {name} --prompt {prompt}"
    say(f"try it:         gptmini {use}")
    say(f"look inside:    gptmini inspect {name} --prompt {prompt} --out page.html")
    if trained.plan.request.minutes is not None and best == trained.step:
        minutes = 2 * trained.plan.request.minutes
        say(f"train longer:   gptmini train {name} --minutes {minutes:g}")
    if STORIES in trained.config.data.path:
        say("your own text:  gptmini train --data FILE --minutes 10")


def _show_rules(trained: "Training") -> None:
    """Print which rules of the built-in stories the model has learnt."""
    from gptmini.console import say
    from gptmini.generate.run import load_run
    from gptmini.train.rules import format_rules, measure_rules

    run = load_run(trained.run.path, trained.compute.device.type, "float32")
    rules = measure_rules(run.model, run.tokenizer)
    say("rules learnt: how often its first choice is the word in [brackets], and how often chance")
    say("would find it; the text above is sampled at random, so it breaks rules more often:")
    say("")
    for line in format_rules(rules):
        say(f"  {line}")
    say("")
