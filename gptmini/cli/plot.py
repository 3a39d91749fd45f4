"""`gptmini plot`: draw the training curves of runs as a picture and as a page."""

from pathlib import Path

from gptmini.cli.options import NEWEST_RUN_HELP, argument, find_newest_run, option, resolve_run
from gptmini.console import show_elapsed


def plot(
    runs: list[Path] | None = argument(
        None, "RUN", "Run directories.", show_default=NEWEST_RUN_HELP
    ),
    out: Path | None = option(
        None,
        "FILE",
        "A picture (.png, .pdf, .svg) or a page with it and the samples (.html).",
        show_default="RUN/plot.png and RUN/plot.html",
    ),
) -> None:
    """Draw the training curves of runs; a page also has samples."""
    paths = [resolve_run(run) for run in runs or [find_newest_run()]]
    files = [out] if out else [paths[0] / "plot.png", paths[0] / "plot.html"]
    from gptmini.figures import report

    with show_elapsed("drawing"):
        report.write_report(paths, files)
    print(*files, sep="\n")
