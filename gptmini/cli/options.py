"""Options that several commands share, and what they stand for: a configuration, a run, a text."""

import difflib
import gc
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gptmini.errors import CheckpointError, ConfigError, DataError, shorten
from gptmini.files import decode_utf8, is_run

if TYPE_CHECKING:
    from gptmini.config.settings import Config

RUNS_FOLDER = Path("runs")
MAX_INPUT_BYTES = 16 << 20  # of a prompt, or of a text to score


def option(default: Any, metavar: str, text: str, *names: str, **settings: Any) -> Any:
    """Declare an option with a value; `...` is no default, or the one that follows `Annotated`."""
    return typer.Option(default, *names, metavar=metavar, help=text, **settings)


def flag(text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(False, *names, help=text, **settings)


def argument(default: Any, metavar: str, text: str, **settings: Any) -> Any:
    return typer.Argument(default, metavar=metavar, help=text, **settings)


def _set_threads(number: int | None) -> int | None:
    """Set the number of threads for OpenMP, which reads it once, when torch is loaded."""
    if number is not None:
        os.environ["OMP_NUM_THREADS"] = str(number)
    return number


def load_torch() -> None:
    """Import torch without looking for garbage in it meanwhile, or ever: all of it stays."""
    if "torch" not in sys.modules:
        gc.disable()
        import torch  # noqa: F401

        gc.freeze()
        gc.enable()


# Headings of help; what has none is listed last.
WRITING = {"rich_help_panel": "What to write"}
SAMPLING = {"rich_help_panel": "How to sample"}

NEWEST_RUN_HELP = "the last one trained in runs/"
_CONFIG_HELP = "A text, a YAML file, a name in configs/, or a run."
_DATA_HELP = "Text: file, folder, '*.txt', - (stdin), builtin:stories or hf:OWNER/NAME; repeatable."
_SET_HELP = "Any setting, such as train.seed=2; repeatable. See gptmini settings."
_ATTENTION_HELP = "mha, mqa, gqa:N (KV heads), window:N (last N positions) or gqa:N+window:N."
_MINUTES_HELP = "Train for X minutes in all; picks the sizes you left open."
_THREADS_HELP = "CPU threads; 1 may be faster while other programs are busy."
_BASE_HELP = "Run to fine-tune; the new run starts from its best weights."


ConfigName = Annotated[str | None, argument(..., "CONFIG", _CONFIG_HELP)]
RunName = Annotated[
    Path | None, argument(..., "RUN", "A run directory.", show_default=NEWEST_RUN_HELP)
]
Data = Annotated[list[str] | None, option(..., "PATH", _DATA_HELP)]
Assignments = Annotated[list[str] | None, option(..., "KEY=VALUE", _SET_HELP, "--set")]
AttentionName = Annotated[str | None, option(..., "KIND", _ATTENTION_HELP)]
Steps = Annotated[int | None, option(..., "N", "Train for N steps (optimizer updates).")]
Minutes = Annotated[float | None, option(..., "X", _MINUTES_HELP)]
Threads = Annotated[
    int | None,
    option(..., "N", _THREADS_HELP, min=1, max=1024, show_default="all", callback=_set_threads),
]
Base = Annotated[Path | None, option(..., "RUN", _BASE_HELP, "--from")]
Device = Annotated[str, option(..., "DEVICE", "auto, cpu, cuda, mps or xpu.")]
WeightsType = Annotated[
    str, option(..., "TYPE", "Precision: float32, bfloat16, or int8 if memory is short.")
]
MaxNewTokens = Annotated[
    int | None, option(..., "N", "New tokens at most; raise it if texts break off.", **WRITING)
]
_TEMPERATURE_HELP = "Lower it if texts ramble, raise it if they repeat; 0: greedy."
_SAMPLE_HELP = "Any other setting, such as sample.top_k=20; see gptmini settings sample."
Temperature = Annotated[float | None, option(..., "X", _TEMPERATURE_HELP, **SAMPLING)]
Seed = Annotated[
    int | None, option(..., "N", "Random seed; change it for another text.", **SAMPLING)
]
SampleAssignments = Annotated[
    list[str] | None, option(..., "sample.KEY=VALUE", _SAMPLE_HELP, "--set", **SAMPLING)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def parse_assignments(assignments: list[str] | None) -> list[tuple[str, tuple[str, ...], Any]]:
    """Parse the overrides of --set into (label, key path, value)."""
    from gptmini.config import yamlfile

    pairs = [yamlfile.parse_assignment(text) for text in assignments or []]
    return [(f"--set {'.'.join(path)}", path, value) for path, value in pairs]


def parse_sampling(options: dict[str, Any], assignments: list[str] | None) -> dict[str, Any]:
    """Check the sampling settings of --set and of the options, which override it.

    This comes before torch is loaded, so that a mistake is answered at once.
    """
    from gptmini.config import load

    overrides = parse_assignments(assignments)
    for label, path, _ in overrides:
        if path[0] != "sample":
            raise ConfigError(f"{label}: only sampling settings apply here; write sample.KEY=VALUE")
    for key, value in options.items():
        if value is not None:
            overrides.append((f"--{key.replace('_', '-')}", ("sample", key), value))
    return load.load_config(None, overrides).sample.model_dump(exclude_unset=True)


class Named(NamedTuple):
    """The meaning of CONFIG: a configuration, with its run, or a text."""

    file: Path | None = None
    run: Path | None = None
    text: str | None = None


def build_config(
    name: str | Named | None,
    data: list[str] | None = None,
    attention: str | None = None,
    train_options: dict[str, Any] | None = None,
    assignments: list[str] | None = None,
    base: Path | None = None,
) -> "Config":
    """Build the configuration of a command line: a file, then --set, then the other options.

    `name` is a YAML file, one of configs/, a run, or a text in the place of a configuration, or
    what it was resolved to. Without a name and a text, the file is the default configuration.
    `train_options` maps options such as --steps, which set the key of section train with the same
    name, to their values; --steps replaces the minutes of a file.
    """
    from gptmini.config import load

    if base is not None and name is None and not data:
        raise ConfigError(f"--from {base}: needs a text; add --data PATH")
    named = resolve(name) if isinstance(name, str) else name or Named()
    if named.text is not None:
        if data:
            raise ConfigError(
                f"{named.text}: a text, but CONFIG is expected here; repeat --data before each "
                f"text, or quote a pattern: --data '*.txt'"
            )
        data = [named.text]
    file = named.file
    if file is None and not data:
        file = load.DEFAULT_CONFIG_FILE

    overrides = parse_assignments(assignments)
    if data:
        overrides.append(("--data", ("data", "path"), data))
    if base is not None:
        overrides.append(("--from", ("base", "run"), str(base)))
    if attention is not None:
        label = f"--attention {shorten(attention)}"
        kind = load.parse_attention(attention, "--attention")
        stated = {path for _, path, _ in overrides}
        for key, value in (load.FULL_ATTENTION | kind).items():
            path = (*load.ATTENTION, key)
            if key in kind or path not in stated:  # --set may add to the kind
                overrides.append((label, path, value))
    given = {label: value for label, value in (train_options or {}).items() if value is not None}
    if {"--steps", "--minutes"} <= given.keys():
        raise ConfigError("--steps and --minutes: each says how long to train; pass one of them")
    if "--steps" in given and named.run is None:
        overrides.append(("--steps", ("train", "minutes"), None))
    overrides += [(label, ("train", label[2:]), value) for label, value in given.items()]
    return load.load_config(file, overrides)


def resolve(name: str) -> Named:
    """Find what a name stands for: a run, its config.yaml, a configuration, or a text for --data.

    Of anything else, ConfigError suggests the nearest configuration or run; what looks like a path
    is a text, whose reader suggests the nearest file.
    """
    from gptmini.config import load

    path = Path(name)
    folder = path.parent if path.name == "config.yaml" else path
    if is_run(folder):
        return Named(folder / "config.yaml", folder)
    if name == "-" or name.startswith(("builtin:", "hf:")) or set(name) & set("*?["):
        return Named(text=name)
    configs = load.map_config_names()
    is_named = path.suffix in (".yaml", ".yml") or name in configs
    if (path / "config.yaml").exists():
        raise ConfigError(f"{name}: neither a run nor a text; name its config.yaml to train it")
    if path.exists() and not is_named:
        return Named(text=name)
    runs = _list_runs()
    is_in_runs = path.parent == RUNS_FOLDER
    near = difflib.get_close_matches(path.name, runs if is_in_runs else [*configs, *runs], 1)
    if is_named or "=" in name or (near and near[0] in configs):
        return Named(load.find_config_file(name))
    if not is_in_runs and (path.suffix or len(path.parts) > 1):
        return Named(text=name)
    if near or is_in_runs:
        hint = f"did you mean {runs[near[0]]}?" if near else "gptmini runs lists them"
        raise ConfigError(f"{name}: no run here; {hint}")
    return Named(load.find_config_file(name))


def resolve_run(run: Path | None) -> Path:
    """Return `run`, or the newest run; raise CheckpointError with what was probably meant.

    Loads no torch, so that a wrong name is answered at once.
    """
    if run is None:
        return find_newest_run()
    if is_run(run):
        return run
    runs = _list_runs()
    near = difflib.get_close_matches(run.name, runs, 1)
    hint = "train one with gptmini train, or get a pretrained one with gptmini import"
    if near or is_run(run.parent):
        hint = f"did you mean {runs[near[0]] if near else run.parent}?"
    raise CheckpointError(f"{shorten(run)}: no run here; {hint}")


def _list_runs() -> dict[str, Path]:
    """Map the names of the runs in runs/ to their directories."""
    return {folder.name: folder for folder in RUNS_FOLDER.glob("*") if is_run(folder)}


def choose_out(
    config: str | None, data: str, attention: str | None = None, base: Path | None = None
) -> Path:
    """Name a new run in runs/ after its configuration or text, its attention and its base."""
    name = config or data.removeprefix("builtin:")
    if name.startswith("hf:"):  # without owner, revision and pattern
        name = re.split("[:@]", name)[1].split("/")[:2][-1]
    parts = Path(name).parts
    plain = [part for part in parts if not set(part) & set("*?[")]  # no pattern names a run
    name = Path(*plain).name.split(".")[0].lower()
    name = re.sub(r"\W+", "-", name).strip("-") or "text"
    if attention:
        name += f"-{attention.replace(':', '')}"
    if base:
        name += f"-from-{base.resolve().name}"
    return RUNS_FOLDER / name


def find_newest_run() -> Path:
    """Find the run that was trained last; those that were only begun or converted come last."""
    runs = _list_runs().values()
    if not runs:
        raise CheckpointError(f"{RUNS_FOLDER}: no run here; name one, or begin with gptmini train")
    return max(runs, key=_get_training_time)


def _get_training_time(run: Path) -> tuple[float, float]:
    """Return when a run last saved its best evaluation, 0 if never, and when it was begun."""
    best = run / "best.json"
    trained = best.stat().st_mtime if best.exists() else 0.0
    return trained, (run / "config.yaml").stat().st_mtime


def read_text(file: Path | None) -> str:
    """Read a file or standard input (-); without a file, return an empty text."""
    if file is None:
        return ""
    if str(file) == "-":
        name = "standard input"
        data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    else:
        name = str(file)
        with file.open("rb") as opened:
            data = opened.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise DataError(f"{name}: over {MAX_INPUT_BYTES >> 20} MiB; shorten it")
    return decode_utf8(data, name)
