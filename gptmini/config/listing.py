"""Every setting in words, for `gptmini settings` and the table in configs/README.md."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TYPE_NAMES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
    "null": "null",
}


@dataclass(frozen=True)
class Setting:
    """A setting; `kind` and `default` are Markdown, with values as code."""

    name: str
    kind: str
    default: str
    meaning: str


def iter_sections(schema: dict[str, Any]) -> Iterator[tuple[str, str, list[Setting]]]:
    """(Dotted key, meaning, settings) of each section in the JSON schema of a configuration."""
    for name, reference in schema["properties"].items():
        yield from _iter_section(name, reference, schema)


def _iter_section(
    key: str, reference: dict[str, Any], schema: dict[str, Any]
) -> Iterator[tuple[str, str, list[Setting]]]:
    """A section and then those inside it."""
    section = schema["$defs"][reference["$ref"].rpartition("/")[2]]
    inner = {name: each for name, each in section["properties"].items() if "$ref" in each}
    settings = [
        Setting(
            name,
            _describe_type(each),
            f"`{_format_yaml(each['default'])}`" if "default" in each else "computed",
            " ".join(each["description"].split()),
        )
        for name, each in section["properties"].items()
        if name not in inner
    ]
    yield key, section["description"], settings
    for name, each in inner.items():
        yield from _iter_section(f"{key}.{name}", each, schema)


def _format_yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _describe_type(setting: dict[str, Any]) -> str:
    if "anyOf" in setting:
        return " or ".join(map(_describe_type, setting["anyOf"]))
    if "enum" in setting:
        return ", ".join(f"`{choice}`" for choice in setting["enum"])
    if setting["type"] == ["string", "array"]:
        return "text or list"
    if setting["type"] == "array":
        return f"list of {_describe_type(setting['items'])}"
    return TYPE_NAMES[setting["type"]]
