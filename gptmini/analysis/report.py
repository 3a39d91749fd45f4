"""What training runs logged, as pictures or as a page: curves, samples over time, attention."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gptmini.analysis import page, page_data, plots
from gptmini.analysis.variants import select_numbers
from gptmini.console import warn
from gptmini.errors import CheckpointError, MachineError
from gptmini.files import atomic_write_bytes
from gptmini.generate.run import Run, load_run
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics

MAX_SAMPLE_TOKENS = 32  # of a sample, whose attention is shown

EVALUATION_COLUMNS = ("step", "tokens", "seconds", "val_loss", "val_bpb")  # of an evaluation
RunMetrics = dict[str, list[dict[str, Any]]]  # the metrics of runs by their names


def write_report(paths: list[Path], out: list[Path], cache: Path) -> list[Path]:
    """Write what runs logged to files: a page if it is .html, else a picture; returns the files.

    Without matplotlib, pictures are left out if there is a page.
    """
    for file in out:
        plots.check_suffix(file, (*plots.PICTURE_SUFFIXES, ".html"))
    logged = {str(path): list(read_metrics(RunDirectory(path).metrics_file)) for path in paths}
    for name, lines in logged.items():
        RunDirectory(Path(name)).load_config()  # raises if this is not a run
        if not select_numbers(lines, *EVALUATION_COLUMNS):
            raise CheckpointError(
                f"{name}: no evaluation logged yet; train it further with gptmini train"
            )
    pages = [file for file in out if file.suffix.lower() == ".html"]
    written = []
    for file in out:
        if file in pages:
            atomic_write_bytes(file, build_page(logged, cache))
        else:
            try:
                plots.save_figure(plots.draw_training(logged, _compares_in_bits(logged)), file)
            except MachineError as error:
                if not pages:
                    raise
                warn(f"{file}: not drawn; {error}")
                continue
        written.append(file)
    return written


def _compares_in_bits(logged: RunMetrics) -> bool:
    """Whether losses are compared in bits per byte, as their tokenizers differ."""
    return len({RunDirectory(Path(name)).load_tokenizer().fingerprint for name in logged}) > 1


def build_page(logged: RunMetrics, cache: Path) -> bytes:
    """The page of some runs."""
    parts = [_build_table(logged), _build_curves(logged, _compares_in_bits(logged))]
    for name, lines in logged.items():
        samples = [line for line in reversed(lines) if isinstance(line.get("sample"), str)]
        shown = [[_describe_evaluation(line), line["sample"]] for line in samples]
        if shown:
            parts.append({"type": "samples", "heading": f"{name}: samples", "items": shown})
        runs = load_checkpoints(Path(name), cache)
        first = next(runs)
        limit = min(MAX_SAMPLE_TOKENS, first.config.model.context_length)
        tokens = first.encode(samples[0]["sample"] if samples else "", "sample")[:limit]
        tokens = tokens or [first.tokenizer.document_token]
        heading = f"{name}: the heads at each kept checkpoint"
        parts.append(page_data.build_reading(chain([first], runs), tokens, heading))
    lead = "Training curves, samples, and what each attention head looks at."
    return page.render_page(", ".join(logged), lead, parts)


def load_checkpoints(path: Path, cache: Path) -> Iterator[Run]:
    """The intact checkpoints of a run, the oldest first; CheckpointError if there is none."""
    steps, intact = sorted(RunDirectory(path).list_steps()), 0
    for step in steps:
        try:
            yield load_run(path, "cpu", "float32", cache, step)
            intact += 1
        except CheckpointError as error:  # damaged, or deleted by a running training
            warn(f"{error}; left out")
    if not intact:
        yield load_run(path, "cpu", "float32", cache)


def _describe_evaluation(line: dict[str, Any]) -> str:
    bits = "".join(f", {bits:.4f} bits per byte" for (bits,) in select_numbers([line], "val_bpb"))
    return f"step {line['step']:,}{bits}"


def _build_table(logged: RunMetrics) -> page.PageItem:
    rows = []
    configs = {name: RunDirectory(Path(name)).load_config() for name in logged}
    tuned = any(config.base.run for config in configs.values())
    for name, lines in logged.items():
        model, base = configs[name].model, configs[name].base
        window = f", window {model.attention.window}" if model.attention.window else ""
        step, tokens, seconds = select_numbers(lines, *EVALUATION_COLUMNS[:3])[-1]
        loss, bits = min(select_numbers(lines, *EVALUATION_COLUMNS[3:]))
        cells = {
            "run": name,
            "parameters": f"{cost.count_parameters(model):,}",
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
    return page.build_table(list(rows[0]), [list(row.values()) for row in rows])


def _build_curves(logged: RunMetrics, in_bits: bool) -> page.PageItem:
    """The figures that plots.training draws, in the same panels."""

    def lines(key: str, kind: str = "thin") -> Iterator[page.Series]:
        for number, (name, metric) in enumerate(logged.items()):
            what = "validation" if key.startswith("val") else "training"
            points = [
                (tokens / 1e6, figure) for tokens, figure in select_numbers(metric, "tokens", key)
            ]
            yield page.build_series(f"{name}, {what}", points, kind, number)

    x, unit = "million tokens", "bits per byte" if in_bits else "nats per token"
    losses = list(lines("val_bpb" if in_bits else "val_loss", "line"))
    losses += [] if in_bits else lines("train_loss")
    panels = [
        page.build_chart("Loss", x, unit, losses, "y"),
        page.build_chart("Learning rate", x, "of AdamW", list(lines("lr")), zero=True),
        page.build_chart(
            "Speed", x, "tokens per second", list(lines("tokens_per_second")), zero=True
        ),
        page.build_chart("Gradient norm", x, "before clipping", list(lines("grad_norm")), "y"),
    ]
    return page.build_charts(panels, "Curves")
