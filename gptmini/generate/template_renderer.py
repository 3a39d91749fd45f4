"""Renders chat templates in a process of its own; imports nothing of gptmini.

A template is a program that came with a model. Jinja's sandbox keeps it from files and objects, not
from using up memory and time: this process may use little of the first, and whoever started it ends
it after a while. It reads requests from standard input, a line of JSON each, and answers likewise.

The environment is that of transformers, so that templates make the same texts: its trimming of
blocks, `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, and the block
`generation`, which marks what the model is to write.
"""

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 512_000_000  # bytes of address space
MAX_SECONDS = 60  # for a request, if nobody ends this process sooner
MAX_LENGTH = 10_000_000  # characters of a rendered text


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: its content, as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def create_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = dump_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = format_now
    return environment


def dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escapes for HTML, unlike Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    """Refuse a conversation; templates call this."""
    raise TemplateError(message)


def format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def answer(environment: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> dict[str, str]:
    """Render the template of a request with its variables: {"text": ...} or {"error": ...}."""
    try:
        text = environment.from_string(request["template"]).render(request["variables"])
    except Exception as error:  # a template may raise whatever its expressions raise
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    if len(text) > MAX_LENGTH:
        return {"error": f"a text of over {MAX_LENGTH:,} characters"}
    return {"text": text}


def set_alarm(seconds: int) -> None:
    """End this process after some seconds, or never after 0. Windows has no alarms."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def main() -> None:
    with suppress(ImportError, ValueError, OSError):  # Windows and macOS have no such limit
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    environment = create_environment()
    for line in sys.stdin:
        set_alarm(MAX_SECONDS)
        sys.stdout.write(json.dumps(answer(environment, json.loads(line))) + "\n")
        sys.stdout.flush()
        set_alarm(0)


if __name__ == "__main__":
    main()
