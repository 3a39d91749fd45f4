"""The commands of a trained model: `gptmini generate` and `gptmini score`."""

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptmini.cli.options import (
    AsJson,
    Cache,
    Device,
    RunName,
    Weights,
    newest_run,
)
from gptmini.errors import ConfigError, DataError
from gptmini.files import CACHE

if TYPE_CHECKING:
    from gptmini.evidence.evaluate import Score
    from gptmini.generate.run import Generation, Run

LARGEST = 16 << 20  # bytes of a prompt, of which a model sees its context only


def generate(
    run: RunName = None,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with it; - is standard input.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Many: JSON lines, each a text or an object with prompt.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --prompts: JSON lines; goes on where it ended.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Type prompts, one after the other.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, max=10_000, help="Texts for the prompt.")] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to draw.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens of that much probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep what has that much of the likeliest's probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Over 1 is against what was there before.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Against what was drawn.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, each time.")] = None,
    ban: Annotated[list[str] | None, typer.Option(help="A token never to draw.")] = None,
    bias: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN=NUMBER", help="Added to its logit.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text to end before.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
    overflow: Annotated[
        str | None, typer.Option(help="Past the context: slide, stop or error.")
    ] = None,
    special: Annotated[
        bool, typer.Option("--special", help="<|endoftext|> in a prompt begins a document.")
    ] = False,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Guess from the text so far; same text, often sooner.")
    ] = False,
    draft: Annotated[
        Path | None, typer.Option(help="A smaller run that guesses; same text.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Texts at a time.")] = 16,
    weights: Weights = "bfloat16",
    device: Device = "auto",
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute every position anew; same text, slower.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let a terminal obey control characters in the text.")
    ] = False,
    as_json: AsJson = False,
    cache: Cache = CACHE,
) -> None:
    """Continue a prompt with a trained model, on stdout as it is drawn."""
    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "ban": ban,
        "bias": _bias(bias),
        "stop": stop,
        "seed": seed,
        "overflow": overflow,
    }
    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--prompts": prompts}
    named = [name for name, value in sources.items() if value is not None]
    named += ["--interactive"] * interactive
    if len(named) > 1:
        raise ConfigError(f"{named[0]}: not together with {named[1]}; leave one out")
    if as_json and (interactive or prompts is not None):
        raise ConfigError(f"--json: not together with {named[0]}; leave one out")
    if samples > 1 and interactive:
        raise ConfigError("--samples: not together with --interactive; leave one out")
    if (prompts is None) != (out is None):
        raise ConfigError("--prompts, --out: one needs the other; name both files")
    path = run or newest_run()
    from gptmini.generate.run import load

    trained = load(path, device, weights, cache)
    settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    how: dict[str, Any] = {"use_cache": not no_cache, "special": special}
    how["logprobs"] = as_json or prompts is not None
    if draft is not None:
        how["guess"] = load(draft, device, weights, cache)
    elif lookup:
        how["guess"] = "lookup"
    if prompts is not None and out is not None:
        from gptmini.generate import bulk

        bulk.generate(trained, prompts, out, samples, batch_size, settings, **how)
    elif interactive:
        _converse(trained, settings | how, raw)
    else:
        text = _text(prompt_file) if prompt is None else prompt
        _show(trained, text, samples, batch_size, settings | how, raw, as_json)


def _show(
    run: "Run",
    prompt: str,
    samples: int,
    batch_size: int,
    settings: dict[str, Any],
    raw: bool,
    as_json: bool,
) -> None:
    """One prompt, continued as often as asked for: streamed if once, else one after the other."""
    from gptmini.console import say, stream_to_stdout

    groups = [range(n, min(n + batch_size, samples)) for n in range(0, samples, batch_size)]
    generations = (run.start([prompt] * len(numbers), numbers, **settings) for numbers in groups)
    if as_json:
        done = list(generations)
        for generation in done:
            generation.finish()
        stream_to_stdout([json.dumps(_facts(done)), "\n"])
        return
    for generation in generations:
        if samples == 1:
            stream_to_stdout(chain([prompt], (text for _, text in generation), ["\n"]), raw)
        else:
            ended = generation.finish()
            whole = [f"--- {one.number + 1}\n{prompt}{one.text}\n" for one in ended]
            if not stream_to_stdout(whole, raw):
                return
        if sys.stderr.isatty():
            say(f"gptmini: {_speed(generation)}")


def _speed(generation: "Generation") -> str:
    speed = generation.speed
    first = (speed.first_token or 0) * 1000
    words = f"{speed.tokens} tokens, {speed.tokens / max(speed.seconds, 1e-9):,.0f} a second"
    words += f", the first after {first:.0f} ms ({generation.engine})"
    if speed.guessed:
        words += f"; {speed.right} of {speed.guessed} guesses right"
    return words


