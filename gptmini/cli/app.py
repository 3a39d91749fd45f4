"""The command line: check the words, call one function, report.

Results go to stdout, everything else to stderr. The workers are imported inside the commands, since
torch takes more than a second and `--help` should not.
"""

import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import typer.exceptions

from gptmini.cli.evidence import (
    compare,
    convert,
    evaluate,
    inspect,
    plot,
    size,
)
from gptmini.cli.generate import generate, score
from gptmini.cli.options import (
    Assignments,
    AttentionName,
    Cache,
    ConfigName,
    Data,
    Errors,
    Steps,
    configured,
    default_out,
)
from gptmini.cli.text import data_app, tokenizer_app
from gptmini.errors import GptminiError, Stopped
from gptmini.files import CACHE

app = typer.Typer(
    help="Turn any text into a GPT that its owner understands.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """Turn any text into a GPT that its owner understands."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")
app.command()(generate)
app.command()(score)
app.command()(evaluate)
app.command()(compare)
app.command()(convert)
app.command()(inspect)
app.command()(plot)
app.command()(size)


@app.command()
def train(
    config: ConfigName = None,
    data: Data = None,
    errors: Errors = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; by default runs/ and a name.")
    ] = None,
    attention: AttentionName = None,
    steps: Steps = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time to take; sizes and steps are fitted to it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    assignments: Assignments = None,
    no_sample: Annotated[bool, typer.Option("--no-sample", hidden=True)] = False,
    cache: Cache = CACHE,
) -> None:
    """Train a model on a text, or go on with a run that was stopped."""
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
    print(f"gptmini: a sample of step {run.step}, the best so far:\n", file=sys.stderr)
    console.stream_to_stdout(chain(run.stream(""), ["\n"]))
    print(
        f"\ngptmini: more with: gptmini generate {shlex.quote(str(out))} --prompt TEXT",
        file=sys.stderr,
    )


@data_app.command("prepare")
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


def main() -> None:
    """Run the command line; failures become one line each and an exit code."""
    debug = "--debug" in sys.argv[1:]
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        code = app(
            prog_name="gptmini", standalone_mode=False
        )  # our own answers to wrong usage and Ctrl-C
    except Exception as error:
        if debug:
            raise
        _fail(*_explain(error))
    if code == 130:
        _fail(["stopped by Ctrl-C"], 130)
    sys.exit(code)


def _stop(number: int, _: object) -> NoReturn:
    """End as Ctrl-C does, tidily; the training loop has a handler of its own."""
    raise Stopped(number, f"stopped by {signal.Signals(number).name}")


def _explain(error: Exception) -> tuple[Sequence[str], int]:
    """The lines and the exit code of a failure."""
    if isinstance(error, GptminiError):
        return error.lines, error.exit_code
    if isinstance(error, typer.exceptions.TyperException):  # wrong usage
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "gptmini"
        return [f"{text[:1].lower()}{text[1:].rstrip('.')}; see {command} --help"], 2
    if isinstance(error, UnicodeError):
        return [f"the text given is no UTF-8 ({error}); convert it"], 3
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        return [f"{error.filename or 'a file'}: {reason}; mend it or name another place"], 5
    if re.search("MemoryError|out of memory|can't allocate memory", f"{error!r}", re.IGNORECASE):
        return ["out of memory; lower train.micro_batch_size, --batch-size or the model"], 5
    return [f"a bug of gptmini: {error!r}; run again with --debug and report it"], 1


def _fail(lines: Sequence[str], code: int) -> NoReturn:
    for line in lines:
        print(f"gptmini: {line}", file=sys.stderr)
    sys.exit(code)
