"""What several commands take: options, runs by default, and the configuration they add up to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptmini.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from gptmini.config.settings import Config

RUNS = Path("runs")

ConfigName = Annotated[
    str | None, typer.Argument(help="A YAML file, or the name of one in configs/.")
]
RunName = Annotated[
    Path | None, typer.Argument(help="A run directory; by default the newest in runs/.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="A file, a folder, a glob, - for standard input, builtin:python-docs or "
        "builtin:python-code; may be given several times."
    ),
]
Errors = Annotated[str | None, typer.Option(help="Bytes that are no UTF-8: strict or replace.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as train.lr=1e-3."),
]
AttentionName = Annotated[str | None, typer.Option(help="mha, mqa, gqa:KV_HEADS or window:SIZE.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer updates.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Weights = Annotated[str, typer.Option(help="float32, bfloat16 or int8.")]
Cache = Annotated[
    Path, typer.Option(envvar="GPTMINI_CACHE", help="Where prepared corpora and code are kept.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def configured(
    name: str | None,
    data: list[str] | None = None,
    errors: str | None = None,
    attention: str | None = None,
    named: dict[str, Any] | None = None,
    assignments: list[str] | None = None,
) -> "Config":
    """The configuration of a command line: file, then --set, then the named options.

    `named` has the options that are keys of the section train.
    """
    from gptmini.config import load, yamlfile

    overrides: list[tuple[str, tuple[str, ...], Any]] = []
    for text in assignments or []:
        path, value = yamlfile.assignment(text)
        overrides.append((f"--set {'.'.join(path)}", path, value))
    if data:
        overrides.append(("--data", ("data", "path"), data))
    if errors is not None:
        overrides.append(("--errors", ("data", "errors"), errors))
    if attention is not None:
        for key, value in attention_settings(attention).items():
            overrides.append(("--attention", ("model", "attention", key), value))
    for option, value in (named or {}).items():
        if value is not None:
            overrides.append((option, ("train", option.removeprefix("--")), value))
    return load.load(load.find(name) if name is not None else None, overrides)


def attention_settings(text: str) -> dict[str, Any]:
    """`gqa:2` or `window:64` as the keys of model.attention that it is short for."""
    name, colon, number = text.partition(":")
    if colon and not number.isdecimal():
        raise ConfigError(f"--attention {text}: {number!r} is no number; write it as gqa:2")
    if name == "window":
        if not colon:
            raise ConfigError("--attention window: of how many positions? write it as window:64")
        return {"window": int(number)}
    return {"variant": name, "n_kv_head": int(number) if colon else None}


def default_out(config: str | None, data: str, attention: str | None = None) -> Path:
    """`runs/` and the configuration's name, or the text's where none is named."""
    parts = Path(config or data.removeprefix("builtin:")).parts
    plain = [part for part in parts if not set(part) & set("*?[")]  # of a glob
    name = Path(*plain).name.split(".")[0].strip("-") or "text"
    return RUNS / (f"{name}-{attention.replace(':', '')}" if attention else name)


def newest_run() -> Path:
    """The run that was trained last."""
    configs = RUNS.glob("*/config.yaml")
    newest = max(configs, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        raise CheckpointError(f"{RUNS}: no run here; make one with gptmini train, or name one")
    return newest.parent
