"""What training runs logged, as pictures or as a page: curves, samples over time, attention."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gptmini.analysis import page, page_data, plots
from gptmini.analysis.variants import numbers
from gptmini.console import warn
from gptmini.errors import CheckpointError, MachineError
from gptmini.files import replace
from gptmini.generate.run import Run, load
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import metrics

MAX_TOKENS = 32  # of a sample, whose attention is shown

COLUMNS = ("step", "tokens", "seconds", "val_loss", "val_bpb")  # of an evaluation
Logged = dict[str, list[dict[str, Any]]]  # the metrics of runs by their names


def write(paths: list[Path], out: list[Path], cache: Path) -> list[Path]:
    """Write what runs logged to files: a page if it is .html, else a picture; returns the files.

    Without matplotlib, pictures are left out if there is a page.
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
    pages = [file for file in out if file.suffix.lower() == ".html"]
    written = []
    for file in out:
        if file in pages:
            replace(file, html(logged, cache))
        else:
            try:
                plots.save(plots.training(logged, _in_bits(logged)), file)
            except MachineError as error:
                if not pages:
                    raise
                warn(f"{file}: not drawn; {error}")
                continue
        written.append(file)
    return written


def _in_bits(logged: Logged) -> bool:
    """Whether losses are compared in bits per byte, as their tokenizers differ."""
    return len({RunDirectory(Path(name)).tokenizer().fingerprint for name in logged}) > 1


def html(logged: Logged, cache: Path) -> bytes:
    """The page of some runs."""
    parts = [_table(logged), _curves(logged, _in_bits(logged))]
    for name, lines in logged.items():
        samples = [line for line in reversed(lines) if isinstance(line.get("sample"), str)]
        shown = [[_summary(line), line["sample"]] for line in samples]
        if shown:
            parts.append({"type": "samples", "heading": f"{name}: samples", "items": shown})
        runs = checkpoints(Path(name), cache)
        first = next(runs)
        limit = min(MAX_TOKENS, first.config.model.context_length)
        tokens = first.encode(samples[0]["sample"] if samples else "", "sample")[:limit]
        tokens = tokens or [first.tokenizer.document_token]
        heading = f"{name}: the heads at each kept checkpoint"
        parts.append(page_data.part(chain([first], runs), tokens, heading))
    lead = "Training curves, samples, and what each attention head looks at."
    return page.render(", ".join(logged), lead, parts)


def checkpoints(path: Path, cache: Path) -> Iterator[Run]:
    """The intact checkpoints of a run, the oldest first; CheckpointError if there is none."""
    steps, intact = sorted(RunDirectory(path).steps()), 0
    for step in steps:
        try:
            yield load(path, "cpu", "float32", cache, step)
            intact += 1
        except CheckpointError as error:  # damaged, or deleted by a running training
            warn(f"{error}; left out")
    if not intact:
        yield load(path, "cpu", "float32", cache)


def _summary(line: dict[str, Any]) -> str:
    bits = "".join(f", {bits:.4f} bits per byte" for (bits,) in numbers([line], "val_bpb"))
    return f"step {line['step']:,}{bits}"


def _table(logged: Logged) -> page.Part:
    rows = []
    configs = {name: RunDirectory(Path(name)).config() for name in logged}
    tuned = any(config.base.run for config in configs.values())
    for name, lines in logged.items():
        model, base = configs[name].model, configs[name].base
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
    return page.table(list(rows[0]), [list(row.values()) for row in rows])


def _curves(logged: Logged, in_bits: bool) -> page.Part:
    """The figures that plots.training draws, in the same panels."""

    def lines(key: str, kind: str = "thin") -> Iterator[page.Series]:
        for number, (name, metric) in enumerate(logged.items()):
            what = "validation" if key.startswith("val") else "training"
            points = [(tokens / 1e6, figure) for tokens, figure in numbers(metric, "tokens", key)]
            yield page.series(f"{name}, {what}", points, kind, number)

    x, unit = "million tokens", "bits per byte" if in_bits else "nats per token"
    losses = list(lines("val_bpb" if in_bits else "val_loss", "line"))
    losses += [] if in_bits else lines("train_loss")
    panels = [
        page.chart("Loss", x, unit, losses, "y"),
        page.chart("Learning rate", x, "of AdamW", list(lines("lr")), zero=True),
        page.chart("Speed", x, "tokens per second", list(lines("tokens_per_second")), zero=True),
        page.chart("Gradient norm", x, "before clipping", list(lines("grad_norm")), "y"),
    ]
    return page.charts(panels, "Curves")
