"""Write configs/schema.json, which gives editors completion and checks in the YAML files."""

import json

from gptmini.config.load import CONFIGS
from gptmini.config.settings import Config


def main() -> None:
    """Write the JSON schema of the configuration."""
    text = json.dumps(Config.model_json_schema(), indent=1, sort_keys=True)
    (CONFIGS / "schema.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
