"""The chat templates of instruct models: programs in Jinja that make one text of messages.

A template came with somebody else's model. As in transformers, Jinja's sandbox keeps it from files
and objects, and it sees plain data only. Each round of a loop and each call of a macro looks at the
clock, and whatever an expression puts out counts toward the length of the text. What a single
operation takes, such as 'x' * 10 ** 9, is not limited.

The environment is that of transformers, so that templates make the same texts: its trimming of
blocks, `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, and the block
`generation`, which marks what the model is to write.
"""

import json
import time
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Output, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptmini.errors import CheckpointError, ConfigError, shorten

MAX_LENGTH = 10_000_000  # characters of a text
MAX_SECONDS = 5
METER = "meter of a text"  # among the variables of a template, which cannot spell this name
ROLES = ("system", "developer", "user", "assistant")
Message = dict[str, Any]


class ChatTemplate:
    """A chat template in Jinja; threads may share it."""

    def __init__(
        self,
        source: str,
        tokens: dict[str, str],
        where: str | Path,
        remedy: str = "write the prompt yourself, with --special",
    ) -> None:
        """`tokens` are the names of special tokens by their use, such as bos_token.

        `where` is what messages of errors name, `remedy` what they advise.
        """
        self._source = source
        self._tokens = tokens
        self._where = where
        self._remedy = remedy

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for the answer to messages {"role": ..., "content": ...}.

        Raises ConfigError for messages that the template refuses, CheckpointError for a template
        that cannot be rendered.
        """
        # Objects may have methods that the sandbox does not know; JSON has none.
        plain_messages = json.loads(json.dumps(messages))
        variables = {
            **self._tokens,
            "tools": None,
            "documents": None,
            "messages": plain_messages,
            "add_generation_prompt": add_generation_prompt,
            METER: _Meter(),
        }
        try:
            return "".join(self._template.generate(variables))
        except Exception as error:  # a template may raise whatever its expressions raise
            if type(error) is TemplateError:  # what the template itself says of the conversation
                raise ConfigError(f"messages: {shorten(str(error), 200)}") from None
            problem = shorten(f"{type(error).__name__}: {error}", 200)
            raise CheckpointError(
                f"{self._where}: its chat template fails ({problem}); {self._remedy}"
            ) from None

    @cached_property
    def _template(self) -> Template:
        return create_environment().from_string(self._source)


class _Meter:
    """The time that a text takes, and its length."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._length = 0

    def add(self, n_characters: int) -> None:
        """Count characters; raise if they, or the time, are too many."""
        self._length += n_characters
        if self._length > MAX_LENGTH:
            raise ValueError(f"a text of over {MAX_LENGTH:,} characters")
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it takes over {MAX_SECONDS} seconds")


@pass_context
def _count(context: Context, value: Any) -> Any:
    """Count what an expression puts out."""
    context[METER].add(len(value) if isinstance(value, str) else 0)
    return value


class _MeteredCode(CodeGenerator):
    """Compiles blocks, such as the body of a loop or a macro, so that they count themselves."""

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        body = list(nodes)
        children = [child for node in body if isinstance(node, Output) for child in node.nodes]
        length = sum(len(child.data) for child in children if isinstance(child, TemplateData))
        self.writeline(f"context[{METER!r}].add({length})")
        super().blockvisit(body, frame)


def create_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_count
    )
    environment.code_generator_class = _MeteredCode
    environment.filters["tojson"] = dump_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: its content, as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
