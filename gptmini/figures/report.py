"""Writes what training runs logged, as pictures or as a page: curves and samples."""

from pathlib import Path
from typing import Any

from gptmini.errors import CheckpointError
from gptmini.figures import page, plots
from gptmini.files import atomic_write_bytes
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics, select_numbers

RunMetrics = dict[str, list[dict[str, Any]]]  # logged lines by the name of the run


def write_report(paths: list[Path], out: list[Path]) -> None:
    """Write what runs logged: a page to each .html file, a picture to the others."""
    for file in out:
        plots.check_suffix(file, (*plots.PICTURE_SUFFIXES, ".html"))
    logged = {str(path): list(read_metrics(RunDirectory(path).metrics_file)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).load_config()  # raises if this is not a run
        if not select_numbers(lines, "step", "tokens", "seconds"):
            raise CheckpointError(f"{name}: nothing logged yet; train it with gptmini train")
    figure = plots.draw_training(logged, _compares_in_bits(logged))
    for file in out:
        if file.suffix.lower() == ".html":
            atomic_write_bytes(file, build_page(logged, figure))
        else:
            plots.save_figure(figure, file)


def _compares_in_bits(logged: RunMetrics) -> bool:
    """Tell whether losses are compared in bits per byte, as their tokenizers differ."""
    fingerprints = {RunDirectory(Path(name)).load_tokenizer().fingerprint for name in logged}
    return len(fingerprints) > 1


def build_page(logged: RunMetrics, figure: plots.Figure) -> bytes:
    """Build the page of some runs: the figure, and for each run its samples."""
    parts = [page.render_picture(plots.render_svg(figure), "The curves of the runs.")]
    for name, lines in logged.items():
        with_sample = [line for line in lines if isinstance(line.get("sample"), str)]
        newest_first = with_sample[::-1]
        if newest_first:
            samples = [(_describe_evaluation(line), line["sample"]) for line in newest_first]
            parts.append(page.render_samples(samples, f"{name}: samples"))
    return page.render_page(", ".join(logged), "Training curves and samples.", parts)


def _describe_evaluation(line: dict[str, Any]) -> str:
    text = f"step {line['step']:,}"
    for (bits,) in select_numbers([line], "val_bpb"):
        text += f", {bits:.4f} bits per byte"
    return text
