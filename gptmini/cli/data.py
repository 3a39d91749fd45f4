"""`gptmini data`: download and prepare texts."""

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
    parse_number,
)
from gptmini.errors import ConfigError, shorten
from gptmini.files import DEFAULT_CACHE_DIR

data_app = typer.Typer(help="Download and prepare texts.")


@data_app.command("fetch")
def fetch(
    name: str = argument(..., "NAME", "tinyshakespeare or tinystories."),
    out: Path = option(Path("data"), "DIR", "The folder to save it in."),
) -> None:
    """Download a known corpus and check its SHA-256."""
    from gptmini.data import fetch as fetching

    print(fetching.fetch(name, out))


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
        number, n_parts = _parse_part(part or "1/1")
        prepared = shards.prepare_part(settings, number, n_parts, out)
        print(f"{prepared.path}: {prepared.text_bytes:,} bytes of text -> {len(prepared):,} tokens")
        console.say(f"train on all parts with: gptmini train --data {console.quote(out)}")
        return
    if part is not None:
        raise ConfigError(f"--part {part}: where to? add --out DIR, a folder for all parts")
    prepared_corpus = corpus.prepare_corpus(settings, cache)
    print(prepared_corpus.format_summary(settings.tokenizer.kind))


def _parse_part(text: str) -> tuple[int, int]:
    """Parse `3/16` into two numbers."""
    before, _, after = text.partition("/")
    number = parse_number(before)
    n_parts = parse_number(after)
    if number is None or n_parts is None or not 1 <= number <= n_parts:
        raise ConfigError(f"--part {shorten(text)}: must be K/N, with K from 1 to N; write 3/16")
    return number, n_parts
