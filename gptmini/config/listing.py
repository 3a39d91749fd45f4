"""Describe every setting, for `gptmini settings` and the table in configs/README.md."""

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
    """Yield dotted key, meaning and settings of each section in a configuration's JSON schema."""
    for name, reference in schema["properties"].items():
        yield from _iter_section(name, reference, schema)


def _iter_section(
    key: str, reference: dict[str, Any], schema: dict[str, Any]
) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield a section and then those inside it."""
    section = schema["$defs"][reference["$ref"].rpartition("/")[2]]
    properties = section["properties"]
    inner = {name: each for name, each in properties.items() if "$ref" in each}
    settings = [
        _describe_setting(name, each) for name, each in properties.items() if name not in inner
    ]
    yield key, section.get("description", ""), settings  # python -OO drops docstrings
    for name, each in inner.items():
        yield from _iter_section(f"{key}.{name}", each, schema)


def _describe_setting(name: str, setting: dict[str, Any]) -> Setting:
    """Describe a setting by its JSON schema."""
    default = "computed"
    if "default" in setting:
        default = f"`{_format_value(setting['default'])}`"
    meaning = " ".join(setting["description"].split())
    return Setting(name, _describe_type(setting), default, meaning)


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _describe_type(setting: dict[str, Any]) -> str:
    """Describe the type of a setting in words."""
    if "anyOf" in setting:
        return " or ".join(map(_describe_type, setting["anyOf"]))
    if "enum" in setting:
        return ", ".join(f"`{choice}`" for choice in setting["enum"])
    if setting["type"] == ["string", "array"]:
        return "text or list"
    if setting["type"] == "array":
        return f"list of {_describe_type(setting['items'])}"
    return TYPE_NAMES[setting["type"]]
