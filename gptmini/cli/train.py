"""`gptmini train`, and `gptmini data prepare`, which does only its first part."""

import shlex
import time
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from gptmini.cli.options import (
    Assignments,
    AttentionName,
    Cache,
    ConfigName,
    Data,
    Errors,
    Minutes,
    Steps,
    configured,
    default_out,
    option,
)
from gptmini.files import CACHE


def train(
    config: ConfigName = None,
    data: Data = None,
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
    device: str | None = option(None, "DEVICE", "auto, cpu or cuda.", show_default="auto"),
    assignments: Assignments = None,
    no_sample: Annotated[bool, typer.Option("--no-sample", hidden=True)] = False,
    cache: Cache = CACHE,
) -> None:
    """Train a model on a text, or resume a run.

    Without CONFIG and --data, train a small model for 250 steps on the language reference that
    comes with Python. Running the same command again resumes a stopped run.
    """
    started = time.perf_counter()
    named = {"--steps": steps, "--minutes": minutes, "--device": device}
    settings = configured(config, data, errors, attention, named, assignments)
    out = out or default_out(config, settings.data.path[0], attention)
    from gptmini import console
    from gptmini.generate.run import load
    from gptmini.plan.decide import decide
    from gptmini.runs.directory import RunDirectory
    from gptmini.train import trainer

    run_directory = RunDirectory(out)
    existing = run_directory.config() if run_directory.exists else None
    trainer.train(decide(settings, existing, cache, started), out)
    if no_sample:
        return
    run = load(out, settings.train.device, cache=cache)
    console.say(f"\nsample from the best checkpoint, step {run.step}:\n")
    console.stream_to_stdout(chain(run.stream(""), ["\n"]))
    console.say(
        f"\ncontinue your own prompt with: gptmini generate {shlex.quote(str(out))} --prompt TEXT"
    )


def prepare(
    config: ConfigName = None,
    data: Data = None,
    errors: Errors = None,
    assignments: Assignments = None,
    cache: Cache = CACHE,
) -> None:
    """Turn a text into tokens, as train does before its first step."""
    from gptmini.text import corpus

    settings = configured(config, data, errors, assignments=assignments)
    ready = corpus.prepare_corpus(settings, cache)
    print(ready.summary(settings.tokenizer.kind))
