"""`gptmini train`, `gptmini data prepare`, which does only its first part, and `settings`."""

import shlex
import shutil
import textwrap
import time
from itertools import chain
from pathlib import Path
from typing import Annotated

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
    argument,
    build_config,
    choose_out,
    find_run,
    option,
    resolve_run,
)
from gptmini.errors import ConfigError
from gptmini.files import DEFAULT_CACHE_DIR


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
    device: str | None = option(None, "DEVICE", "auto, cpu or cuda.", show_default="auto"),
    threads: Threads = None,
    assignments: Assignments = None,
    no_sample: Annotated[bool, typer.Option("--no-sample", hidden=True)] = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Train a model on a text, or resume a run.

    Without CONFIG and --data, train configs/default.yaml: a small model for 250 steps on the
    language reference that comes with Python. Running the same command again resumes a stopped
    run; so does gptmini train with the run's directory.
    """
    started = time.perf_counter()
    named = {"--steps": steps, "--minutes": minutes, "--device": device}
    from gptmini.data import corpus

    settings = build_config(config, data, errors, attention, named, assignments, base)
    if out is None and config is not None:
        out = find_run(config)
    out = out or choose_out(config, settings.data.path[0], attention, base)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file, not a directory; choose another --out")
    if base is not None and not (out / "config.yaml").exists():
        resolve_run(base)  # a wrong name is answered with the nearest
    for paths in (settings.data.path, settings.data.validation_path or []):
        if "-" not in paths:
            corpus.check_paths(paths, settings.data)  # a wrong path is named before torch is loaded
    from gptmini import console
    from gptmini.distributed.group import join_group
    from gptmini.generate.run import load_run
    from gptmini.plan.broadcast import decide_on_all_ranks
    from gptmini.plan.decide import check_base, reuse_choices
    from gptmini.runs import log
    from gptmini.runs.directory import RunDirectory
    from gptmini.train import resume, trainer

    log.check_installed(settings.train.log_to)
    directory = RunDirectory(out)
    if directory.exists:  # before the text is prepared
        existing = directory.load_config()
        check_base(settings, existing, directory)
        kept = reuse_choices(settings, existing)
        resume.check_same_settings(kept, existing, directory, undecided=(None, "auto"))
    with join_group() as group:
        decision = decide_on_all_ranks(settings, directory, cache, started, group)
        trained = trainer.train(decision, out)
    if not trained or no_sample or group.rank:
        return
    run = load_run(out, settings.train.device, cache=cache)
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
    part: str | None = option(
        None, "K/N", "Prepare the K-th of N shares of the files, for --out.", show_default="all"
    ),
    out: Path | None = option(
        None,
        "DIR",
        "Folder for token files that gptmini train --data DIR reads.",
        show_default="the cache",
    ),
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Turn a text into tokens, as train does before its first step.

    With --part, each of N machines prepares its share of the files, in one folder for all.
    """
    from gptmini import console
    from gptmini.data import corpus, shards

    settings = build_config(config, data, errors, assignments=assignments)
    if out is not None:
        made = shards.prepare_part(settings, *_parse_part(part or "1/1"), out)
        print(f"{made.path}: {made.text_bytes:,} bytes of text -> {len(made):,} tokens")
        console.say(f"train on all parts with: gptmini train --data {shlex.quote(str(out))}")
        return
    if part is not None:
        raise ConfigError(f"--part {part}: where to? add --out DIR, a folder for all parts")
    ready = corpus.prepare_corpus(settings, cache)
    print(ready.format_summary(settings.tokenizer.kind))


def _parse_part(text: str) -> tuple[int, int]:
    """`3/16` as numbers."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ConfigError(f"--part {text}: must be K/N, with K from 1 to N; write 3/16")
    return int(part), int(parts)


def list_settings(
    name: str | None = argument(None, "KEY", "A key such as train.lr or lr, or a section."),
) -> None:
    """List the settings that --set and YAML files take."""
    from gptmini import console
    from gptmini.config import listing, load
    from gptmini.config.settings import Config

    width = min(100, shutil.get_terminal_size().columns)
    listed = {
        f"{section}.{each.name}": each
        for section, _, settings in listing.iter_sections(Config.model_json_schema())
        for each in settings
    }
    chosen = [
        key for key in listed if name is None or f".{name}." in f".{key}." or name == f"{key}."
    ]
    if not chosen and name is not None:
        known = load.find_full_key(name.rpartition(".")[2])
        if known is None:
            raise ConfigError(f"{name}: no such setting; gptmini settings lists all")
        chosen = [known]
    lines = []
    for key in chosen:
        each = listed[key]
        lines += [f"{key}: {each.kind} (default: {each.default})".replace("`", "")]
        lines += [f"    {line}" for line in textwrap.wrap(each.meaning, width - 4)]
    console.stream_to_stdout(f"{line}\n" for line in lines)
