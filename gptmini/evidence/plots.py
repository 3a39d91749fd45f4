"""Figures from plain data, drawn with matplotlib (the extra `plot`); loads no model, no torch."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from gptmini.errors import ConfigError, MachineError
from gptmini.evidence.variants import Variant

Array = np.ndarray[Any, np.dtype[Any]]
Figure = Any  # matplotlib is an extra
PANEL = 2.2  # inches per side
COLOURS = "magma_r"
KINDS = (".png", ".pdf", ".svg")


def _blank(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    try:
        import matplotlib  # noqa: PLC0415 - an extra
        import matplotlib.figure  # noqa: PLC0415
    except ImportError:
        raise MachineError("pictures: matplotlib is missing; pip install 'gptmini[plot]'") from None
    matplotlib.use("agg")
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def _panels(rows: int, columns: int, side: float) -> tuple[Figure, Any]:
    """A figure of square panels and their axes, (rows, columns)."""
    figure = _blank(columns * side + 0.8, rows * side + 0.6)
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the file name decides the format."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(
            f"--out {path}: unknown picture format; use a name that ends in {', '.join(KINDS)}"
        )
    figure.savefig(path, dpi=100)


def as_data(figure: Figure, kind: str) -> str:
    """A figure as a data URI, for a page in a single file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=100)
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    return f"data:{mime};base64,{base64.b64encode(picture.getvalue()).decode()}"


def _labels(axis: Any, labels: list[str], size: float) -> None:
    font: dict[str, Any] = {"fontsize": size, "family": "monospace"}
    upright = max(map(len, labels)) <= 2
    axis.set_xticks(range(len(labels)), labels, rotation=0 if upright else 90, **font)
    axis.set_yticks(range(len(labels)), labels, **font)
    axis.tick_params(length=0)


def _open(axis: Any) -> None:
    """Remove the top and right borders."""
    axis.spines[["top", "right"]].set_visible(False)


def mask(cells: Array, title: str) -> Figure:
    """A mask (T, S): keys across, queries down, visible cells dark."""
    figure, axes = _panels(1, 1, PANEL * 1.5)
    axis = axes[0, 0]
    axis.imshow(cells, cmap="Greys", vmin=0, vmax=1.4)
    axis.set_xticks([n - 0.5 for n in range(cells.shape[1])], minor=True)
    axis.set_yticks([n - 0.5 for n in range(cells.shape[0])], minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="minor", length=0)
    axis.set(title=title, xlabel="key", ylabel="query")
    return figure


