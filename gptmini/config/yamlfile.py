"""Strict YAML: a subset that means what it says, with the line of every key.

PyYAML's loaders read `3e-4` as text, `no` as false and `010` as eight, keep the last of two equal
keys, and recurse without bound. This reader takes the parser's events and builds only mappings,
lists and scalars by the rules below: no tags, anchors or duplicate keys, bounded depth and size.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from gptmini.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

Path_ = tuple[str, ...]
Lines = dict[Path_, int]

# A plain scalar is the first of these that matches, else text. Quoted scalars are always text.
SCALARS = {
    "null": re.compile(r"null|~|"),
    "bool": re.compile(r"true|false|True|False|TRUE|FALSE"),
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    "float": re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"),
}
MAKE: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": float,
}


def read_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML file and the line (from 1) of each dotted key, as tuples of names."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB; is this a configuration file?")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {(error.strerror or str(error)).lower()}; name a file"
        ) from None
    lines: Lines = {}
    data = parse(text, str(path), lines)
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds {_kind(data)}"
        raise ConfigError(f"{path}: {what}; expected lines of the form key: value")
    return data, lines


def parse(text: str, name: str, lines: Lines | None = None) -> Any:
    """The value of a YAML text; `name` stands in errors, `lines` is filled with each key's line."""
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        return _Builder(name, {} if lines is None else lines).document(events)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: {error.problem or error.context}; mend the YAML") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{name}: {reason}; only printable text is allowed") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply; {MAX_DEPTH} levels are the limit") from None


class _Builder:
    """Plain data from parser events."""

    def __init__(self, name: str, lines: Lines) -> None:
        self.name, self.lines = name, lines

    def document(self, events: Iterator[Any]) -> Any:
        value = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.fail(event, "a second document", "keep one document in a file")
                value = self.node(next(events), events, ())
        return value

    def node(self, event: Any, events: Iterator[Any], path: Path_) -> Any:
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            self.fail(event, "anchors and aliases are not read", "write the value out")
        if event.tag:
            self.fail(event, f"the tag {event.tag} is not read", "remove it")
        if len(path) > MAX_DEPTH:
            self.fail(event, "nested too deeply", f"{MAX_DEPTH} levels are the limit")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(events, path)
        return self.mapping(events, path)

    def scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.style is None:
            for kind, pattern in SCALARS.items():
                if pattern.fullmatch(text):
                    if len(text) > 100:
                        self.fail(event, "a number of over 100 digits", "shorten it")
                    return MAKE[kind](text)
        return text

    def sequence(self, events: Iterator[Any], path: Path_) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self.node(event, events, (*path, str(len(items)))))
        return items

    def mapping(self, events: Iterator[Any], path: Path_) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.tag or event.anchor:
                self.fail(event, "a key that is not a plain name", "write name: value")
            key: str = event.value
            here = (*path, key)
            if key in items:
                self.fail(
                    event, f"{key} stands twice, first on line {self.lines[here]}", "keep one"
                )
            self.lines[here] = event.start_mark.line + 1 if event.start_mark else 0
            items[key] = self.node(next(events), events, here)
        return items

    def fail(self, event: Any, what: str, mend: str) -> NoReturn:
        line = event.start_mark.line + 1
        raise ConfigError(f"{self.name}:{line}: {what}; {mend}")


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer with this module's idea of which plain scalars are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind_name, _pattern in SCALARS.items():
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind_name}", _whole, None)


def dump(data: dict[str, Any]) -> str:
    """YAML text that `parse` reads back to equal data; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def assignment(text: str) -> tuple[Path_, Any]:
    """`a.b=1` as (("a", "b"), 1); the value is YAML."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}: not an assignment; write --set train.steps=100")
    return tuple(key.split(".")), parse(value, f"--set {key}")


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "a single value"
