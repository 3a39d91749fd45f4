"""Load configurations from YAML files and the command line.

The defaults come first, then a file, then `--set`, then the other options; each overrides the one
before. Mistakes are reported at once, each with the place where it was made; contradictions between
the settings of a section, once each is well-formed.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptmini.config import yamlfile
from gptmini.config.section import describe_mistake
from gptmini.config.settings import Config
from gptmini.config.yamlfile import KeyPath
from gptmini.console import quote
from gptmini.errors import ConfigError, shorten

# The command line's --minutes decides these anew, whatever the file says.
MINUTES = ("train", "minutes")
SET_BY_MINUTES = {"steps", "warmup_steps", "eval_every", "eval_tokens", "save_every", "log_every"}

Origins = dict[KeyPath, str]  # where each key was given: `file.yaml:3`, `--set a.b` or `--steps`

ATTENTION = ("model", "attention")
SHORT_ATTENTION = re.compile("mha|mqa|(gqa|window):[0-9]{1,9}")
# What a short form stands for besides what it names, so that `window:64` means the same everywhere.
FULL_ATTENTION = {"variant": "mha", "n_kv_head": None, "window": None, "full_every": None}


def load_config(file: Path | None, assignments: list[tuple[str, KeyPath, Any]]) -> Config:
    """Load a file, then apply (label, key path, value) overrides in their order.

    Raises ConfigError with one line for every mistake.
    """
    data: dict[str, Any] = {}
    origins: Origins = {}
    if file is not None:
        data, lines = yamlfile.read_file(file)
        data = {name: section for name, section in data.items() if section is not None}
        origins = {key: f"{file}:{line}" for key, line in lines.items()}
        data = _expand_attention(data, f"{origins.get(ATTENTION)}: model.attention")
    if any(path == MINUTES and value is not None for _, path, value in assignments):
        # Minutes on the command line win over the steps and intervals of a file.
        train = data["train"] if isinstance(data.get("train"), dict) else {}
        data["train"] = {key: train[key] for key in train if key not in SET_BY_MINUTES}
    for label, path, value in assignments:
        _assign(data, label, path, value)
        origins = {key: origin for key, origin in origins.items() if key[: len(path)] != path}
        origins[path] = label
    return validate(data, origins)


def parse_attention(text: str, label: str) -> dict[str, Any]:
    """Parse `gqa:2`, `window:64` or `gqa:2+window:64` into the keys of model.attention it names.

    Raises ConfigError, which begins with `label`.
    """
    parts = text.split("+")
    kinds = [part.partition(":")[0] for part in parts]
    is_twice = kinds.count("window") > 1 or len(kinds) - kinds.count("window") > 1
    if is_twice or not all(map(SHORT_ATTENTION.fullmatch, parts)):
        raise ConfigError(
            f"{label}: must be mha, mqa or gqa:N, with or without a window, such as "
            f"gqa:2+window:64, not {shorten(text)!r}"
        )
    named: dict[str, Any] = {}
    for kind, part in zip(kinds, parts, strict=True):
        number = part.partition(":")[2]
        if kind == "window":
            named["window"] = int(number)
        else:
            named |= {"variant": kind, "n_kv_head": int(number) if number else None}
    return named


def _expand_attention(data: dict[str, Any], label: str) -> dict[str, Any]:
    """Return data with the short form of model.attention written out, if it is there."""
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("attention"), str):
        return data
    attention = FULL_ATTENTION | parse_attention(model["attention"], label)
    return data | {"model": model | {"attention": attention}}


def _assign(data: dict[str, Any], label: str, path: KeyPath, value: Any) -> None:
    """Set a key of nested data; ConfigError if the path leads through a value."""
    if path == ATTENTION and isinstance(value, str):
        for key, part in (FULL_ATTENTION | parse_attention(value, label)).items():
            _assign(data, label, (*path, key), part)
        return
    section = data
    for depth, name in enumerate(path[:-1], 1):
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            key = ".".join(path[:depth])
            raise ConfigError(f"{label}: {key} is a value, not a section; set {key} itself")
    section[path[-1]] = value


def validate(data: dict[str, Any], origins: Origins) -> Config:
    """Check plain data; returns its configuration. `origins` lets errors name the place of a key.

    Raises ConfigError with one line for every mistake.
    """
    data = _expand_attention(data, "model.attention")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [line for mistake in error.errors() for line in _explain(mistake, origins)]
        raise ConfigError(*dict.fromkeys(lines)) from None


def read_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """Return a configuration that is given as settings, or as the path or name of a file."""
    if isinstance(config, str | Path):
        return load_config(find_config_file(str(config)), [])
    return config if isinstance(config, Config) else validate(dict(config), {})


def override(config: Config, settings: Mapping[str, Any], label: str) -> Config:
    """Return a configuration with some settings changed, in sections as a YAML file has them.

    Raises ConfigError, whose lines begin with `label`.
    """
    data = config.model_dump(exclude_unset=True)
    origins = {}
    for key, value in iter_settings(dict(settings)):
        path = tuple(key.split("."))
        _assign(data, label, path, value)
        origins[path] = label
    return validate(data, origins)


def revalidate(config: Config) -> Config:
    """Check a configuration that was filled or changed; ConfigError as for plain data."""
    return validate(config.model_dump(exclude_unset=True), {})


def iter_settings(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting of nested data as (dotted key, value)."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from iter_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def find_config_file(name: str) -> Path:
    """Find the file of a configuration by its path or its name in `configs/`."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = map_config_names()
    if name in known:
        return known[name]
    if "=" in name:
        raise ConfigError(f"{name}: not a configuration; each setting needs --set before it")
    near = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
    raise ConfigError(f"{name}: no such configuration or text; {hint}")


