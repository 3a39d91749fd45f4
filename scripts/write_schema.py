"""Write what follows from the settings: configs/schema.json, and the table in configs/README.md.

The schema gives editors completion and checks in the YAML files.
"""

import json
from collections.abc import Iterator
from typing import Any

from gptmini.config.load import CONFIGS
from gptmini.config.settings import Config

START = "<!-- every setting: written by scripts/write_schema.py -->"
END = "<!-- end of every setting -->"
TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
    "null": "null",
}


def main() -> None:
    """Write both files anew."""
    schema = Config.model_json_schema()
    text = json.dumps(schema, indent=1, sort_keys=True)
    (CONFIGS / "schema.json").write_text(text + "\n")
    readme = CONFIGS / "README.md"
    readme.write_text(with_settings(readme.read_text(), schema))


def with_settings(text: str, schema: dict[str, Any]) -> str:
    """The text with the tables of a schema between the two markers."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    sections = (line for name in schema["properties"] for line in _section(name, name, schema))
    return "\n".join([before + START, *sections, "", END + after])


def _section(name: str, key: str, schema: dict[str, Any]) -> Iterator[str]:
    """A heading and a table for a section of the configuration, then those of its sections."""
    parent = schema if key == name else schema["$defs"]["ModelConfig"]
    settings = schema["$defs"][parent["properties"][name]["$ref"].rpartition("/")[2]]
    inner = [each for each, setting in settings["properties"].items() if "$ref" in setting]
    yield from ("", f"### {key}", "", settings["description"], "")
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for each, setting in settings["properties"].items():
        if each not in inner:
            meaning = " ".join(setting["description"].split())
            default = f"`{_in_yaml(setting['default'])}`" if "default" in setting else "computed"
            yield f"| `{each}` | {_type_in_words(setting)} | {default} | {meaning} |"
    for each in inner:
        yield from _section(each, f"{key}.{each}", schema)


def _in_yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _type_in_words(setting: dict[str, Any]) -> str:
    if "anyOf" in setting:
        return " or ".join(map(_type_in_words, setting["anyOf"]))
    if "enum" in setting:
        return ", ".join(f"`{choice}`" for choice in setting["enum"])
    if setting["type"] == ["string", "array"]:
        return "text or list"
    if setting["type"] == "array":
        return f"list of {_type_in_words(setting['items'])}"
    return TYPES[setting["type"]]


if __name__ == "__main__":
    main()