def _facts(generations: "list[Generation]") -> dict[str, Any]:
    """Samples and speed as JSON data."""
    speeds = [generation.speed for generation in generations]
    tokens, seconds = sum(one.tokens for one in speeds), sum(one.seconds for one in speeds)
    guessed, right = sum(one.guessed for one in speeds), sum(one.right for one in speeds)
    facts: dict[str, Any] = {
        "samples": [vars(sample) for one in generations for sample in one.samples],
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "time_to_first_token": round(speeds[0].first_token or 0.0, 4),
        "engine": generations[0].engine,
    }
    return facts | ({"guessed": guessed, "guessed_right": right} if guessed else {})


def _converse(run: "Run", settings: dict[str, Any], raw: bool) -> None:
    """Prompts from the terminal; an empty line goes on with the text, Ctrl-C ends the text only."""
    from gptmini.console import say, stream_to_stdout

    say("a line is a prompt, an empty one goes on; Ctrl-C ends a text, Ctrl-D the program")
    text = ""
    while True:
        try:
            line = input("> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("")
            continue
        text = line or text
        generation = None
        try:
            generation = run.start([text], **settings)
            stream_to_stdout(chain([text], (piece for _, piece in generation), ["\n"]), raw)
        except KeyboardInterrupt:
            stream_to_stdout(["\n"])
        text += generation.samples[0].text if generation else ""


def score(
    run: RunName = None,
    text: Annotated[str | None, typer.Option(help="The text.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with it; - is standard input.")] = None,
    weights: Weights = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show how well a trained model expects a text: token by token, and in all."""
    if (text is None) == (file is None):
        raise ConfigError("--text, --file: give one of them, the text to score")
    path = run or newest_run()
    from gptmini.console import stream_to_stdout
    from gptmini.evidence import evaluate as scoring
    from gptmini.generate.run import load

    found = scoring.score(load(path, device, weights), _text(file) if text is None else text)
    totals = {
        "tokens": len(found.tokens),
        "bytes": found.bytes,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    if as_json:
        columns = zip(found.texts, found.tokens, found.logprobs, found.ranks, strict=True)
        names = ("text", "token", "logprob", "rank")
        rows = [dict(zip(names, row, strict=True)) for row in columns]
        stream_to_stdout([json.dumps(totals | {"scores": rows}), "\n"])
        return
    stream_to_stdout(_coloured(found) if sys.stdout.isatty() else _table(found), raw=True)
    print(
        f"{totals['tokens']:,} tokens, {totals['bytes']:,} bytes: loss {found.loss:.4f} nats a "
        f"token, perplexity {found.perplexity:,.2f}, {found.bits_per_byte:.4f} bits a byte"
    )


def _table(found: "Score") -> Iterator[str]:
    yield "logprob   rank  token\n"
    for text, logprob, rank in zip(found.texts, found.logprobs, found.ranks, strict=True):
        yield f"{logprob:7.3f} {rank:6}  {text!r}\n"


def _coloured(found: "Score") -> Iterator[str]:
    """The text on grounds from none to dark red, one step for two bits of surprise."""
    from gptmini.console import shown

    grounds = ["", "\x1b[48;5;58m", "\x1b[48;5;94m", "\x1b[48;5;130m", "\x1b[48;5;124m"]
    for text, logprob in zip(found.texts, found.logprobs, strict=True):
        ground = grounds[min(len(grounds) - 1, int(-logprob / 1.386))]
        yield "\n".join(
            f"{ground}{shown(line)}\x1b[0m" if ground and line else shown(line)
            for line in text.split("\n")
        )
    yield "\n"


def _text(file: Path | None) -> str:
    """The text of a file or of standard input; without a file nothing."""
    if file is None:
        return ""
    if str(file) == "-":
        data = sys.stdin.buffer.read(LARGEST + 1)
    else:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
    name = "standard input" if str(file) == "-" else str(file)
    if len(data) > LARGEST:
        raise DataError(f"{name}: over {LARGEST >> 20} MiB, far more than a model sees; shorten it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: byte {error.start} is no UTF-8; convert it") from None


def _bias(assignments: list[str] | None) -> dict[str, float] | None:
    if assignments is None:
        return None
    bias = {}
    for text in assignments:
        token, equals, number = text.rpartition("=")
        try:
            bias[token] = float(number)
        except ValueError:
            equals = ""
        if not equals or not token:
            raise ConfigError(f"--bias {text}: not TOKEN=NUMBER; write it as the=-2")
    return bias
