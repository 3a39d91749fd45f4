"""Writes what training runs logged, as pictures or as a page: curves and samples."""

from pathlib import Path
from typing import Any

from gptmini.console import warn
from gptmini.errors import CheckpointError, MachineError
from gptmini.figures import page, plots
from gptmini.files import atomic_write_bytes
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics, select_numbers

PROGRESS_COLUMNS = ("step", "tokens", "seconds")
RunMetrics = dict[str, list[dict[str, Any]]]  # logged lines by the name of the run


def write_report(paths: list[Path], out: list[Path]) -> list[Path]:
    """Write what runs logged: a page to each .html file, a picture to the others.

    Returns the files. Without matplotlib, pictures are left out if there is a page.
    """
    for file in out:
        plots.check_suffix(file, (*plots.PICTURE_SUFFIXES, ".html"))
    logged = {str(path): list(read_metrics(RunDirectory(path).metrics_file)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).load_config()  # raises if this is not a run
        if not select_numbers(lines, *PROGRESS_COLUMNS):
            raise CheckpointError(f"{name}: nothing logged yet; train it with gptmini train")
    has_page = any(_is_page(file) for file in out)
    written = []
    for file in out:
        if _is_page(file):
            atomic_write_bytes(file, build_page(logged))
            written.append(file)
            continue
        try:
            plots.save_figure(plots.draw_training(logged, _compares_in_bits(logged)), file)
            written.append(file)
        except MachineError as error:
            if not has_page:
                raise
            warn(f"{file}: not drawn; {error}")
    return written


def _is_page(file: Path) -> bool:
    return file.suffix.lower() == ".html"


def _compares_in_bits(logged: RunMetrics) -> bool:
    """Tell whether losses are compared in bits per byte, as their tokenizers differ."""
    fingerprints = {RunDirectory(Path(name)).load_tokenizer().fingerprint for name in logged}
    return len(fingerprints) > 1


def build_page(logged: RunMetrics) -> bytes:
    """Build the page of some runs: a table, curves, and for each run its samples."""
    parts = [_build_table(logged), _build_curves(logged, _compares_in_bits(logged))]
    for name, lines in logged.items():
        with_sample = [line for line in lines if isinstance(line.get("sample"), str)]
        newest_first = with_sample[::-1]
        if newest_first:
            items = [[_describe_evaluation(line), line["sample"]] for line in newest_first]
            parts.append({"type": "samples", "heading": f"{name}: samples", "items": items})
    return page.render_page(", ".join(logged), "Training curves and samples.", parts)


def _describe_evaluation(line: dict[str, Any]) -> str:
    text = f"step {line['step']:,}"
    for (bits,) in select_numbers([line], "val_bpb"):
        text += f", {bits:.4f} bits per byte"
    return text


def _build_table(logged: RunMetrics) -> page.PageItem:
    """Build the table of the runs: shape, length of training, best losses."""
    configs = {name: RunDirectory(Path(name)).load_config() for name in logged}
    any_finetuned = any(config.base.run for config in configs.values())
    rows = []
    for name, lines in logged.items():
        model = configs[name].model
        base = configs[name].base
        attention = f"{model.attention.variant} {model.n_head}:{model.n_kv_head}"
        if model.attention.window:
            attention += f", window {model.attention.window}"
        step, tokens, seconds = select_numbers(lines, *PROGRESS_COLUMNS)[-1]
        losses = select_numbers(lines, "val_loss", "val_bpb")
        loss, bits = min(losses, default=(None, None))
        cells = {
            "run": name,
            "parameters": f"{cost.count_parameters(model):,}",
            "attention": attention,
            "steps": f"{step:,}",
            "tokens": f"{tokens:,}",
            "minutes": f"{seconds / 60:.1f}",
            "lowest loss": "not evaluated yet" if loss is None else f"{loss:.4f}",
            "bits per byte": "" if bits is None else f"{bits:.4f}",
        }
        if any_finetuned:
            cells["began from"] = f"{base.run}, step {base.step:,}" if base.run else ""
        rows.append(cells)
    headings = list(rows[0])
    return page.build_table(headings, [list(cells.values()) for cells in rows])


def _build_curves(logged: RunMetrics, in_bits: bool) -> page.PageItem:
    """Build the charts that plots.draw_training draws."""
    x_label = "million tokens"
    if in_bits:
        losses = _build_series(logged, "val_bpb", "validation", "line")
        loss_unit = "bits per byte"
    else:
        losses = _build_series(logged, "val_loss", "validation", "line")
        losses += _build_series(logged, "train_loss")
        loss_unit = "nats per token"
    learning_rates = _build_series(logged, "lr")
    speeds = _build_series(logged, "tokens_per_second")
    norms = _build_series(logged, "grad_norm")
    charts = [
        page.build_chart("Loss", x_label, loss_unit, losses, "y"),
        page.build_chart("Learning rate", x_label, "of AdamW", learning_rates, zero=True),
        page.build_chart("Speed", x_label, "tokens per second", speeds, zero=True),
        page.build_chart("Gradient norm", x_label, "before clipping", norms, "y"),
    ]
    return page.build_charts(charts, "Curves")


def _build_series(
    logged: RunMetrics, key: str, phase: str = "training", kind: str = "thin"
) -> list[page.Series]:
    """Build a line per run: one figure of its metrics against millions of tokens."""
    series = []
    for color, (name, lines) in enumerate(logged.items()):
        points = [(tokens / 1e6, figure) for tokens, figure in select_numbers(lines, "tokens", key)]
        series.append(page.build_series(f"{name}, {phase}", points, kind, color))
    return series
