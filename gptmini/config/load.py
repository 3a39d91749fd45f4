"""Configurations from YAML files and the command line.

The defaults come first, then a file, then `--set`, then the other options; each overrides the one
before. All mistakes are reported at once, each with the place where it was made.
"""

import copy
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptmini.config import yamlfile
from gptmini.config.settings import Config
from gptmini.config.yamlfile import KeyPath
from gptmini.errors import ConfigError

# What the command line's --minutes decides anew, whatever the file says.
SET_BY_MINUTES = ("steps", "warmup_steps", "eval_every", "eval_tokens", "save_every", "log_every")

Origins = dict[KeyPath, str]  # where each key was given: `file.yaml:3`, `--set a.b` or `--steps`

# The names that other projects give to our settings.
ALIASES = {
    "model.n_layer": ("n_layers", "num_hidden_layers"),
    "model.n_head": ("n_heads", "num_attention_heads"),
    "model.attention.n_kv_head": ("n_kv_heads", "num_key_value_heads", "n_query_groups"),
    "model.d_model": ("n_embd", "dim", "hidden_size"),
    "model.d_ff": ("intermediate_size", "n_inner"),
    "model.head_dim": ("head_size",),
    "model.context_length": ("block_size", "max_position_embeddings"),
    "model.rope_theta": ("rope_base",),
    "model.tie_embeddings": ("tie_word_embeddings",),
    "train.lr": ("learning_rate",),
    "train.steps": ("max_iters", "max_steps"),
    "train.warmup_steps": ("warmup_iters",),
    "train.eval_every": ("eval_interval",),
    "train.grad_clip": ("max_norm",),
    "data.path": ("dataset",),
    "base.run": ("init_from", "from"),
}

# Our words for those errors of pydantic whose own are not plain; braces name values of its context.
ERROR_MESSAGES = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must list at least {min_length}",
    "too_long": "must list at most {max_length}",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "list_type": "expected a list",
    "dict_type": "expected settings of the form key: value",
    "model_type": "expected settings of the form key: value",
}


