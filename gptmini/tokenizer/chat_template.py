"""The chat templates of instruct models: programs in Jinja that make one text of messages.

A template came with somebody else's model. As in transformers, Jinja's sandbox keeps it from files
and objects, and it sees plain data only. The length of the text is limited; time and
memory that the template uses on the way are not.

The environment is that of transformers, so that templates make the same texts: its trimming of
blocks, `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, and the block
`generation`, which marks what the model is to write.
"""

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptmini.errors import CheckpointError, ConfigError, shorten

MAX_LENGTH = 10_000_000  # characters of a text
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
        }
        pieces = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > MAX_LENGTH:
                    raise ValueError(f"a text of over {MAX_LENGTH:,} characters")
                pieces.append(piece)
        except Exception as error:  # a template may raise whatever its expressions raise
            if type(error) is TemplateError:  # what the template itself says of the conversation
                raise ConfigError(f"messages: {shorten(str(error), 200)}") from None
            problem = shorten(f"{type(error).__name__}: {error}", 200)
            raise CheckpointError(
                f"{self._where}: its chat template fails ({problem}); {self._remedy}"
            ) from None
        return "".join(pieces)

    @cached_property
    def _template(self) -> Template:
        return create_environment().from_string(self._source)


def create_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = dump_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = format_now
    return environment


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: its content, as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
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


def format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
