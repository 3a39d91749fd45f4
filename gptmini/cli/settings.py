"""`gptmini settings`: list the settings that --set and YAML files take."""

import shutil
import textwrap

from gptmini.cli.options import argument
from gptmini.errors import ConfigError


def list_settings(
    name: str | None = argument(None, "KEY", "A key such as train.lr or lr, or a section."),
) -> None:
    """List the settings that --set and YAML files take."""
    from gptmini import console
    from gptmini.config import listing, load
    from gptmini.config.settings import Config

    width = max(40, min(100, shutil.get_terminal_size().columns))
    listed = {}
    for section, _, settings in listing.iter_sections(Config.model_json_schema()):
        for setting in settings:
            listed[f"{section}.{setting.name}"] = setting
    chosen = list(listed)
    if name is not None:
        chosen = [key for key in listed if f".{name}." in f".{key}." or name == f"{key}."]
    if not chosen and name is not None:
        leaf = name.rpartition(".")[2]
        known = load.find_full_key(leaf)
        if known is None:
            remedy = load.suggest_key(leaf) or "gptmini settings lists all"
            raise ConfigError(f"{name}: no such setting; {remedy}")
        chosen = [known]
    lines = []
    for key in chosen:
        setting = listed[key]
        head = f"{key}: {setting.kind} (default: {setting.default})"
        lines.append(head.replace("`", ""))
        lines += [f"    {line}" for line in textwrap.wrap(setting.meaning, width - 4)]
    console.stream_to_stdout(f"{line}\n" for line in lines)