def find_request(run: Path) -> Path:
    """Find the file with what was asked of a run; ConfigError for a run that has none."""
    file = run / "request.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{run}: imported, of a loop of your own or too old, so it cannot be resumed; begin a "
            f"new run with --from {quote(run)}"
        )
    return file


def map_config_names() -> dict[str, Path]:
    """Map the name of each configuration, such as `attention/mqa`, to its file."""
    return {
        file.relative_to(CONFIGS_DIR).with_suffix("").as_posix(): file
        for file in list_config_files()
    }


def list_config_files() -> list[Path]:
    """List the configurations that come with gptmini."""
    return sorted(CONFIGS_DIR.rglob("*.yaml"))


# Beside the package in a checkout, inside it in a wheel.
_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
CONFIGS_DIR = next(place for place in _PLACES if place.is_dir())
DEFAULT_CONFIG_FILE = CONFIGS_DIR / "default.yaml"


def find_full_key(name: str, section: str = "") -> str | None:
    """Find the full key of a setting, in a section or in any, by its last name."""
    keys = (key for key in list_keys() if key.rpartition(".")[2] == name)
    return next((key for key in keys if key.startswith(section)), None)


def list_keys() -> list[str]:
    """List the full keys of all settings."""
    return [key for key, _ in iter_settings(Config().model_dump())]


def _explain(mistake: Any, origins: Origins) -> Iterator[str]:
    """Yield one line per problem in a pydantic error."""
    path = tuple(shorten(str(part)) for part in mistake["loc"])
    kind = mistake["type"]
    if kind == "contradiction":
        for key, problem in mistake["ctx"]["found"]:
            yield f"{_locate((*path, *key.split('.')), origins)}: {problem}"
    elif kind == "extra_forbidden":
        kind = "setting" if len(path) > 1 or find_full_key(path[0]) else "section"
        yield f"{_locate(path, origins)}: no such {kind}; {suggest_setting(path)}"
    elif kind != "default_factory_not_called":  # its cause has a line of its own
        value = _format_wrong(mistake["input"], kind)
        yield f"{_locate(path, origins)}: {describe_mistake(mistake['msg'])}, not {value[:80]}"


def _format_wrong(value: Any, kind: str) -> str:
    """Format a wrong value, text in quotes; `kind` is the type of pydantic's error."""
    if isinstance(value, float) and not kind.startswith("int"):
        return f"{value:.16g}"  # -1, as it was typed, not -1.0
    is_numpy = hasattr(value, "dtype")  # np.int64(4), which looks like a number
    return repr(value) if is_numpy or isinstance(value, str) else format_value(value)


def format_value(value: Any) -> str:
    """Format a value as YAML has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _locate(path: KeyPath, origins: Origins) -> str:
    """Say where a key was given: `file:line: a.b`, `--set a.b` or `--steps`.

    A key that was not given by itself is located by the nearest section around it.
    """
    key = ".".join(path)
    for end in range(len(path), 0, -1):
        origin = origins.get(path[:end])
        if origin is None:
            continue
        is_option = origin.startswith("--") and not origin.startswith("--set ")
        names_key = is_option or origin.endswith(f" {key}")
        return origin if names_key else f"{origin}: {key}"
    for given, origin in origins.items():
        if given[: len(path)] == path:
            return origin
    return key


def suggest_setting(path: KeyPath) -> str:
    """Suggest the setting that was probably meant by an unknown one: of its section, or of another.

    Names must be alike: at less, block_size would be taken for vocab_size.
    """
    *section, leaf = path
    prefix = "".join(f"{name}." for name in section)
    keys = list_keys()
    rest = [key.removeprefix(prefix).partition(".")[0] for key in keys if key.startswith(prefix)]
    inside = {name: prefix + name for name in rest}
    anywhere = {key.rpartition(".")[2]: key for key in keys}
    for known in (inside, anywhere):
        if near := difflib.get_close_matches(leaf.lower(), known, 1, 0.8):
            return f"did you mean {known[near[0]]}?"
    return "see gptmini settings, or docs/coming-from.md for names of other projects"
