"""Pictures of runs, and a report in one HTML file: curves, samples over time, attention."""

import html
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gptmini.console import warn
from gptmini.errors import CheckpointError, MachineError
from gptmini.evidence import attention_view, plots
from gptmini.evidence.variants import numbers
from gptmini.files import replace
from gptmini.generate.run import Run, load
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import metrics

MAX_TOKENS = 24  # whose attention is shown
MAX_PANELS = 48  # one per head; larger models show their first, middle and last layer

COLUMNS = ("step", "tokens", "seconds", "val_loss", "val_bpb")  # of an evaluation

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
table { border-collapse: collapse } th, td { text-align: right; padding: .2rem .8rem }
th:first-child, td:first-child { text-align: left } thead { border-bottom: 1px solid #999 }
img { max-width: 100% } pre { white-space: pre-wrap; background: #f4f4f2; padding: .7rem 1rem }
details { margin: .6rem 0 } .figure { color: #666 }
.zoom { display: block; overflow-x: auto; cursor: zoom-in } .zoom input { display: none }
.zoom :checked + img { max-width: none; cursor: zoom-out }
"""


def write(paths: list[Path], out: list[Path], cache: Path) -> list[Path]:
    """Write what runs logged to files: a report if it is .html, else a picture; returns the files.

    Without matplotlib a report has no pictures, and pictures are left out if there is a report.
    """
    for file in out:
        plots.check(file, (*plots.KINDS, ".html"))
    logged = {str(path): list(metrics(RunDirectory(path).metrics)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).config()  # raises if this is not a run
        if not numbers(lines, *COLUMNS):
            raise CheckpointError(
                f"{name}: no evaluation logged yet; train it further with gptmini train"
            )
    reports = [file for file in out if file.suffix.lower() == ".html"]
    written = []
    for file in out:
        if file in reports:
            loaded = {name: load(name, "cpu", "float32", cache) for name in logged}
            replace(file, page({name: (loaded[name], logged[name]) for name in logged}).encode())
        else:
            try:
                plots.save(_curves(logged), file)
            except MachineError as error:
                if not reports:
                    raise
                warn(f"{file}: not drawn; {error}")
                continue
        written.append(file)
    return written


def _curves(logged: dict[str, list[dict[str, Any]]]) -> plots.Figure:
    """The curves of runs; losses of different tokenizers are compared in bits per byte."""
    tokenizers = {RunDirectory(Path(name)).tokenizer().fingerprint for name in logged}
    return plots.training(logged, in_bits=len(tokenizers) > 1)


def page(runs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> str:
    """The report, from each run's name, model and metrics."""
    sections = "\n".join(_section(name, run, lines) for name, (run, lines) in runs.items())
    title = html.escape(", ".join(runs))
    alt = "Loss, learning rate, speed and gradient norm against tokens seen"
    logged = {name: lines for name, (_, lines) in runs.items()}
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n{_table(runs)}\n"
        f"{_image(lambda: _curves(logged), 'svg', alt)}\n{sections}\n</body></html>\n"
    )


def _image(draw: Callable[[], plots.Figure], kind: str, alt: str) -> str:
    """A figure as an element of the page, or why there is none."""
    try:
        return f'<img alt="{alt}" src="{plots.as_data(draw(), kind)}">'
    except MachineError as error:
        return f'<p class="figure">{html.escape(str(error))}</p>'


def _table(runs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> str:
    rows = []
    tuned = any(run.config.base.run for run, _ in runs.values())
    for name, (run, lines) in runs.items():
        base = run.config.base
        model = run.config.model
        window = f", window {model.attention.window}" if model.attention.window else ""
        step, tokens, seconds = numbers(lines, *COLUMNS[:3])[-1]
        loss, bits = min(numbers(lines, *COLUMNS[3:]))
        cells = {
            "run": name,
            "parameters": f"{cost.parameter_count(model):,}",
            "attention": f"{model.attention.variant} {model.n_head}:{model.n_kv_head}{window}",
            "steps": f"{step:,}",
            "tokens": f"{tokens:,}",
            "minutes": f"{seconds / 60:.1f}",
            "lowest loss": f"{loss:.4f}",
            "bits per byte": f"{bits:.4f}",
        }
        if tuned:
            cells["began from"] = f"{base.run}, step {base.step:,}" if base.run else ""
        rows.append(cells)
    head = _cells("th", rows[0])
    body = "".join(f"<tr>{_cells('td', row.values())}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _section(name: str, run: Run, lines: list[dict[str, Any]]) -> str:
    """The samples of a run, the newest unfolded, and the attention of its best checkpoint."""
    samples = [line for line in reversed(lines) if isinstance(line.get("sample"), str)]
    shown: list[str] = []
    for line in samples:
        bits = "".join(f"{bits:.4f} bits per byte" for (bits,) in numbers([line], "val_bpb"))
        text = html.escape(line["sample"]).replace("\r", "&#13;")  # HTML reads \r as \n
        shown.append(
            f"<details{'' if shown else ' open'}><summary>step {line['step']:,} "
            f'<span class="figure">{bits}</span></summary><pre>{text}</pre></details>'
        )
    text = samples[0]["sample"] if samples else ""
    return (
        f"<h2>{html.escape(name)}</h2>\n<h3>Samples over time</h3>\n"
        + "\n".join(shown)
        + f"\n<h3>Attention at step {run.step:,}</h3>\n{_attention(run, text)}"
    )


def _attention(run: Run, text: str) -> str:
    """A picture of each head reading the beginning of a text."""
    config = run.config.model
    tokens = run.encode(text, "sample")[: min(MAX_TOKENS, config.context_length)]
    some = sorted({0, config.n_layer // 2, config.n_layer - 1})
    layers = some if config.n_layer * config.n_head > MAX_PANELS else None
    view = attention_view.view(run, tokens or [run.tokenizer.document_token], layers)
    alt = f"Attention weights: {len(view.layers)} layers, {config.n_head} heads each"
    image = _image(view.figure, "png", alt)
    zoom = f'<label class="zoom"><input type="checkbox">{image}</label>'
    return f'<p class="figure">Click the picture to enlarge it.</p>\n{zoom}'
