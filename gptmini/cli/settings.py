"""`gptmini settings`: list the settings that --set and YAML files take."""

import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from gptmini import console
from gptmini.cli.options import argument
from gptmini.errors import ConfigError

TYPE_NAMES = {"string": "text", "boolean": "true or false", "object": "mapping"}


def list_settings(
    name: str | None = argument(None, "KEY", "A key such as train.steps or steps, or a section."),
) -> None:
    """List the settings for --set and YAML files.

    These defaults hold for any text; configs/default.yaml is for the built-in stories.
    """
    from gptmini.config import load
    from gptmini.config.settings import Config

    schema = Config.model_json_schema()
    listed = dict(_iter_settings("", schema, schema["$defs"]))
    chosen = list(listed)
    if name is not None:
        chosen = [key for key in listed if f".{name}." in f".{key}." or name == f"{key}."]
        if not chosen:
            remedy = load.suggest_setting(tuple(name.split(".")))
            raise ConfigError(f"{name}: no such setting; {remedy}")
    width = max(40, min(100, shutil.get_terminal_size().columns))
    lines = []
    for key in chosen:
        setting = listed[key]
        lines.append(f"{key}: {_describe_type(setting)} (default: {_describe_default(setting)})")
        meaning = textwrap.wrap(setting["description"], width - 4)
        lines += [f"    {line}" for line in meaning]
    console.stream_to_stdout(f"{line}\n" for line in lines)


def _iter_settings(
    prefix: str, section: dict[str, Any], sections: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the JSON schema of each setting, those of inner sections last."""
    for name, setting in sorted(section["properties"].items(), key=lambda item: "$ref" in item[1]):
        if "$ref" in setting:
            inner = sections[setting["$ref"].rpartition("/")[2]]
            yield from _iter_settings(f"{prefix}{name}.", inner, sections)
        else:
            yield prefix + name, setting


def _describe_default(setting: dict[str, Any]) -> str:
    if "default" not in setting or "default: " in setting["description"].lower():
        return "chosen"  # by a rule, which the description has in words
    value = setting["default"]
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _describe_type(setting: dict[str, Any]) -> str:
    if "anyOf" in setting:
        return " or ".join(map(_describe_type, setting["anyOf"]))
    if "enum" in setting:
        return ", ".join(setting["enum"])
    if setting["type"] == ["string", "array"]:
        return "text or list"
    if setting["type"] == "array":
        return f"list of {_describe_type(setting['items'])}"
    return TYPE_NAMES.get(setting["type"], setting["type"])
