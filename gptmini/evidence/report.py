"""Pictures of runs, and a report in one HTML file: curves, samples over time, attention."""

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptmini.errors import CheckpointError
from gptmini.evidence import attention_view, plots
from gptmini.files import replace
from gptmini.generate.run import Run, load
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import metrics

MAX_TOKENS = 32  # whose attention is shown
MAX_PANELS = 48  # one per head; larger models show their first, middle and last layer

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
table { border-collapse: collapse } th, td { text-align: right; padding: .2rem .8rem }
th:first-child, td:first-child { text-align: left } thead { border-bottom: 1px solid #999 }
img { max-width: 100% } pre { white-space: pre-wrap; background: #f4f4f2; padding: .7rem 1rem }
details { margin: .6rem 0 } .figure { color: #666 }
"""


def write(paths: list[Path], out: list[Path], cache: Path) -> None:
    """Write what runs logged to each file of `out`: a report if it is .html, else a picture."""
    logged = {str(path): list(metrics(RunDirectory(path).metrics)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).config()  # raises if this is not a run
        if not any("val_loss" in line for line in lines):
            raise CheckpointError(
                f"{name}: no evaluation logged yet; train it further with gptmini train"
            )
    for file in out:
        if file.suffix == ".html":
            loaded = {name: load(name, "cpu", "float32", cache) for name in logged}
            replace(file, page({name: (loaded[name], logged[name]) for name in logged}).encode())
        else:
            plots.save(plots.training(logged), file)


def page(runs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> str:
    """The report, from each run's name, model and metrics."""
    curves = plots.training({name: lines for name, (_, lines) in runs.items()})
    sections = "\n".join(_section(name, run, lines) for name, (run, lines) in runs.items())
    title = html.escape(", ".join(runs))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n{_table(runs)}\n"
        f'<img alt="Loss, learning rate, speed and gradient norm against tokens seen" '
        f'src="{plots.as_data(curves, "svg")}">\n{sections}\n</body></html>\n'
    )


def _table(runs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> str:
    rows = []
    for name, (run, lines) in runs.items():
        model, last = run.config.model, lines[-1]
        window = f", window {model.attention.window}" if model.attention.window else ""
        best = min(
            (line for line in lines if "val_loss" in line), key=lambda line: line["val_loss"]
        )
        cells = {
            "run": name,
            "parameters": f"{cost.parameter_count(model):,}",
            "attention": f"{model.attention.variant} {model.n_head}:{model.n_kv_head}{window}",
            "steps": f"{last['step']:,}",
            "tokens": f"{last['tokens']:,}",
            "minutes": f"{last['seconds'] / 60:.1f}",
            "lowest loss": f"{best['val_loss']:.4f}",
            "bits per byte": f"{best['val_bpb']:.4f}",
        }
        rows.append(cells)
    head = _cells("th", rows[0])
    body = "".join(f"<tr>{_cells('td', row.values())}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _section(name: str, run: Run, lines: list[dict[str, Any]]) -> str:
    """The samples of a run, the newest unfolded, and the attention of its best checkpoint."""
    samples = [line for line in reversed(lines) if "sample" in line]
    shown = [
        f"<details{'' if number else ' open'}><summary>step {line['step']:,} "
        f'<span class="figure">{line["val_bpb"]:.4f} bits per byte</span></summary>'
        f"<pre>{html.escape(line['sample'])}</pre></details>"
        for number, line in enumerate(samples)
    ]
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
    return f'<img alt="{alt}" src="{plots.as_data(view.figure(), "png")}">'
