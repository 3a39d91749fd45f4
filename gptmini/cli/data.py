"""`gptmini data`: download and prepare texts."""

from pathlib import Path

import typer

from gptmini.cli.options import Assignments, ConfigName, Data, argument, build_config, option

data_app = typer.Typer(help="Download and prepare texts.")


@data_app.command("fetch")
def fetch(
    name: str = argument(..., "NAME", "tinyshakespeare or tinystories."),
    out: Path = option(Path("data"), "DIR", "Folder to save it in."),
) -> None:
    """Download a known corpus and check its SHA-256."""
    from gptmini.data import fetch as fetching

    print(fetching.fetch(name, out))


@data_app.command("prepare")
def prepare(config: ConfigName = None, data: Data = None, assignments: Assignments = None) -> None:
    """Turn a text into tokens, as train does before its first step.

    To train on another machine, copy the cache there with the text.
    """
    from gptmini.data import corpus

    settings = build_config(config, data, assignments=assignments)
    prepared = corpus.prepare_corpus(settings)
    print(prepared.format_summary())