def load_config(file: Path | None, assignments: list[tuple[str, KeyPath, Any]]) -> Config:
    """The configuration of a file and of (label, key path, value) overrides, in that order.

    Raises ConfigError with one line for every mistake.
    """
    data: dict[str, Any] = {}
    origins: Origins = {}
    if file is not None:
        data, lines = yamlfile.read_file(file)
        origins = {key: f"{file}:{line}" for key, line in lines.items()}
    for _, path, value in assignments:
        if path == ("train", "minutes") and value is not None:  # wins over the file's steps
            stated = data["train"] if isinstance(data.get("train"), dict) else {}
            data["train"] = {k: v for k, v in stated.items() if k not in SET_BY_MINUTES}
    for label, path, value in assignments:
        section = data
        for depth, name in enumerate(path[:-1], 1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                key = ".".join(path[:depth])
                raise ConfigError(f"{label}: {key} is a value, not a section; set {key} itself")
        section[path[-1]] = value
        origins = {key: o for key, o in origins.items() if key[: len(path)] != path}
        origins[path] = label
    return validate(data, origins)


def validate(data: dict[str, Any], origins: Origins) -> Config:
    """The configuration in plain data; `origins` lets errors name the place of each key."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        mistakes = [*error.errors(), *_find_contradictions_beside(error, data)]
        lines = [line for mistake in mistakes for line in _explain(mistake, origins)]
        raise ConfigError(*dict.fromkeys(lines)) from None


def fill_open_settings(config: Config, defaults: dict[str, dict[str, Any]]) -> Config:
    """The configuration with the settings it leaves open, or null, from `defaults`, by section."""
    data = config.model_dump(exclude_unset=True)
    for section, values in defaults.items():
        given = data.setdefault(section, {})
        given |= {key: value for key, value in values.items() if given.get(key) is None}
    return validate(data, {})


def _find_contradictions_beside(error: ValidationError, data: dict[str, Any]) -> list[Any]:
    """Contradictions among the well-formed settings of data that has malformed ones too.

    pydantic compares the settings of a section only once each is well-formed, so the malformed
    ones are left out and contradictions that mention them are dropped.
    """
    rest = copy.deepcopy(data)
    malformed = set()
    for mistake in error.errors():
        if mistake["type"] != "contradiction":
            *path, leaf = (part for part in mistake["loc"] if isinstance(part, str))
            section: Any = rest
            for name in path:
                section = section.get(name) if isinstance(section, dict) else None
            if isinstance(section, dict) and section.pop(leaf, None) is not None:
                malformed.add(leaf)
    try:
        Config.model_validate(rest)
    except ValidationError as again:
        contradictions = [each for each in again.errors() if each["type"] == "contradiction"]
        for each in contradictions:
            each["ctx"]["found"] = [
                pair
                for pair in each["ctx"]["found"]
                if not any(name in " ".join(pair) for name in malformed)
            ]
        return contradictions
    return []


def iter_differences(ours: Config, theirs: Config) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    a, b = (dict(iter_settings(config.model_dump())) for config in (ours, theirs))
    for key in a | b:  # `sample.bias` has keys of its own
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def iter_settings(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of nested data as (dotted key, value)."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from iter_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def find_config_file(name: str) -> Path:
    """The file of a configuration given by path or by its name in `configs/`."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = map_config_names()
    if name in known:
        return known[name]
    raise ConfigError(f"{name}: no such configuration; {_suggest_nearest(name, known)}")


def map_config_names() -> dict[str, Path]:
    """The file of each name that stands for a configuration, such as `attention/mqa`."""
    return {
        str(file.relative_to(CONFIGS_DIR).with_suffix("")): file for file in list_config_files()
    }


def list_config_files() -> list[Path]:
    """The configurations that come with gptmini."""
    return sorted(CONFIGS_DIR.rglob("*.yaml"))


# Beside the package in a checkout, inside it in a wheel.
_PACKAGE = Path(__file__).parents[1]
CONFIGS_DIR = next(p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir())
DEFAULT_CONFIG_FILE = (
    CONFIGS_DIR / "default.yaml"
)  # what a command uses when no configuration is named


def find_full_key(name: str, section: str = "") -> str | None:
    """The full key of a setting from its last name, which may be that of another project."""
    keys = [
        key for key, _ in iter_settings(Config().model_dump()) if key.rpartition(".")[2] == name
    ]
    keys += [key for key, others in ALIASES.items() if name in others]
    return next((key for key in keys if key.startswith(section)), None)


def _explain(mistake: Any, origins: Origins) -> Iterator[str]:
    """One line per problem in a pydantic error."""
    path = tuple(str(part) for part in mistake["loc"])
    kind = mistake["type"]
    if kind == "contradiction":
        for key, problem in mistake["ctx"]["found"]:
            yield f"{_locate((*path, *key.split('.')), origins)}: {problem}"
    elif kind == "extra_forbidden":
        kind = "setting" if len(path) > 1 or find_full_key(path[0]) else "section"
        yield f"{_locate(path, origins)}: no such {kind}; {_suggest_setting(path)}"
    elif kind != "default_factory_not_called":  # its cause has a line of its own
        limits = mistake.get("ctx", {}).items()
        plain = {key: f"{at:.16g}" if isinstance(at, float) else at for key, at in limits}
        fallback = mistake["msg"].replace("Input should be", "must be")
        expected = ERROR_MESSAGES[kind].format(**plain) if kind in ERROR_MESSAGES else fallback
        value = mistake["input"]
        shown = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
        if isinstance(value, float) and not kind.startswith("int"):
            shown = f"{value:.16g}"  # -1, as it was typed, not -1.0
        expected = expected.replace("'", "")  # the quotes of pydantic's lists of choices
        yield f"{_locate(path, origins)}: {expected}, not {shown[:80]}"


def _locate(path: KeyPath, origins: Origins) -> str:
    """`file:line: a.b`, `--set a.b` or `--steps`, by the nearest enclosing key that was given."""
    for end in range(len(path), 0, -1):
        if origin := origins.get(path[:end]):
            key = ".".join(path)
            named = origin.startswith("--") and not origin.startswith("--set ")
            return origin if named or origin.endswith(f" {key}") else f"{origin}: {key}"
    inside = (origin for key, origin in origins.items() if key[: len(path)] == path)
    return next(inside, ".".join(path))


def _suggest_setting(path: KeyPath) -> str:
    """The setting that was probably meant by an unknown one."""
    *section, leaf = path
    if key := find_full_key(leaf):
        return f"did you mean {key}?"
    prefix = "".join(f"{name}." for name in section)
    known = [key for key, _ in iter_settings(Config().model_dump()) if key.startswith(prefix)]
    return _suggest_nearest(leaf, [key.removeprefix(prefix).split(".")[0] for key in known], prefix)


def _suggest_nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The nearest of the known names, or else all of them."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {prefix}{near[0]}?" if near else f"choose one of {', '.join(known)}"