def attention(
    weights: Array, labels: list[str], n_kv_head: int, layers: list[int], head: int | None = None
) -> Figure:
    """Weights (L, H, T, T) of some layers and one head or all: keys across, queries down.

    A single layer has one row of panels per KV head, with the query heads that share it; several
    layers have one row each. Cells of weight zero, such as masked ones, are grey.
    """
    H = weights.shape[1]
    share = H // n_kv_head
    heads = range(H) if head is None else [head]
    panels = [(layer, h) for layer in layers for h in heads]
    columns = len(heads)
    if len(layers) == 1 and head is None and share > 1:
        columns = share
    alone = len(panels) == 1
    cell = (0.28 if alone else 0.14) * min(1.0, 40 / len(labels))  # inches
    figure, axes = _panels(len(panels) // columns, columns, max(PANEL, cell * len(labels)))
    for axis, (layer, h) in zip(axes.flat, panels, strict=True):
        cells = np.ma.masked_equal(weights[layer, h], 0)
        image = axis.imshow(cells, cmap=COLOURS, vmin=0, vmax=1)
        axis.set_facecolor("0.93")
        axis.set_title(f"layer {layer}, head {h}, KV head {h // share}", fontsize=8)
        _labels(axis, labels, min(8.0, 60 * cell))
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    return figure


def training(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """The metrics of runs against tokens seen: losses, learning rate, speed, gradient norm."""
    figure = _blank(10, 6.5)
    axes = figure.subplots(2, 2, sharex=True)
    panels = {
        "train_loss": (axes[0, 0], "loss (nats per token)"),
        "lr": (axes[0, 1], "learning rate"),
        "tokens_per_second": (axes[1, 0], "tokens per second"),
        "grad_norm": (axes[1, 1], "gradient norm"),
    }
    for number, (name, lines) in enumerate(runs.items()):
        colour = f"C{number % 10}"
        for key, (axis, _) in panels.items():
            thin = {"color": colour, "linewidth": 1, "alpha": 0.7, "label": f"{name}, train"}
            _line(axis, _logged(lines, key), "-", **thin)
        validation = _logged(lines, "val_loss")
        _line(axes[0, 0], validation, ".-", color=colour, label=f"{name}, validation")
    for axis, title in panels.values():
        axis.set_title(title, fontsize=10)
        _open(axis)
    for axis in (axes[0, 1], axes[1, 0]):
        axis.set_ylim(bottom=0)
    for axis in (axes[0, 0], axes[1, 1]):  # these fall steeply at first
        axis.set_yscale("log", subs=[])
        axis.yaxis.get_major_locator().set_params(subs=(1, 1.2, 1.5, 2, 3, 5))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axis in axes[1]:
        axis.set_xlabel("tokens seen (millions)")
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure


def _logged(lines: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(Millions of tokens seen, figure) of the lines that have the figure."""
    return [(line["tokens"] / 1e6, line[key]) for line in lines if key in line]


def _line(axis: Any, points: list[tuple[float, float]], form: str, **style: Any) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), form, **style)


def comparison(variants: list[Variant]) -> Figure:
    """Bits per byte of each variant against its KV cache, and over the course of training."""
    figure = _blank(10, 4)
    left, right = figure.subplots(1, 2)
    _quality_against_cache(left, variants)
    _quality_over_time(right, variants)
    _open(left)
    _open(right)
    return figure


def _quality_against_cache(axis: Any, variants: list[Variant]) -> None:
    for number, variant in enumerate(variants):
        colour, on_left = f"C{number % 10}", number % 2 == 1
        values = variant.figures("bits_per_byte")
        point = (variant.cache_bytes / 1024, sum(values) / len(values))
        axis.scatter([point[0]] * len(values), values, s=12, color=colour, alpha=0.5)
        axis.scatter(*point, s=160, marker="_", color=colour)
        axis.annotate(
            variant.name,
            point,
            xytext=(-9 if on_left else 9, 0),
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            color=colour,
        )
    axis.set_xscale("log", base=2)
    axis.margins(x=0.4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set(xlabel="KV cache at full context (KiB)", ylabel="bits per byte")
    axis.set_title("quality and KV cache (one dot per seed)", fontsize=10)


def _quality_over_time(axis: Any, variants: list[Variant]) -> None:
    """Against tokens seen if all runs saw the same number, else against minutes."""
    histories = [run.history for variant in variants for run in variant.runs if run.history]
    by_tokens = len({history[-1][0] for history in histories}) == 1
    for number, variant in enumerate(variants):
        for run in variant.runs:
            points = [
                (tokens / 1e6 if by_tokens else seconds / 60, bits)
                for tokens, seconds, bits in run.history
            ]
            label = variant.name if run is variant.runs[0] else None
            style = {"color": f"C{number % 10}", "linewidth": 1, "markersize": 3, "label": label}
            _line(axis, points, ".-", **style)
    axis.set(xlabel="tokens seen (millions)" if by_tokens else "minutes of training")
    axis.set_title("validation bits per byte while training (one line per seed)", fontsize=10)
    # The first quarter is steep and would flatten the rest.
    if late := [bits for history in histories for *_, bits in history[len(history) // 4 :]]:
        axis.set_ylim(top=max(late) + 0.1 * (max(late) - min(late)))
    axis.legend(frameon=False)
