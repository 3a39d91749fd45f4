"""Write what follows from the settings: configs/schema.json, and the table in configs/README.md.

The schema gives editors completion and checks in the YAML files.
"""

import json
from collections.abc import Iterator
from typing import Any

from gptmini.config.listing import sections
from gptmini.config.load import CONFIGS
from gptmini.config.settings import Config

START = "<!-- every setting: written by scripts/write_schema.py -->"
END = "<!-- end of every setting -->"


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
    return "\n".join([before + START, *_tables(schema), "", END + after])


def _tables(schema: dict[str, Any]) -> Iterator[str]:
    """A heading and a table for each section of the configuration."""
    for key, meaning, settings in sections(schema):
        yield from ("", f"### {key}", "", meaning, "")
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        for each in settings:
            yield f"| `{each.name}` | {each.kind} | {each.default} | {each.meaning} |"


if __name__ == "__main__":
    main()
