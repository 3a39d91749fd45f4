"""`gptmini data`: download and prepare texts."""

import shlex
from pathlib import Path

import typer

from gptmini.cli.options import (
    Assignments,
    Cache,
    ConfigName,
    Data,
    Errors,
    argument,
    build_config,
    option,
)
from gptmini.errors import ConfigError
from gptmini.files import DEFAULT_CACHE_DIR

data_app = typer.Typer(help="Download and prepare texts.")


@data_app.command("fetch")
def fetch(
    name: str = argument(..., "NAME", "tinyshakespeare or tinystories."),
    out: Path = option(Path("data"), "DIR", "The folder to save it in."),
) -> None:
    """Download a known corpus and check its SHA-256."""
    from gptmini.data import fetch

    print(fetch.fetch(name, out))


@data_app.command("prepare")
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
