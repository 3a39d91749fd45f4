"""The commands that need no model: `gptmini tokenizer ...` and `gptmini data fetch`."""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptmini.errors import ConfigError, DataError

if TYPE_CHECKING:
    from gptmini.text.tokenizer import Tokenizer

tokenizer_app = typer.Typer(help="Learn, use and look at tokenizers.")
data_app = typer.Typer(help="Get and prepare texts.")

Name = Annotated[
    str, typer.Argument(help="A run, a tokenizer file, or a name such as byte or gpt2.")
]


@tokenizer_app.command("train")
def train(
    data: Annotated[list[str], typer.Argument(help="Texts, as for gptmini train --data.")],
    out: Annotated[Path, typer.Option(help="The file to write, .json.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, with the 256 bytes.")] = 4096,
    text_key: Annotated[str, typer.Option(help="Of JSON lines, CSV and Parquet.")] = "text",
    errors: Annotated[
        str, typer.Option(help="Bytes that are no UTF-8: strict, replace.")
    ] = "strict",
) -> None:
    """Learn a byte-pair encoding from texts."""
    from gptmini import console, files
    from gptmini.config import load
    from gptmini.text import corpus, sources

    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: must end in .json, to be known as a tokenizer file")
    config = load.load(
        None,
        [
            ("TEXT", ("data", "path"), data),
            ("--text-key", ("data", "text_key"), text_key),
            ("--errors", ("data", "errors"), errors),
            ("", ("tokenizer", "kind"), "bpe"),
            ("--vocab-size", ("tokenizer", "vocab_size"), vocab_size),
        ],
    )
    with sources.stdin_as_file(config.data.path, Path(tempfile.gettempdir())) as paths:
        texts = [sources.find(paths, config.data)]
        learnt = corpus.learn("bpe", vocab_size, texts, console.progress)
    files.replace(out, learnt.to_json().encode())
    print(f"gptmini: {out}: {learnt.vocab_size:,} tokens", file=sys.stderr)


@tokenizer_app.command()
def encode(
    name: Name,
    text: Annotated[str | None, typer.Argument(help="By default standard input.")] = None,
) -> None:
    """Write the tokens of a text as numbers."""
    from gptmini.console import stream_to_stdout

    tokens = _find(name).encode(sys.stdin.buffer.read().decode() if text is None else text)
    stream_to_stdout([" ".join(map(str, tokens.tolist())), "\n"])


@tokenizer_app.command()
def decode(
    name: Name,
    tokens: Annotated[list[str] | None, typer.Argument(help="By default standard input.")] = None,
) -> None:
    """Write the text of tokens, byte for byte into a pipe or a file."""
    from gptmini.console import stream_to_stdout

    tokenizer = _find(name)
    words = sys.stdin.read().split() if tokens is None else tokens
    for word in words:
        if not (word.isdecimal() and int(word) < tokenizer.vocab_size):
            raise DataError(
                f"{word}: no token; they are numbers from 0 to {tokenizer.vocab_size - 1}"
            )
    if sys.stdout.isatty():
        stream_to_stdout([tokenizer.decode(map(int, words)), "\n"])
    else:
        sys.stdout.buffer.write(b"".join(tokenizer.token_bytes(int(word)) for word in words))


@tokenizer_app.command()
def info(
    name: Name,
    data: Annotated[list[str] | None, typer.Option(help="Texts to measure it on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a tokenizer's size and longest tokens, and what it makes of a text."""
    tokenizer = _find(name)
    lengths = tokenizer.byte_lengths()
    longest = lengths.argsort(kind="stable")[::-1][:10].tolist()
    facts: dict[str, Any] = {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "longest_tokens": [tokenizer.decode([token]) for token in longest],
    }
    if data:
        facts |= _measured(tokenizer, data)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    for key, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{key.replace('_', ' '):18} {shown}")


def _measured(tokenizer: "Tokenizer", data: list[str]) -> dict[str, Any]:
    """What a tokenizer makes of texts, and how much of its vocabulary occurs in them."""
    import numpy as np

    from gptmini.config.settings import DataConfig
    from gptmini.text.sources import find, stdin_as_file

    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with stdin_as_file(data, Path(tempfile.gettempdir())) as paths:
        for piece in find(paths, DataConfig()).pieces():
            counts += np.bincount(tokenizer.encode(piece.text), minlength=tokenizer.vocab_size)
    size, tokens = int(counts @ tokenizer.byte_lengths()), int(counts.sum())
    return {
        "bytes": size,
        "tokens": tokens,
        "bytes_per_token": round(size / max(1, tokens), 3),
        "coverage": round(float((counts > 0).mean()), 3),
    }


def _find(name: str) -> "Tokenizer":
    """The tokenizer of a run, in a file, or of a name that needs no text to learn from."""
    from gptmini.text import tokenizer

    path = Path(name)
    if path.is_dir():
        return tokenizer.read(path / "tokenizer.json")
    if name in ("auto", "char", "bpe"):
        raise DataError(f"{name}: is learnt from a text; name a run, or a file of tokenizer train")
    return tokenizer.create(name, None, ())


@data_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="tinyshakespeare or tinystories.")],
    out: Annotated[Path, typer.Option(help="The folder to put it in.")] = Path("data"),
) -> None:
    """Download a known corpus and check it."""
    from gptmini.text import fetch

    print(fetch.fetch(name, out))
