"""Strict YAML: a subset that means what it says, with the line of every key.

PyYAML's own loaders read `3e-4` as text, `no` as false and `010` as eight, keep the last of two
equal keys, and recurse without bound. The loader here knows four kinds of plain scalar besides
text, and refuses anchors, duplicate keys, deep nesting and large files.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from gptmini import files
from gptmini.errors import ConfigError, describe_invalid_utf8, describe_os_error

MAX_BYTES = 4 << 20  # twice what Linux lets a command line be
MAX_DEPTH = 20
MAX_DIGITS = 100

KeyPath = tuple[str, ...]  # `train.lr` is ("train", "lr")
LineNumbers = dict[KeyPath, int]  # the line of each key, from 1

# A plain scalar that matches none of these is text. Quoted scalars are always text.
SCALAR_PATTERNS = {
    "null": r"null|~|",
    "bool": r"true|false|True|False|TRUE|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?",
}
RESOLVERS = {
    None: [
        (f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})\Z"))
        for kind, pattern in SCALAR_PATTERNS.items()
    ]
}


def read_file(path: Path) -> tuple[dict[str, Any], LineNumbers]:
    """Read the mapping in a YAML file, and the line of each of its keys, nested ones included."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than 4 MiB, so not a configuration; pass a text with --data"
            )
        text = files.read_regular(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = describe_invalid_utf8(path, f"at byte {error.start}", "save it as UTF-8")
        raise ConfigError(problem) from None
    except OSError as error:
        raise ConfigError(f"{path}: {describe_os_error(error)}; name a YAML file") from None
    lines: LineNumbers = {}
    data = parse(text, str(path), lines)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds no settings; write lines of the form key: value")
    return data, lines


def parse(text: str, name: str, lines: LineNumbers | None = None) -> Any:
    """Parse a YAML text; errors call it `name`, `lines` receives the line of each key."""
    if lines is None:
        lines = {}
    try:
        return _Loader(text, name, lines).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{where}: {problem}; fix the YAML") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{name}: {reason}; only printable text is allowed") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, restricted to the subset above."""

    yaml_implicit_resolvers = RESOLVERS

    def __init__(self, text: str, name: str, lines: LineNumbers) -> None:
        super().__init__(text)
        self._source = name
        self._lines = lines
        self._path: KeyPath = ()  # of the value being composed

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a value or key; `index` is a value's key, a list item's place, or None."""
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            self._refuse(event, "anchors and aliases are not supported; write the value out")
        if len(self._path) > MAX_DEPTH:
            self._refuse(event, f"nested too deeply; at most {MAX_DEPTH} levels are allowed")
        if isinstance(parent, yaml.MappingNode) and index is None:
            return self._compose_key(event)
        outer = self._path
        if index is not None:
            self._path += (index.value if isinstance(index, yaml.Node) else str(index),)
        node: Any = super().compose_node(parent, index)
        self._path = outer
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            self._refuse(node, f"a number of more than {MAX_DIGITS} digits; shorten it")
        return node

    def _compose_key(self, event: Any) -> Any:
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(event, "a key that is not a plain name; write name: value")
        node: Any = super().compose_node(None, 0)
        node.tag = "tag:yaml.org,2002:str"  # `1: x` has the key "1"
        path = (*self._path, node.value)
        if first := self._lines.get(path):
            self._refuse(node, f"duplicate key {node.value}, first on line {first}; keep one")
        self._lines[path] = node.start_mark.line + 1
        return node

    def _refuse(self, place: Any, problem: str) -> NoReturn:
        raise ConfigError(f"{self._source}:{place.start_mark.line + 1}: {problem}")


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that our loader would not read as text.

    Line breaks are written as backslash n, not as empty lines; so is what YAML takes for one.
    """

    yaml_implicit_resolvers = RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        if re.search("[\n\x85\u2028\u2029\ufeff]", value):
            style = '"'
        return super().represent_scalar(tag, value, style)


def dump(data: dict[str, Any]) -> str:
    """Write data as YAML that `parse` reads back to equal data; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_assignment(text: str) -> tuple[KeyPath, Any]:
    """Parse `a.b=1` into (("a", "b"), 1); the value is YAML."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        example = key.strip() if all(path) else "KEY"
        raise ConfigError(f"--set {text}: not an assignment; write --set {example}=VALUE")
    return path, parse(value, f"--set {'.'.join(path)}")
