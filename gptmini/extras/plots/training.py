"""Draws what training runs logged."""

from pathlib import Path
from typing import Any

from gptmini.errors import CheckpointError
from gptmini.extras.plots import plots
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics, select_numbers

RunMetrics = dict[str, list[dict[str, Any]]]  # logged lines by the name of the run


def plot_runs(paths: list[Path], out: Path) -> None:
    """Draw the curves of runs as a picture; CheckpointError for one that has logged nothing."""
    plots.check_suffix(out)
    logged = {str(path): list(read_metrics(RunDirectory(path).metrics_file)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).load_config()  # raises if this is not a run
        if not select_numbers(lines, "step", "tokens", "seconds"):
            raise CheckpointError(f"{name}: nothing logged yet; train it with gptmini train")
    plots.save_figure(plots.draw_training(logged, _compares_in_bits(logged)), out)


def _compares_in_bits(logged: RunMetrics) -> bool:
    """Tell whether losses are compared in bits per byte, as their tokenizers differ."""
    fingerprints = {RunDirectory(Path(name)).load_tokenizer().fingerprint for name in logged}
    return len(fingerprints) > 1
