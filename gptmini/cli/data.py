"""`gptmini data`: download, prepare and check texts."""

import json
from pathlib import Path

import typer

from gptmini.cli.options import (
    AsJson,
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

data_app = typer.Typer(help="Download, prepare and check texts.")


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


@data_app.command("check")
def check(
    config: ConfigName = None,
    data: Data = None,
    errors: Errors = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Measure how much a text repeats itself, above all its held-out part the training part.

    Where that is much, a low loss says that the model remembers the text.
    """
    from gptmini.console import say, show_elapsed
    from gptmini.copies.index import decode_pieces
    from gptmini.copies.overlap import measure_overlap
    from gptmini.copies.training_text import open_index
    from gptmini.data import corpus

    settings = build_config(config, data, errors, assignments=assignments)
    prepared = corpus.prepare_corpus(settings, cache)
    say(prepared.format_summary(settings.tokenizer.kind))
    index = open_index(Path("run"), settings, prepared.tokenizer, prepared.content, cache)
    labels = [""] * len(prepared.validation)
    held_out = decode_pieces(prepared.validation, labels, prepared.tokenizer)
    with show_elapsed("comparing"):
        overlap = measure_overlap(index, held_out)
    print(json.dumps(overlap.to_dict()) if as_json else overlap.describe())
