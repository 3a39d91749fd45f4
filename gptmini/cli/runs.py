"""`gptmini runs`: list runs, and say what of them can be deleted."""

import json
from dataclasses import asdict
from pathlib import Path

from gptmini.cli.options import RUNS_FOLDER, AsJson, Cache, argument
from gptmini.console import format_bytes, say, show_elapsed
from gptmini.errors import CheckpointError
from gptmini.files import DEFAULT_CACHE_DIR


def list_runs(
    folders: list[Path] | None = argument(
        None, "FOLDER", "Folders with runs, or run directories.", show_default="runs"
    ),
    as_json: AsJson = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """List runs: steps, losses, sizes, and what can be deleted; deletes nothing."""
    for folder in folders or []:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; name one that has runs")
    if not folders:
        folders = [RUNS_FOLDER] if RUNS_FOLDER.is_dir() else []
    from gptmini.plan.cost import count_parameters
    from gptmini.runs import listing

    with show_elapsed("checking the newest checkpoints"):
        runs = [run for folder in folders for run in listing.list_runs(folder, count_parameters)]
    removable = [each for run in runs for each in run.removable]
    removable += [each for folder in folders for each in listing.find_leftovers(folder)]
    cache_size = listing.measure(cache)
    if as_json:
        facts = {
            "runs": [asdict(run) for run in runs],
            "removable": [asdict(each) for each in removable],
            "cache": asdict(cache_size),
        }
        print(json.dumps(facts))
        return
    if runs:
        print(listing.format_runs(runs))
    else:
        say("no run here; train one with gptmini train")
    if removable:
        print(f"\n{listing.format_removable(removable)}")
    print(
        f"\ncache: {cache}, {format_bytes(cache_size.bytes)}; delete it while nothing runs, and "
        f"gptmini makes again what it needs"
    )
