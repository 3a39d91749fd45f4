"""Write what follows from the settings: configs/schema.json, and the table in configs/README.md.

The schema gives editors completion and checks in the YAML files.
"""

import json
from collections.abc import Iterator
from typing import Any

from gptmini.config.listing import iter_sections
from gptmini.config.load import CONFIGS_DIR
from gptmini.config.settings import Config

START_MARK = "<!-- every setting: written by scripts/write_schema.py -->"
END_MARK = "<!-- end of every setting -->"


def main() -> None:
    """Write both files anew."""
    schema = Config.model_json_schema()
    text = json.dumps(schema, indent=1, sort_keys=True)
    (CONFIGS_DIR / "schema.json").write_text(text + "\n")
    readme = CONFIGS_DIR / "README.md"
    readme.write_text(insert_settings(readme.read_text(), schema))


def insert_settings(text: str, schema: dict[str, Any]) -> str:
    """The text with the tables of a schema between the two markers."""
    before, _, rest = text.partition(START_MARK)
    _, _, after = rest.partition(END_MARK)
    return "\n".join([before + START_MARK, *_format_tables(schema), "", END_MARK + after])


def _format_tables(schema: dict[str, Any]) -> Iterator[str]:
    """A heading and a table for each section of the configuration."""
    for key, meaning, settings in iter_sections(schema):
        yield from ("", f"### {key}", "", meaning, "")
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        for each in settings:
            yield f"| `{each.name}` | {each.kind} | {each.default} | {each.meaning} |"


if __name__ == "__main__":
    main()
