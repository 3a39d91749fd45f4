"""`gptmini tokenizer`: train, use and inspect tokenizers."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from gptmini.cli.options import AsJson, Assignments, argument, flag, option, parse_assignments
from gptmini.console import escape_control_characters, format_table, say, stream_to_stdout
from gptmini.errors import ConfigError, DataError, shorten
from gptmini.files import atomic_write_bytes, check_replaceable, decode_utf8

tokenizer_app = typer.Typer(help="Train, use and inspect tokenizers.")

TokenizerName = Annotated[
    str, argument(..., "NAME", "A run, a tokenizer file, or a name such as gpt2.")
]


@tokenizer_app.command("train")
def train(
    data: list[str] = argument(..., "DATA", "Texts, as for gptmini train --data."),
    out: Path = option(..., "FILE", "File to write; .json is added if missing."),
    vocab_size: int = option(4096, "N", "Number of tokens, including the 256 bytes."),
    assignments: Assignments = None,
) -> None:
    """Learn a byte-pair encoding from texts."""
    from gptmini.config import load
    from gptmini.data import corpus
    from gptmini.data.text import find_text, spool_stdin

    settings = parse_assignments(assignments)
    for label, (section, *_), _ in settings:
        if section != "data":
            raise ConfigError(f"{label}: applies to settings of data alone; leave it out")
    if out.suffix != ".json":  # other commands know a tokenizer file by its suffix
        out = Path(f"{out}.json")
    check_replaceable(out, b'{\n"format": ')
    config = load.load_config(
        None,
        [
            *settings,
            ("DATA", ("data", "path"), data),
            ("", ("tokenizer", "kind"), "bpe"),
            ("--vocab-size", ("tokenizer", "vocab_size"), vocab_size),
        ],
    )
    with spool_stdin(config.data.path, Path(tempfile.gettempdir())) as paths:
        text = find_text(paths, config.data)
        learned = corpus.learn_tokenizer("bpe", vocab_size, [text], text.has_conversations)
    atomic_write_bytes(out, learned.to_json().encode())
    say(f"saved {out}: {learned.vocab_size:,} tokens")


@tokenizer_app.command()
def encode(
    name: TokenizerName,
    text: str | None = argument(None, "TEXT", "Text to encode.", show_default="standard input"),
    special: bool = flag("Read special tokens in the text, such as <|endoftext|>.", "--special"),
) -> None:
    """Print the token IDs of a text."""
    from gptmini.tokenizer.load import find_tokenizer
    from gptmini.tokenizer.spelling import label_tokens

    encoder = find_tokenizer(name)
    if text is None:
        text = decode_utf8(sys.stdin.buffer.read(), "standard input")
    encoded = (encoder.encode_special(text) if special else encoder.encode(text)).tolist()
    numbers = list(map(str, encoded))
    shown = " ".join(numbers)
    if sys.stdout.isatty():
        labels = label_tokens(encoder, encoded)
        shown = format_table([("token", "text"), *zip(numbers, labels, strict=True)])
    stream_to_stdout([shown, "\n"])


@tokenizer_app.command()
def decode(
    name: TokenizerName,
    tokens: list[int] | None = argument(
        None, "TOKENS", "Token IDs.", show_default="standard input"
    ),
) -> None:
    """Print the text of token IDs; a pipe gets the exact bytes."""
    from gptmini.tokenizer.load import find_tokenizer

    decoder = find_tokenizer(name)
    if tokens is None:
        words = decode_utf8(sys.stdin.buffer.read(), "standard input").split()
        try:
            tokens = [int(word) for word in words]
        except ValueError:
            raise DataError("standard input: not only numbers; separate tokens by spaces") from None
    for token in tokens:
        if not 0 <= token < decoder.vocab_size:
            raise DataError(
                f"{shorten(token)}: not a token; use numbers from 0 to {decoder.vocab_size - 1}"
            )
    if sys.stdout.isatty():
        stream_to_stdout([decoder.decode(tokens), "\n"])
    else:
        spelled = b"".join(map(decoder.decode_token, tokens))
        sys.stdout.buffer.write(spelled.removeprefix(b" " if decoder.drops_first_space else b""))


@tokenizer_app.command()
def info(
    name: TokenizerName,
    data: list[str] | None = option(None, "PATH", "Texts to measure the compression on."),
    as_json: AsJson = False,
) -> None:
    """Show vocabulary, longest and special tokens, and compression of texts."""
    from gptmini.data import corpus
    from gptmini.tokenizer.load import find_tokenizer
    from gptmini.tokenizer.spelling import label_tokens

    inspected = find_tokenizer(name)
    lengths = inspected.compute_byte_lengths()
    special = inspected.special_tokens
    special_names = {number: token_name for token_name, number in special.items()}
    longest = lengths.argsort(kind="stable")[::-1][:10].tolist()
    facts: dict[str, Any] = {
        "kind": inspected.kind,
        "vocab_size": inspected.vocab_size,
        "longest_tokens": [inspected.decode([token]) for token in longest],
        "special_tokens": [name for name in special if not name.startswith("<|unused_")],
        "bos_token": special_names[inspected.eos_token_id] if inspected.adds_bos else None,
        "end_tokens": [name for name in special if special[name] in inspected.end_tokens],
    }
    if data:
        facts |= corpus.measure_tokenizer(inspected, data)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    rows = {"kind": inspected.kind, "vocabulary": f"{inspected.vocab_size:,} tokens"}
    if lengths.max() > 1:
        rows["longest tokens"] = ", ".join(label_tokens(inspected, [t])[0] for t in longest)
    rows["special tokens"] = ", ".join(map(escape_control_characters, facts["special_tokens"]))
    if facts["bos_token"] is not None:
        rows["texts begin with"] = escape_control_characters(facts["bos_token"])
    rows["texts end with"] = " or ".join(map(escape_control_characters, facts["end_tokens"]))
    if data:
        rows["text"] = f"{facts['bytes']:,} bytes, {facts['tokens']:,} tokens"
        rows["compression"] = f"{facts['bytes_per_token']} bytes per token"
        rows["vocabulary used"] = f"{facts['coverage']:.1%} of its tokens occur in this text"
    for label, value in rows.items():
        print(f"{label:17}{value}")
