"""Write configs/schema.json, from which editors complete and check YAML files."""

import json

from gptmini.config.load import CONFIGS_DIR
from gptmini.config.settings import Config

text = json.dumps(Config.model_json_schema(), indent=1, sort_keys=True)
(CONFIGS_DIR / "schema.json").write_text(text + "\n")
