"""Draws figures from plain data with matplotlib (the extra `plot`); loads no model and no torch."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len

from gptmini.errors import ConfigError, make_missing_package_error
from gptmini.files import check_replaceable, name_in_errors
from gptmini.runs.log import select_numbers

Array = np.ndarray[Any, np.dtype[Any]]
Figure = Any  # matplotlib is an extra
Points = list[tuple[float, float]]
MIN_PANEL_INCHES = 2.2
MAX_FULL_SIZE_TOKENS = 40  # cells shrink beyond that many
COLOR_MAP = "magma_r"
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")
MAX_NUMBERED_TOKENS = 12  # maps and masks of up to this many have numbers in their cells


def check_suffix(path: Path, kinds: tuple[str, ...] = PICTURE_SUFFIXES) -> None:
    """Raise ConfigError for a format that is not supported, and for a file of another program."""
    if path.suffix.lower() not in kinds:
        raise ConfigError(
            f"--out {path}: unknown format; use a name that ends in {', '.join(kinds)}"
        )
    check_replaceable(path, b"atplotlib")


def check_can_draw() -> None:
    """Raise MachineError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise make_missing_package_error("pictures", "matplotlib", "plot")


def create_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """Create an empty figure; width and height are in inches."""
    # A figure is drawn into a file. Jupyter passes on its own backend, which may not be installed
    # here, and then matplotlib cannot even be imported.
    os.environ["MPLBACKEND"] = "agg"
    try:
        import matplotlib  # noqa: PLC0415 - an extra
        import matplotlib.figure  # noqa: PLC0415
    except ImportError:
        raise make_missing_package_error("pictures", "matplotlib", "plot") from None
    matplotlib.rcParams["text.parse_math"] = False  # a name or a token may have dollar signs
    return matplotlib.figure.Figure(figsize=(width, height), layout=layout)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the file name decides the format."""
    check_suffix(path)
    with name_in_errors(path):
        figure.savefig(path, dpi=100, bbox_inches="tight")


def hide_borders(axis: Any) -> None:
    """Remove the top and right borders."""
    axis.spines[["top", "right"]].set_visible(False)


def draw_mask(cells: Array, title: str) -> Figure:
    """Draw a mask (T, S): keys across, queries down, visible dark; small ones with 1 and 0."""
    T, S = cells.shape
    side = min(0.28, 9 / max(T, S))  # inches per cell
    width = max(2.6, S * side + 0.8)
    height = max(1.2, T * side) + 1.1
    figure = create_figure(width, height, "compressed")
    axis = figure.subplots()
    axis.imshow(cells, cmap="Greys", vmin=0, vmax=1.4)
    axis.set_xticks([n - 0.5 for n in range(S)], minor=True)
    axis.set_yticks([n - 0.5 for n in range(T)], minor=True)
    axis.grid(which="minor", color="0.85", linewidth=min(1.0, 4 * side))
    axis.tick_params(which="minor", length=0)
    for axes in (axis.xaxis, axis.yaxis):
        axes.get_major_locator().set_params(integer=True)
    axis.set(title=title, xlabel="key", ylabel="query")
    if max(T, S) <= MAX_NUMBERED_TOKENS:
        for (query, key), cell in np.ndenumerate(cells):
            color = "white" if cell else "0.5"
            axis.text(key, query, f"{cell:d}", ha="center", va="center", fontsize=8, color=color)
    for name, color in (("visible", "0.36"), ("masked", "white")):
        axis.scatter([], [], marker="s", s=60, color=color, edgecolor="0.6", label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_attention(
    weights: Array, labels: list[str], n_kv_head: int, layers: list[int], head: int | None = None
) -> Figure:
    """Draw weights (L, H, T, T) of some layers and one head or all: keys across, queries down.

    A single layer has one row of panels per KV head, with the query heads that share it; several
    layers have one row each. Cells of weight zero, such as masked ones, are gray. Few tokens leave
    room for the weights in their cells.
    """
    H = weights.shape[1]
    T = len(labels)
    heads_per_kv_head = H // n_kv_head
    heads = range(H) if head is None else [head]
    panels = [(layer, h) for layer in layers for h in heads]
    columns = len(heads)
    if len(layers) == 1 and head is None and heads_per_kv_head > 1:
        columns = heads_per_kv_head
    rows = len(panels) // columns

    # Sizes in inches; font sizes in points, of which an inch has 72.
    is_numbered = T <= MAX_NUMBERED_TOKENS
    if is_numbered:
        cell = 0.34
    elif len(panels) == 1:
        cell = 0.28
    else:
        cell = 0.18
    cell *= min(1.0, MAX_FULL_SIZE_TOKENS / T)
    side = max(MIN_PANEL_INCHES, cell * T)
    font_size = min(8.0, 60 * cell)
    longest_label = max(map(cell_len, labels))
    label_room = longest_label * 0.6 * font_size / 72  # a letter is 0.6 em wide
    width = columns * (side + 0.1) + label_room + 1.3
    height = rows * (side + 0.3) + label_room + 0.4
    figure = create_figure(width, height, "compressed")

    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    is_upright = max(map(cell_len, labels)) <= 2
    font: dict[str, Any] = {"fontsize": font_size, "family": "monospace"}
    for axis, (layer, h) in zip(axes.flat, panels, strict=True):
        cells = np.ma.masked_equal(weights[layer, h], 0)
        image = axis.imshow(cells, cmap=COLOR_MAP, vmin=0, vmax=1)
        axis.set_facecolor("0.93")
        kv_head = f", KV head {h // heads_per_kv_head}" if heads_per_kv_head > 1 else ""
        axis.set_title(f"layer {layer}, head {h}{kv_head}", fontsize=8)
        axis.set_xticks(range(T), labels, rotation=0 if is_upright else 90, **font)
        axis.set_yticks(range(T), labels, **font)
        axis.tick_params(length=0)
        if is_numbered:
            _write_numbers(axis, weights[layer, h])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(
        image,
        ax=axes,
        label="weight (gray: masked)",
        shrink=0.6,
        fraction=0.4 / width,
        pad=0.1 / width,
    )
    return figure


def _write_numbers(axis: Any, weights: Array) -> None:
    """Write weights (T, T) into their cells, to three digits."""
    for (query, key), weight in np.ndenumerate(weights):
        if weight > 0:
            text = f"{weight:.3f}".lstrip("0")[:4]  # .123, or 1.00
            color = "white" if weight > 0.45 else "black"
            axis.text(key, query, text, ha="center", va="center", fontsize=6, color=color)


def draw_training(runs: dict[str, list[dict[str, Any]]], in_bits: bool = False) -> Figure:
    """Draw the metrics of runs against tokens seen: losses, learning rate, speed, gradient norm.

    With `in_bits`, losses are those of validation in bits per byte, which do not depend on the
    tokenizer.
    """
    figure = create_figure(10, 6.5)
    (loss_axis, lr_axis), (speed_axis, norm_axis) = figure.subplots(2, 2, sharex=True)
    axes = {
        "train_loss": loss_axis,
        "lr": lr_axis,
        "tokens_per_second": speed_axis,
        "grad_norm": norm_axis,
    }
    for number, (name, lines) in enumerate(runs.items()):
        color = f"C{number % 10}"
        for key, axis in axes.items():
            if in_bits and key == "train_loss":
                continue
            points = _select_points(lines, key)
            label = make_label(f"{name}, train")
            draw_line(axis, points, "-", color=color, linewidth=1, alpha=0.7, label=label)
        validation = _select_points(lines, "val_bpb" if in_bits else "val_loss")
        label = make_label(f"{name}, validation")
        draw_line(loss_axis, validation, ".-", color=color, label=label)

    loss_unit = "bits per byte" if in_bits else "nats per token"
    loss_axis.set_title(f"loss ({loss_unit})", fontsize=10)
    lr_axis.set_title("learning rate", fontsize=10)
    speed_axis.set_title("tokens per second", fontsize=10)
    norm_axis.set_title("gradient norm", fontsize=10)
    for axis in axes.values():
        hide_borders(axis)
    lr_axis.set_ylim(bottom=0)
    speed_axis.set_ylim(bottom=0)
    _scale_by_logarithm(loss_axis)  # these two fall steeply at first
    _scale_by_logarithm(norm_axis)
    speed_axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axis in (speed_axis, norm_axis):
        axis.locator_params(axis="x", nbins=6)
        axis.set_xlabel("tokens seen (millions)")
    loss_axis.legend(frameon=False, fontsize=8)
    return figure


def _scale_by_logarithm(axis: Any) -> None:
    """Make the y axis logarithmic, with numbers that can be read without exponents."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator  # noqa: PLC0415 - an extra

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # Within a decade, even steps leave more ticks than round parts of it.
    locator = MaxNLocator(8) if high < 10 * low else LogLocator(subs=(1, 2, 5))
    axis.yaxis.set_major_locator(locator)
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _select_points(lines: list[dict[str, Any]], key: str) -> Points:
    """Return (millions of tokens seen, figure) of the lines that have the figure."""
    return [(tokens / 1e6, figure) for tokens, figure in select_numbers(lines, "tokens", key)]


def make_label(name: str) -> str:
    """Make a label that a legend shows; matplotlib hides those that begin with an underscore."""
    return f" {name}" if name.startswith("_") else name


def draw_line(axis: Any, points: Points, form: str, **style: Any) -> None:
    if points:
        axis.plot([x for x, _ in points], [y for _, y in points], form, **style)
