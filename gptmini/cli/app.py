"""The list of commands, and the message and exit code of every failure.

Results go to stdout, everything else to stderr. A command imports the modules it needs when it
runs: torch takes more than a second to load, and `--help` should be quick.
"""

import atexit
import difflib
import gc
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.exceptions

from gptmini import __version__, console
from gptmini.cli.chat import chat
from gptmini.cli.data import data_app
from gptmini.cli.evaluate import evaluate
from gptmini.cli.generate import generate
from gptmini.cli.inspect import inspect
from gptmini.cli.runs import list_runs
from gptmini.cli.score import score
from gptmini.cli.settings import list_settings
from gptmini.cli.tokenizer import tokenizer_app
from gptmini.cli.train import train
from gptmini.errors import GptminiError, Stopped, describe_os_error, explain_missing_part
from gptmini.files import IS_WINDOWS, suggest_file

app = typer.Typer(
    help="Train a small GPT on your text and look inside. Begin with: gptmini train",
    epilog="Add --debug to any command to see the traceback of a failure.",
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
    """A command that lists the first line of its help, and names itself in every usage error."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return (self.help or "").partition("\n")[0]  # typer's own is cut after 45 characters

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List arguments and options under the headings of their panels, in plain text."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in ctx.command.get_params(ctx):
            panel = param.rich_help_panel or "Options"
            name, text = param.get_help_record(ctx)
            if param.param_type_name == "argument":
                panel, name = "Arguments", param.metavar  # without its type
            panels.setdefault(panel, []).append((name, text))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A shell expands ~ at the beginning of a word alone.
        args = [
            f"--out={os.path.expanduser(arg[6:])}" if arg.startswith("--out=~") else arg
            for arg in args
        ]
        try:
            return super().parse_args(ctx, args)
        except typer.exceptions.TyperException as error:
            error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]
            raise


app.command()(train)
app.command()(generate)
app.command()(chat)
app.command()(score)
app.command()(evaluate)
app.command()(inspect)
app.command("runs")(list_runs)
app.command("settings")(list_settings)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
for _file in sorted(Path(__file__).parents[1].glob("extras/*/command.py")):
    # A command of a part in extras/ is there if the part is.
    _part = import_module(f"gptmini.extras.{_file.parent.name}.command")
    for _name, _command in _part.COMMANDS.items():
        app.command(_name)(_command)
for _group in (app, data_app, tokenizer_app):
    for _info in _group.registered_commands:
        _info.cls = _Command


# How often a waiting OpenMP thread looks for work before it sleeps. By libgomp's own count, threads
# take the cores from other programs, and from each other (scripts/LOG.md: How long should idle
# OpenMP threads look for work?).
OPENMP_SPIN_COUNT = "10000"

CLOSED_PIPE_SIGNAL = 13  # SIGPIPE, which Python ignores and Windows lacks
# Windows has no SIGHUP.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def main() -> None:
    """Run the command line; a failure becomes one line for each problem and an exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP reads this once, when torch is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    # Or Python would search all objects for garbage before it ends.
    atexit.register(gc.freeze)
    _prepare_streams()
    _catch_stop_signals()
    words = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        # Not standalone: typer would answer wrong usage and Ctrl-C in its own way.
        with explain_missing_part("this command"):
            code = app(words, prog_name="gptmini", standalone_mode=False)
        sys.stdout.flush()  # here, as Python would report a failure at exit in words of its own
    except SystemExit as end:
        if not console.is_closed_pipe(end.__context__):  # typer turns one into a SystemExit
            raise
        _end_after_closed_pipe()
    except (Exception, Stopped) as error:
        if console.is_closed_pipe(error):
            _end_after_closed_pipe()
        if "--debug" in sys.argv:
            raise
        lines, code = _explain(error)
        if code in (2, 3, 4) and (unquoted := _find_unquoted(words)):
            lines = [f"quote a name with spaces: {unquoted}"]
        _fail(lines, code)
    if code == 130:
        _fail(["stopped by Ctrl-C"], 130)
    sys.exit(code)


def _prepare_streams() -> None:
    """Let every text be printed: replace what the terminal's encoding lacks, and closed streams."""
    if sys.stdin is None:  # closed by the caller, as with `<&-`: nothing to read
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - open until the end
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as with `2>&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
            if IS_WINDOWS and not stream.isatty():
                # Write the same bytes to pipes and files as elsewhere, not Windows' code page.
                stream.reconfigure(encoding="utf-8", newline="\n")


def _end_after_closed_pipe() -> NoReturn:
    """Exit like a program that SIGPIPE ended: nobody reads the output any more."""
    console.discard_stdout()
    sys.exit(128 + CLOSED_PIPE_SIGNAL)


def _catch_stop_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exception, so that what is under way cleans up."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and so do we
            signal.signal(number, _stop)


def _stop(number: int, _: object) -> None:
    """Raise Stopped; the training loop has a handler of its own, which saves first."""
    # A closed terminal may send both signals; the second must not interrupt the cleaning up. After
    # a library that swallowed the first, it does end the work.
    if not isinstance(sys.exception(), Stopped):
        raise Stopped(number, f"stopped by {signal.Signals(number).name}")


def _explain(error: Exception | Stopped) -> tuple[Sequence[str], int]:
    """Return the lines and the exit code of a failure."""
    if isinstance(error, GptminiError | Stopped):
        return error.lines, error.exit_code
    if isinstance(error, typer.exceptions.TyperException):
        return [_explain_usage(error)], 2
    if isinstance(error, UnicodeError):
        place = f" at position {error.start}" if hasattr(error, "start") else ""
        return [f"the text given is not valid UTF-8{place}; convert it to UTF-8"], 3
    if isinstance(error, OSError):
        remedy = suggest_file(error.filename) or "fix this or use another path"
        return [f"{error.filename or 'output'}: {describe_os_error(error)}; {remedy}"], 5
    return _explain_failed_computation(error)


def _explain_failed_computation(error: Exception) -> tuple[Sequence[str], int]:
    """Return the lines and the exit code of a failure that torch reports, or of one of our own."""
    if re.search("MemoryError|out of memory|can't allocate memory", f"{error!r}", re.IGNORECASE):
        return ["out of memory; lower train.micro_batch_size, --batch-size or the model's size"], 5
    varying = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if varying:
        return [f"train.deterministic: {varying[1]} has no deterministic kernel here; use off"], 5
    return [f"internal error: {error!r}; rerun with --debug and report it"], 1


def _explain_usage(error: typer.exceptions.TyperException) -> str:
    """Say what typer says of a wrong command line, with a remedy and which help to read."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "gptmini"
    known = [name for param in context.command.params for name in param.opts] if context else []
    problem = error.format_message().rstrip(".").replace("Value error, ", "")
    if wrong := re.match("Invalid value for '(.+)': (Input should .*)", problem):
        from gptmini.config.section import describe_mistake

        problem = f"{wrong[1]}: {describe_mistake(wrong[2])}"
    remedy = ""
    if hasattr(error, "possibilities"):  # of names for an option that does not exist
        remedy = _name_setting(getattr(error, "option_name", ""), command, known)
        problem = problem.partition(" (")[0] if remedy else problem
    elif problem.startswith("Got unexpected") and "--prompt" in known:
        remedy = "put the text after --prompt, in quotes"
    elif problem.startswith("Got unexpected") and "--data" in known and "--data" in sys.argv:
        remedy = "repeat --data before each text, or quote a pattern: --data '*.txt'"
    line = "; ".join(filter(None, [problem, remedy, f"see {command} --help"]))
    return line.replace("?;", "?")


def _find_unquoted(words: list[str]) -> str | None:
    """Find a file whose name has spaces and was typed as several words; quoted, with its option."""
    for begin, end in combinations(range(len(words) + 1), 2):
        name = " ".join(words[begin:end])
        if end - begin > 1 and os.path.exists(name):
            option = [word for word in words[:begin][-1:] if word.startswith("--")]
            return " ".join([*option, console.quote(name)])
    return None


def _name_setting(option: str, command: str, known: list[str]) -> str:
    """Say how to set what an unknown option names; "" if it is no setting, or near an option."""
    if "--set" not in known or difflib.get_close_matches(option, known, 1, 0.8):
        return ""
    from gptmini.config.load import find_full_key

    section = "sample." if command.endswith((" generate", " chat")) else ""
    key = find_full_key(option.lstrip("-").replace("-", "_").rpartition(".")[2], section)
    return f"use --set {key}=VALUE" if key else ""


def _fail(lines: Sequence[str], code: int) -> NoReturn:
    for line in lines:
        print(f"gptmini: {console.escape_line(line)}", file=sys.stderr)
    sys.exit(code)
