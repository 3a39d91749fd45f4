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
    from gptmini.data import fetch as fetching

    print(fetching.fetch(name, out))


@data_app.command("prepare")
def prepare(
    config: ConfigName = None,
    data: Data = None,
    errors: Errors = None,
    assignments: Assignments = None,
    out: Path | None = option(
        None,
        "FILE.tokens",
        "File for the tokens and the tokenizer; gptmini train --data reads it.",
        show_default="the cache",
    ),
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Turn a text into tokens, as train does before its first step.

    With --out, on any machine: several such files with one tokenizer are trained on as one text.
    """
    from gptmini import console
    from gptmini.data import corpus

    settings = build_config(config, data, errors, assignments=assignments)
    if out is not None:
        if out.suffix != ".tokens":
            raise ConfigError(f"--out {out}: must end in .tokens, by which training knows it")
        prepared = corpus.prepare_token_file(settings, out, cache)
        print(f"{out}: {prepared.text_bytes:,} bytes of text -> {len(prepared):,} tokens")
        console.say(f"train on it with: gptmini train --data {console.quote(out)}")
        return
    prepared_corpus = corpus.prepare_corpus(settings, cache)
    print(prepared_corpus.format_summary(settings.tokenizer.kind))
