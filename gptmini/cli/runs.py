"""`gptmini runs`: list runs and their sizes."""

import json
from dataclasses import asdict
from pathlib import Path

from gptmini.cli.options import RUNS_FOLDER, AsJson, argument
from gptmini.console import format_bytes, say
from gptmini.errors import CheckpointError
from gptmini.files import get_cache_folder


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
    if not folders:
        folders = [RUNS_FOLDER] if RUNS_FOLDER.is_dir() else []
    from gptmini.plan.cost import count_parameters
    from gptmini.runs import listing

    runs = [run for folder in folders for run in listing.list_runs(folder, count_parameters)]
    cache = get_cache_folder()
    cache_size, _ = listing.measure_files(cache)
    if as_json:
        facts = {
            "runs": [asdict(run) for run in runs],
            "cache": {"path": str(cache), "bytes": cache_size},
        }
        print(json.dumps(facts))
        return
    if runs:
        print(listing.format_runs(runs))
    else:
        say("no run here; train one with gptmini train")
    print(f"\ncache: {cache}, {format_bytes(cache_size)}; safe to delete while nothing runs")
