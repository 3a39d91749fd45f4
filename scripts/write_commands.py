"""Write docs/commands.md, the reference of all commands, from their own help."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from gptmini.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Commands

Every command with its options and their defaults. `gptmini COMMAND --help` prints the same in a
terminal, and `gptmini settings` the settings that `--set` takes. Add `--debug` to any command to
see the traceback of a failure. After `gptmini --install-completion`, the Tab key completes commands
and options.

| command | what it does |
|---|---|"""


def describe_commands() -> str:
    """Describe every command in Markdown: a list of all, then each with a table of options."""
    commands = dict(_iter_commands(typer.main.get_command(app), ""))
    lines = [HEAD]
    for name, command in commands.items():
        purpose = command.help.partition("\n")[0]
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {purpose} |")
    for name, command in commands.items():
        words = ["gptmini", name, *map(_format_argument, command.params)]
        lines += [f"\n## {name}\n", f"`{' '.join(filter(None, words))}`\n", f"{command.help}\n"]
        lines += ["| | | default |", "|---|---|---|", *map(_format_row, command.params)]
    return "\n".join([*lines, ""])


def _iter_commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _iter_commands(command, f"{name} ")
        else:
            yield prefix + name, command


def _format_argument(param: Any) -> str:
    """Format an argument as in a usage line; of an option, nothing."""
    if param.param_type_name == "option":
        return ""
    shown = param.metavar + (" ..." if param.nargs == -1 else "")
    return shown if param.required else f"[{shown}]"


def _format_row(param: Any) -> str:
    """Format an argument or option as a row: how it is written, its meaning, its default."""
    names = param.opts if param.param_type_name == "option" else []
    written = " ".join(filter(None, [*names, param.metavar]))
    default = param.show_default
    if not isinstance(default, str):  # a text says what a command does without a value
        default = "" if param.default in (None, False) else f"`{param.default}`"
    cells = [f"`{written}`", param.help, "required" if param.required else default]
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    PAGE.write_text(describe_commands())
