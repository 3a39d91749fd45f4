"""`gptmini runs`: list runs, how far they are, how good and how large."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptmini.cli.options import RUNS_FOLDER, AsJson, argument
from gptmini.console import format_bytes, format_table, say
from gptmini.errors import CheckpointError, GptminiError
from gptmini.files import get_cache_folder, is_run

Facts = dict[str, Any]


def list_runs(
    folders: list[Path] | None = argument(
        None, "FOLDER", "Folders with runs, or run directories.", show_default="runs"
    ),
    as_json: AsJson = False,
) -> None:
    """List runs: steps, losses, sizes."""
    for folder in folders or []:
        if not folder.exists():
            raise CheckpointError(f"{folder}: no such folder; name one that has runs")
    runs = [_summarize(path) for folder in folders or [RUNS_FOLDER] for path in _find_runs(folder)]
    cache = get_cache_folder()
    cache_size, _ = _measure_files(cache)
    if as_json:
        print(json.dumps({"runs": runs, "cache": {"path": str(cache), "bytes": cache_size}}))
        return
    if runs:
        head = ["run", "steps", "parameters", "val loss", "bits/byte", "size", "last written", ""]
        print(format_table([head, *map(_format_row, runs)]))
        print("\nto compare runs on one text: bits/byte, lower is better")
    else:
        say("no run here; train one with gptmini train")
    print(f"\ncache: {cache}, {format_bytes(cache_size)}; safe to delete while nothing runs")


def _find_runs(folder: Path) -> Iterator[Path]:
    """Find the runs in a folder, sorted by name; the folder may be a run itself.

    Except in hidden folders, inside other runs and behind symbolic links.
    """
    if is_run(folder):
        yield folder
        return
    if not folder.is_dir():  # as of `runs/compare/*`
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _find_runs(child)


def _summarize(path: Path) -> Facts:
    """Collect what --json prints of a run.

    `step` is the last one that was logged if the run is being trained, else that of the newest
    checkpoint. `val_loss` and `val_bpb` are the best that were logged, of `eval_tokens` of the
    held-out text, or of all if None. `saw_held_out`: its base may have been trained on that text.
    `written` is in seconds since 1970. `source` is what the run or its base was imported from. A
    model of your own has `parameters` that only its code knows: None. `problem` says why a run
    cannot be read.
    """
    from gptmini.plan.cost import count_parameters
    from gptmini.runs.directory import RunDirectory
    from gptmini.runs.log import read_metrics, select_numbers

    run = RunDirectory(path)
    size, written = _measure_files(path)
    being_trained = run.is_locked()
    facts: Facts = {"path": str(path), "bytes": size, "written": written}
    facts["being_trained"] = being_trained
    facts |= dict.fromkeys(["step", "steps", "parameters", "val_loss", "val_bpb", "eval_tokens"])
    facts |= {"source": "", "saw_held_out": False, "problem": ""}
    try:
        config = run.load_config()
        metrics = read_metrics(run.metrics_file)
    except (GptminiError, OSError) as error:
        lines = error.lines if isinstance(error, GptminiError) else [str(error)]
        return facts | {"problem": lines[0]}
    facts["step"] = max(run.list_steps(), default=0)
    if being_trained and metrics:
        facts["step"] = max(facts["step"], metrics[-1]["step"])
    state = run.read_newest_state()
    if losses := select_numbers(metrics, "val_loss", "val_bpb"):
        facts["val_loss"], facts["val_bpb"] = min(losses)
    if not state.get("own_model"):
        facts["parameters"] = count_parameters(config.model)
    facts["steps"] = config.train.steps
    facts["eval_tokens"] = config.train.eval_tokens
    facts["source"] = str(state.get("source", ""))
    facts["saw_held_out"] = bool(state.get("saw_held_out"))
    return facts


def _measure_files(path: Path) -> tuple[int, float]:
    """Return the bytes of all files in a folder, and when the last of them was written."""
    size = 0
    written = 0.0
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # deleted by a training run
                status = os.lstat(os.path.join(root, name))
                size += status.st_size
                if name != "lock":  # written when a training run begins
                    written = max(written, status.st_mtime)
    return size, written


def _format_row(run: Facts) -> list[str]:
    notes = [run["problem"]] if run["problem"] else []
    if run["source"]:
        notes.append(f"from {run['source']}")
    if run["saw_held_out"]:
        notes.append("its base may know the held-out text")
    if run["eval_tokens"] is not None:
        notes.append(f"loss of {run['eval_tokens']:,} tokens")
    if run["being_trained"]:
        notes.append("being trained now")
    is_imported = run["source"] and run["step"] == 0 and not run["being_trained"]
    steps = "imported" if is_imported else f"{run['step']}/{run['steps']}"
    return [
        run["path"],
        "" if run["step"] is None else steps,
        "" if run["parameters"] is None else f"{run['parameters']:,}",
        "" if run["val_loss"] is None else f"{run['val_loss']:.4f}",
        "" if run["val_bpb"] is None else f"{run['val_bpb']:.4f}",
        format_bytes(run["bytes"]),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run["written"])),
        "; ".join(notes),
    ]
