"""Pictures, drawn with matplotlib (the extra `plot`): functions make figures, `save` writes one."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gptmini.errors import ConfigError, MachineError
from gptmini.evidence.measure import Variant

Figure = Any  # matplotlib is an extra
PANEL = 2.2  # inches a side
COLOURS = "magma_r"
KINDS = (".png", ".pdf", ".svg")


def _blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    try:
        import matplotlib  # noqa: PLC0415 - an extra
        import matplotlib.figure  # noqa: PLC0415
    except ImportError:
        raise MachineError("pictures need matplotlib; pip install 'gptmini[plot]'") from None
    matplotlib.use("agg")
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def _panels(rows: int, columns: int, side: float) -> tuple[Figure, Any]:
    """A figure of square panels and their axes, (rows, columns)."""
    figure = _blank(columns * side + 0.8, rows * side + 0.6)
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the kind of picture that the name of the file says."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--out {path}: no kind of picture; end it in {', '.join(KINDS)}")
    figure.savefig(path, dpi=100)


def as_data(figure: Figure, kind: str) -> str:
    """A figure as a data URI, for a page that needs no other file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=100)
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    return f"data:{mime};base64,{base64.b64encode(picture.getvalue()).decode()}"


def _labels(axis: Any, names: list[str], size: float) -> None:
    font: dict[str, Any] = {"fontsize": size, "family": "monospace"}
    upright = max(map(len, names)) <= 2
    axis.set_xticks(range(len(names)), names, rotation=0 if upright else 90, **font)
    axis.set_yticks(range(len(names)), names, **font)
    axis.tick_params(length=0)


def _open(axis: Any) -> None:
    """Leave the sides without a scale open."""
    axis.spines[["top", "right"]].set_visible(False)


def mask(cells: Tensor, title: str) -> Figure:
    """A mask (T, S): keys across, queries down, visible cells dark."""
    figure, axes = _panels(1, 1, PANEL * 1.5)
    axis = axes[0, 0]
    axis.imshow(cells.numpy(), cmap="Greys", vmin=0, vmax=1.4)
    axis.set_xticks([n - 0.5 for n in range(cells.shape[1])], minor=True)
    axis.set_yticks([n - 0.5 for n in range(cells.shape[0])], minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="minor", length=0)
    axis.set(title=title, xlabel="key", ylabel="query")
    return figure


def attention(
    weights: Tensor, names: list[str], n_kv_head: int, layers: list[int], head: int | None = None
) -> Figure:
    """Weights (L, H, T, T) of some layers and one head or all: keys across, queries down.

    One layer shows a row for each KV head with the query heads that share it; several layers show
    a row each, its heads in the same order. Cells without weight, as the masked ones, are grey.
    """
    H = weights.shape[1]
    share = H // n_kv_head
    heads = range(H) if head is None else [head]
    panels = [(layer, h) for layer in layers for h in heads]
    columns = len(heads)
    if len(layers) == 1 and head is None and share > 1:
        columns = share
    alone = len(panels) == 1
    cell = (0.28 if alone else 0.14) * min(1.0, 40 / len(names))  # inches
    figure, axes = _panels(len(panels) // columns, columns, max(PANEL, cell * len(names)))
    for axis, (layer, h) in zip(axes.flat, panels, strict=True):
        cells = np.ma.masked_equal(weights[layer, h].numpy(), 0)
        image = axis.imshow(cells, cmap=COLOURS, vmin=0, vmax=1)
        axis.set_facecolor("0.93")
        axis.set_title(f"layer {layer}, head {h}, KV head {h // share}", fontsize=8)
        _labels(axis, names, min(8.0, 60 * cell))
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    return figure


def training(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """What runs logged, by the tokens they had seen: losses, rate, speed, gradient norm."""
    figure = _blank(10, 6.5)
    axes = figure.subplots(2, 2, sharex=True)
    panels = {
        "train_loss": (axes[0, 0], "loss, nats per token; thin while training"),
        "lr": (axes[0, 1], "learning rate"),
        "tokens_per_second": (axes[1, 0], "tokens per second"),
        "grad_norm": (axes[1, 1], "gradient norm"),
    }
    for number, (name, lines) in enumerate(runs.items()):
        colour = f"C{number % 10}"
        for key, (axis, _) in panels.items():
            _line(axis, _logged(lines, key), "-", color=colour, linewidth=1, alpha=0.7)
        held_out = _logged(lines, "val_loss")
        _line(axes[0, 0], held_out, ".-", color=colour, label=f"{name}, held out")
    for axis, title in panels.values():
        axis.set_title(title, fontsize=10)
        _open(axis)
    for axis in (axes[0, 1], axes[1, 0]):
        axis.set_ylim(bottom=0)
    for axis in (axes[0, 0], axes[1, 1]):  # steep at first
        axis.set_yscale("log", subs=[])
        axis.yaxis.get_major_locator().set_params(subs=(1, 1.2, 1.5, 2, 3, 5))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axis in axes[1]:
        axis.set_xlabel("million tokens seen")
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure


def _logged(lines: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Million tokens seen, and a figure, of the lines that have it."""
    return [(line["tokens"] / 1e6, line[key]) for line in lines if key in line]


def _line(axis: Any, places: list[tuple[float, float]], form: str, **style: Any) -> None:
    if places:
        axis.plot(*zip(*places, strict=True), form, **style)


def comparison(variants: list[Variant]) -> Figure:
    """Quality against the size of the KV cache, and the losses on the way, of each variant."""
    figure = _blank(10, 4)
    cost, way = figure.subplots(1, 2)
    equal = len({run.history[-1][0] for one in variants for run in one.runs if run.history}) == 1
    for number, one in enumerate(variants):
        colour, left = f"C{number % 10}", number % 2 == 1
        values = one.figures("bits_per_byte")
        place = (one.cache_bytes / 1024, sum(values) / len(values))
        cost.scatter([place[0]] * len(values), values, s=12, color=colour, alpha=0.5)
        cost.scatter(*place, s=160, marker="_", color=colour)
        cost.annotate(
            one.name,
            place,
            xytext=(-9 if left else 9, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=colour,
        )
        for run in one.runs:
            places = [
                (seen / 1e6 if equal else took / 60, bits) for seen, took, bits in run.history
            ]
            label = one.name if run is one.runs[0] else None
            _line(way, places, ".-", color=colour, linewidth=1, markersize=3, label=label)
    cost.set_xscale("log", base=2)
    cost.margins(x=0.4)
    cost.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    cost.set(xlabel="KV cache at full context, KiB", ylabel="bits per byte")
    cost.set_title("quality against cache; a dot is a seed", fontsize=10)
    way.set(xlabel="million tokens seen" if equal else "minutes of training")
    way.set_title("held-out loss while training; a line is a seed", fontsize=10)
    # The first quarter is steep and would press the rest together.
    runs = [run.history for one in variants for run in one.runs]
    if late := [bits for history in runs for *_, bits in history[len(history) // 4 :]]:
        way.set_ylim(top=max(late) + 0.1 * (max(late) - min(late)))
    way.legend(frameon=False)
    for axis in (cost, way):
        _open(axis)
    return figure
