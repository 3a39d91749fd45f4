"""`gptmini plot`: draw the training curves of runs."""

from pathlib import Path

from gptmini.cli.options import NEWEST_RUN_HELP, argument, find_newest_run, option, resolve_run
from gptmini.console import show_elapsed


def plot(
    runs: list[Path] | None = argument(
        None, "RUN", "Run directories.", show_default=NEWEST_RUN_HELP
    ),
    out: Path | None = option(
        None, "FILE", "Picture to write: .png, .pdf or .svg.", show_default="RUN/plot.png"
    ),
) -> None:
    """Plot training curves."""
    paths = [resolve_run(run) for run in runs or [find_newest_run()]]
    out = out or paths[0] / "plot.png"
    from gptmini.extras.plots import training

    with show_elapsed("drawing"):
        training.plot_runs(paths, out)
    print(out)


COMMANDS = {"plot": plot}
