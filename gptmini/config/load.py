"""Configurations from YAML files and the command line, and the explanation of what is wrong.

The defaults come first, then a file, then `--set` and the named options, each overriding the one
before. Every mistake is reported at once, with the place it was made.
"""

import copy
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptmini.config import yamlfile
from gptmini.config.settings import Config
from gptmini.errors import ConfigError

Origins = dict[tuple[str, ...], str]  # where each key was given: `file.yaml:3` or `--set a.b`

# What other projects call our settings.
ALIASES = {
    "n_layers": "model.n_layer",
    "num_hidden_layers": "model.n_layer",
    "n_heads": "model.n_head",
    "num_attention_heads": "model.n_head",
    "n_kv_heads": "model.attention.n_kv_head",
    "num_key_value_heads": "model.attention.n_kv_head",
    "n_query_groups": "model.attention.n_kv_head",
    "n_embd": "model.d_model",
    "dim": "model.d_model",
    "hidden_size": "model.d_model",
    "intermediate_size": "model.d_ff",
    "n_inner": "model.d_ff",
    "head_size": "model.head_dim",
    "block_size": "model.context_length",
    "max_position_embeddings": "model.context_length",
    "rope_base": "model.rope_theta",
    "tie_word_embeddings": "model.tie_embeddings",
    "learning_rate": "train.lr",
    "max_iters": "train.steps",
    "max_steps": "train.steps",
    "warmup_iters": "train.warmup_steps",
    "eval_interval": "train.eval_every",
    "max_norm": "train.grad_clip",
    "dataset": "data.path",
}


def load(file: Path | None, assignments: list[tuple[str, tuple[str, ...], Any]]) -> Config:
    """The configuration of a file and of (label, key path, value) overrides, in that order.

    Raises ConfigError with one line for every mistake.
    """
    data: dict[str, Any] = {}
    origins: Origins = {}
    if file is not None:
        data, lines = yamlfile.read_file(file)
        origins = {key: f"{file}:{line}" for key, line in lines.items()}
    for label, path, value in assignments:
        inner = data
        for depth, name in enumerate(path[:-1], 1):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                key = ".".join(path[:depth])
                raise ConfigError(f"{label}: {key} is a value, not a section; set {key} itself")
        inner[path[-1]] = value
        origins = {key: o for key, o in origins.items() if key[: len(path)] != path}
        origins[path] = label
    return validate(data, origins)


def validate(data: Any, origins: Origins) -> Config:
    """The configuration in plain data; `origins` tells errors where each key was given."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        found = [*error.errors(), *_contradictions_beside(error, data)]
        lines = [line for one in found for line in _explain(one, origins)]
        raise ConfigError(*dict.fromkeys(lines)) from None


def completed(config: Config, wanted: dict[str, dict[str, Any]]) -> Config:
    """The configuration with what it leaves open set to what is wanted, section by section."""
    given = config.model_dump(exclude_unset=True)
    return validate(
        given | {name: values | given.get(name, {}) for name, values in wanted.items()}, {}
    )


def _contradictions_beside(error: ValidationError, data: Any) -> list[Any]:
    """What contradicts itself among the settings that are well-formed one by one.

    pydantic compares the settings of a section only when each is well-formed, so the others are
    left out here; what would concern one of those is not said.
    """
    rest = copy.deepcopy(data)
    dropped = set()
    for one in error.errors():
        if one["type"] != "contradiction":
            *path, leaf = (str(part) for part in one["loc"] if isinstance(part, str))
            section = rest
            for name in path:
                section = section.get(name) if isinstance(section, dict) else None
            if isinstance(section, dict) and section.pop(leaf, None) is not None:
                dropped.add(leaf)
    try:
        Config.model_validate(rest)
    except ValidationError as again:
        contradictions = [one for one in again.errors() if one["type"] == "contradiction"]
        for one in contradictions:
            one["ctx"]["found"] = [
                (key, what)
                for key, what in one["ctx"]["found"]
                if not any(name in f"{key} {what}" for name in dropped)
            ]
        return contradictions
    return []


def differences(ours: Config, theirs: Config) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    a, b = (dict(leaves(config.model_dump())) for config in (ours, theirs))
    for key in a | b:  # a mapping may have keys of its own
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of nested data as (dotted key, value)."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def find(name: str) -> Path:
    """The file of a configuration given by path or by its name in `configs/`."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    known = {str(file.relative_to(CONFIGS).with_suffix("")): file for file in named_configs()}
    if name not in known:
        raise ConfigError(f"{name}: no such configuration; {_near(name, known)}")
    return known[name]


def named_configs() -> list[Path]:
    """The configurations that come with gptmini."""
    return sorted(CONFIGS.rglob("*.yaml"))


# Beside the package in a checkout, inside it in a wheel.
_HERE = Path(__file__).parents[1]
CONFIGS = next(p for p in (_HERE / "configs", _HERE.parent / "configs") if p.is_dir())


def _explain(error: Any, origins: Origins) -> Iterator[str]:
    """One line per problem in a pydantic error."""
    path = tuple(str(part) for part in error["loc"])
    kind = error["type"]
    if kind == "contradiction":
        for key, what in error["ctx"]["found"]:
            full = (*path, *key.split("."))
            yield f"{_where(full, origins)}: {what}"
    elif kind == "extra_forbidden":
        yield f"{_where(path, origins)}: no such setting; {_suggest(path)}"
    elif kind != "default_factory_not_called":  # the cause has a line of its own
        expected = error["msg"].replace("Input should be", "expected").replace("'", "")
        if kind == "model_type":
            expected = "expected settings of the form key: value"
        found = "nothing" if error["input"] is None else repr(error["input"])
        yield f"{_where(path, origins)}: {expected}, found {found[:80]}; change it"


def _where(path: tuple[str, ...], origins: Origins) -> str:
    """`file:line: a.b` or `--set a.b`; a key nobody gave lies in the nearest section given."""
    for end in range(len(path), 0, -1):
        if origin := origins.get(path[:end]):
            key = ".".join(path)
            return origin if origin.endswith(f" {key}") else f"{origin}: {key}"
    return ".".join(path)


def _suggest(path: tuple[str, ...]) -> str:
    """The setting that was probably meant by an unknown one."""
    known = dict(leaves(Config().model_dump()))
    *section, leaf = path
    if leaf in ALIASES:
        return f"did you mean {ALIASES[leaf]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    prefix = ".".join([*section, ""]) if section else ""
    siblings = {key[len(prefix) :].split(".")[0] for key in known if key.startswith(prefix)}
    return _near(leaf, siblings)


def _near(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names, else all of them."""
    near = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
