"""Writes what training runs logged, as pictures or as a page: curves and samples."""

from pathlib import Path
from typing import Any

from gptmini.errors import CheckpointError
from gptmini.figures import page, plots
from gptmini.files import atomic_write_bytes
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics, select_numbers

PROGRESS_COLUMNS = ("step", "tokens", "seconds")
RunMetrics = dict[str, list[dict[str, Any]]]  # logged lines by the name of the run


def write_report(paths: list[Path], out: list[Path]) -> None:
    """Write what runs logged: a page to each .html file, a picture to the others."""
    for file in out:
        plots.check_suffix(file, (*plots.PICTURE_SUFFIXES, ".html"))
    logged = {str(path): list(read_metrics(RunDirectory(path).metrics_file)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).load_config()  # raises if this is not a run
        if not select_numbers(lines, *PROGRESS_COLUMNS):
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
    """Build the page of some runs: a table, the figure, and for each run its samples."""
    picture = page.render_picture(plots.render_svg(figure), "The curves of the runs.")
    parts = [_render_table(logged), picture]
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


def _render_table(logged: RunMetrics) -> str:
    """Render the table of the runs: shape, length of training, best losses."""
    configs = {name: RunDirectory(Path(name)).load_config() for name in logged}
    any_finetuned = any(config.base.run for config in configs.values())
    rows = []
    for name, lines in logged.items():
        model = configs[name].model
        is_own = RunDirectory(Path(name)).read_newest_state().get("own_model")
        base = configs[name].base
        attention = f"{model.attention.variant} {model.n_head}:{model.n_kv_head}"
        if model.attention.window:
            attention += f", window {model.attention.window}"
        step, tokens, seconds = select_numbers(lines, *PROGRESS_COLUMNS)[-1]
        losses = select_numbers(lines, "val_loss", "val_bpb")
        loss, bits = min(losses, default=(None, None))
        cells = {
            "run": name,
            "parameters": "own model" if is_own else f"{cost.count_parameters(model):,}",
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
    return page.render_table(headings, [list(cells.values()) for cells in rows])
