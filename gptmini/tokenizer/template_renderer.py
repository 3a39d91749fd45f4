"""Renders chat templates in a process of its own; imports nothing of gptmini.

A template is a program that came with a model. Jinja's sandbox keeps it from files and objects, not
from using up memory and time: this process may use little of both, and whoever started it ends it
after a while. It reads requests from standard input, a line of JSON each, and answers likewise.

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

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 512_000_000  # bytes of address space
MAX_CPU_SECONDS = 1  # for a text; published templates take milliseconds
MAX_LENGTH = 10_000_000  # characters of the texts of a request


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


class Renderer:
    """Renders templates; keeps the last one compiled."""

    def __init__(self) -> None:
        self._environment = create_environment()
        self._source = ""
        self._template = Template("")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Render a template with each of several variables: {"texts": [...]} or {"error": ...}."""
        texts = []
        try:
            for variables in request["variables"]:
                limit_time(MAX_CPU_SECONDS)
                texts.append(self._compile(request["template"]).render(variables))
        except Exception as error:  # a template may raise whatever its expressions raise
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        finally:
            limit_time(0)
        if sum(map(len, texts)) > MAX_LENGTH:
            return {"error": f"a text of over {MAX_LENGTH:,} characters"}
        return {"texts": texts}

    def _compile(self, source: str) -> Template:
        if source != self._source:
            self._template = self._environment.from_string(source)
            self._source = source
        return self._template


def limit_time(cpu_seconds: int) -> None:
    """End this process after so much time of the processor; 0 is any. Windows has no such timer.

    What the clock on the wall says would depend on how busy the machine is.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def main() -> None:
    with suppress(ImportError, ValueError, OSError):  # Windows and macOS have no such limit
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    renderer = Renderer()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(renderer.answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
