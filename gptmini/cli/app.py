"""The list of commands, and the message and exit code of every failure.

Results go to stdout, everything else to stderr. A command imports the modules it needs when it
runs: torch takes more than a second to load, and `--help` should be quick.
"""

import difflib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.exceptions

from gptmini import __version__
from gptmini.cli.compare import compare
from gptmini.cli.convert import convert
from gptmini.cli.data import data_app
from gptmini.cli.evaluate import evaluate
from gptmini.cli.export import export
from gptmini.cli.generate import generate
from gptmini.cli.import_model import import_model
from gptmini.cli.inspect import inspect
from gptmini.cli.plot import plot
from gptmini.cli.score import score
from gptmini.cli.serve import serve
from gptmini.cli.settings import list_settings
from gptmini.cli.size import size
from gptmini.cli.tokenizer import tokenizer_app
from gptmini.cli.train import train
from gptmini.errors import GptminiError, Stopped

app = typer.Typer(
    help="Turn any text into a GPT that you understand.",
    epilog="Add --debug to any command to see the traceback of a failure.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"gptmini {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


class _Command(typer.core.TyperCommand):
    """A command whose help and errors are in users' words."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write = formatter.write_dl
        formatter.write_dl = lambda rows: write(
            [(_reword(name), _reword(text)) for name, text in rows]
        )
        super().format_options(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.exceptions.TyperException as error:
            error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]
            raise


def _reword(text: str) -> str:
    for pattern, replacement in _REPLACEMENTS.items():
        text = re.sub(pattern, replacement, text)
    return text


_REPLACEMENTS = {  # of typer's help and errors, in ours
    r"^([^-].*) <.*>$": r"\1",  # an argument needs no type after its name
    r"default: \((.*)\)": r"default: \1",
    r"(\S+)<=x<=([^];]+)": r"\1 to \2",
    r"x>=([^];]+)": r"at least \1",
    r"^Invalid value for '(.*?)'": r"\1",
    r"Input should be a valid integer.*": "expected a whole number",
    r"Input should be a valid number.*": "expected a number",
    r"Input should be greater than or equal to": "must be at least",
    r"Input should be less than or equal to": "must be at most",
    r"^Option '(.*)' requires an argument": r"\1: needs a value",
    r"^Got unexpected extra argument\(s\) \((.*)\)": r"unexpected arguments: \1",
    r"\. Did you mean": "; did you mean",
}

# Windows has no SIGHUP.
_STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

for _command in (
    *(train, generate, serve, score, evaluate, inspect, compare),
    *(size, convert, plot),
):
    app.command()(_command)
app.command()(export)
app.command("import")(import_model)
app.command("settings")(list_settings)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
for _info in chain(*(group.registered_commands for group in (app, data_app, tokenizer_app))):
    _info.cls = _Command
    _info.short_help = (getattr(_info.callback, "__doc__", None) or "").partition("\n")[0]


# How often a waiting OpenMP thread looks for work before it sleeps. By libgomp's own count, threads
# take the cores from other programs, and from each other. Tokens/s, medians on two cores of an AMD
# EPYC, alone and beside two busy programs:
#                        own   10,000    3,000    1,000   OMP_WAIT_POLICY=PASSIVE
# training, alone     27,609   27,256   28,197   26,067   17,665
# training, busy       6,632    8,517    7,836    7,550    7,607
# generating, alone    4,906    4,942    4,163    3,902
# generating, busy     1,175    2,066
OPENMP_SPIN_COUNT = "10000"


def main() -> None:
    """Run the command line; a failure becomes one line for each problem and an exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(
            "GOMP_SPINCOUNT", OPENMP_SPIN_COUNT
        )  # read once, when torch is loaded
    words = ["--help" if word == "-help" else word for word in sys.argv[1:] if word != "--debug"]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does with SIGHUP
            signal.signal(number, _stop)
    try:
        # not standalone: wrong usage and Ctrl-C are answered here
        code = app(words, prog_name="gptmini", standalone_mode=False)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        _fail(*_explain(error))
    if code == 130:
        _fail(["stopped by Ctrl-C"], 130)
    sys.exit(code)


def _stop(number: int, _: object) -> NoReturn:
    """End tidily, as Ctrl-C does; the training loop has a handler of its own."""
    for (
        later
    ) in _STOP_SIGNALS:  # a closed terminal may send both; the second must not end cleaning up
        signal.signal(later, signal.SIG_IGN)
    raise Stopped(number, f"stopped by {signal.Signals(number).name}")


def _explain(error: Exception) -> tuple[Sequence[str], int]:
    """The lines and the exit code of a failure."""
    if isinstance(error, GptminiError):
        return error.lines, error.exit_code
    if isinstance(error, typer.exceptions.TyperException):
        return [_explain_usage(error)], 2
    if isinstance(error, UnicodeError):
        place = f" at position {error.start}" if hasattr(error, "start") else ""
        return [f"the text given is not valid UTF-8{place}; convert it to UTF-8"], 3
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        return [f"{error.filename or 'output'}: {reason}; fix this or use another path"], 5
    if re.search("MemoryError|out of memory|can't allocate memory", f"{error!r}", re.IGNORECASE):
        return ["out of memory; lower train.micro_batch_size, --batch-size or the model's size"], 5
    return [f"internal error: {error!r}; rerun with --debug and report it"], 1


def _explain_usage(error: typer.exceptions.TyperException) -> str:
    """typer's complaint in our form: the nearest option or setting, and which help to read."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "gptmini"
    option = getattr(error, "option_name", "")
    known = [name for param in context.command.params for name in param.opts] if context else []
    if not hasattr(error, "possibilities"):
        text = _reword(error.format_message().rstrip("."))
        text = text[:1].lower() + text[1:] + _quote_value(text)
        if text.startswith("unexpected") and "--prompt" in known:
            text += "; put the text after --prompt, in quotes"
        elif text.startswith("unexpected") and "--data" in known and "--data" in sys.argv:
            text += "; repeat --data before each text, or quote a pattern: --data '*.txt'"
        return f"{text}{'' if text.endswith('?') else ';'} see {command} --help"
    if option in _HINTS_FOR_OTHER_OPTIONS and "--steps" in known:
        hint = _HINTS_FOR_OTHER_OPTIONS[option]
    elif near := difflib.get_close_matches(option, known, 1, 0.75):
        hint = f"did you mean {near[0]}? "
    elif "--set" in known:
        from gptmini.config.load import find_full_key

        section = "sample." if command.endswith(" generate") else ""
        key = find_full_key(option.lstrip("-").replace("-", "_"), section)
        hint = f"use --set {key}=VALUE, or " if key else ""
    else:
        hint = ""
    return f"no such option: {option}; {hint}see {command} --help"


_HINTS_FOR_OTHER_OPTIONS = {  # options of other programs
    "--epochs": "use --steps or --minutes, or ",
    "--resume": "name the run: gptmini train RUN, or ",
    "--init-from": "use --from RUN, or ",
    "--finetune": "use --from RUN, or ",
}


def _quote_value(text: str) -> str:
    """What was typed for the option that a complaint begins with: ", not 'x'"."""
    option, colon, problem = text.partition(": ")
    if not colon or not problem.startswith(("must be", "expected")):
        return ""
    words = [*sys.argv[1:], ""]
    values = [value for word, value in pairwise(words) if word == option]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    if not values:
        return ""
    return f", not {values[-1] if re.fullmatch('-?[0-9.]+', values[-1]) else repr(values[-1])}"


def _fail(lines: Sequence[str], code: int) -> NoReturn:
    for line in lines:
        print(f"gptmini: {line}", file=sys.stderr)
    sys.exit(code)
