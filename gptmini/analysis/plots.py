"""Figures from plain data, drawn with matplotlib (the extra `plot`); loads no model, no torch."""

from pathlib import Path
from typing import Any

import numpy as np

from gptmini.analysis.variants import Variant, build_histories, select_numbers
from gptmini.console import warn
from gptmini.errors import ConfigError, MachineError

Array = np.ndarray[Any, np.dtype[Any]]
Figure = Any  # matplotlib is an extra
MIN_PANEL_INCHES = 2.2  # inches per side, at least
COLOR_MAP = "magma_r"
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")
MAX_NUMBERED_TOKENS = 12  # tokens up to which the weights are written into their cells
MONOSPACE_FONT = "DejaVu Sans Mono"  # comes with matplotlib


def check_suffix(path: Path, kinds: tuple[str, ...] = PICTURE_SUFFIXES) -> None:
    """ConfigError for a picture format that is not supported."""
    if path.suffix.lower() not in kinds:
        raise ConfigError(
            f"--out {path}: unknown format; use a name that ends in {', '.join(kinds)}"
        )


def _create_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """An empty figure; width and height in inches."""
    try:
        import matplotlib  # noqa: PLC0415 - an extra
        import matplotlib.figure  # noqa: PLC0415
    except ImportError:
        raise MachineError("pictures: matplotlib is missing; pip install matplotlib") from None
    matplotlib.use("agg")
    return matplotlib.figure.Figure(figsize=(width, height), layout=layout)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the file name decides the format."""
    check_suffix(path)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def _make_drawable(labels: list[str]) -> tuple[list[str], list[str]]:
    """The labels, and the fonts that together have their characters.

    Characters that no installed font has are escaped, with a warning.
    """
    from matplotlib import font_manager  # noqa: PLC0415 - an extra

    fonts = [MONOSPACE_FONT]
    path = font_manager.findfont(MONOSPACE_FONT)
    missing = set(map(ord, "".join(labels))) - font_manager.get_font(path).get_charmap().keys()
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        if font.name.startswith("Last Resort"):  # draws boxes for everything
            continue
        try:
            glyphs = font_manager.get_font(font.fname).get_charmap().keys()
        except (OSError, RuntimeError):  # removed since it was listed, or of bitmaps only
            continue
        if missing & glyphs:
            fonts.append(font.name)
            missing -= glyphs
    if missing:
        some = "".join(map(chr, sorted(missing)[:10]))
        warn(
            f"no installed font has {some}; the picture shows their code points; install a font "
            f"such as Noto Sans CJK"
        )
    escapes = {code: ascii(chr(code))[1:-1] for code in missing}
    return [label.translate(escapes) for label in labels], fonts


def _hide_borders(axis: Any) -> None:
    """Remove the top and right borders."""
    axis.spines[["top", "right"]].set_visible(False)


def draw_mask(cells: Array, title: str) -> Figure:
    """A mask (T, S): keys across, queries down, visible cells dark."""
    rows, columns = cells.shape
    side = min(0.28, 9 / max(rows, columns))  # inches per cell
    figure = _create_figure(
        max(2.6, columns * side + 0.8), max(1.2, rows * side) + 1.1, "compressed"
    )
    axis = figure.subplots()
    axis.imshow(cells, cmap="Greys", vmin=0, vmax=1.4)
    axis.set_xticks([n - 0.5 for n in range(columns)], minor=True)
    axis.set_yticks([n - 0.5 for n in range(rows)], minor=True)
    axis.grid(which="minor", color="0.85", linewidth=min(1.0, 4 * side))
    axis.tick_params(which="minor", length=0)
    for axes in (axis.xaxis, axis.yaxis):
        axes.get_major_locator().set_params(integer=True)
    axis.set(title=title, xlabel="key", ylabel="query")
    for name, color in (("visible", "0.36"), ("masked", "white")):
        axis.scatter([], [], marker="s", s=60, color=color, edgecolor="0.6", label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_attention(
    weights: Array, labels: list[str], n_kv_head: int, layers: list[int], head: int | None = None
) -> Figure:
    """Weights (L, H, T, T) of some layers and one head or all: keys across, queries down.

    A single layer has one row of panels per KV head, with the query heads that share it; several
    layers have one row each. Cells of weight zero, such as masked ones, are gray. Few tokens leave
    room for the weights in their cells.
    """
    H, T = weights.shape[1], len(labels)
    share = H // n_kv_head
    heads = range(H) if head is None else [head]
    panels = [(layer, h) for layer in layers for h in heads]
    columns = len(heads)
    if len(layers) == 1 and head is None and share > 1:
        columns = share
    rows = len(panels) // columns
    numbered = T <= MAX_NUMBERED_TOKENS
    cell = (0.34 if numbered else 0.28 if len(panels) == 1 else 0.18) * min(1.0, 40 / T)  # inches
    side, size = max(MIN_PANEL_INCHES, cell * T), min(8.0, 60 * cell)
    label_room = max(map(len, labels)) * 0.6 * size / 72  # inches; 0.6 em per letter
    width = columns * (side + 0.1) + label_room + 1.3
    figure = _create_figure(width, rows * (side + 0.3) + label_room + 0.4, "compressed")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    texts, fonts = _make_drawable(labels)
    upright = max(map(len, texts)) <= 2
    for axis, (layer, h) in zip(axes.flat, panels, strict=True):
        cells = np.ma.masked_equal(weights[layer, h], 0)
        image = axis.imshow(cells, cmap=COLOR_MAP, vmin=0, vmax=1)
        axis.set_facecolor("0.93")
        kv_head = f", KV head {h // share}" if share > 1 else ""
        axis.set_title(f"layer {layer}, head {h}{kv_head}", fontsize=8)
        font: dict[str, Any] = {"fontsize": size, "family": fonts}
        axis.set_xticks(range(T), texts, rotation=0 if upright else 90, **font)
        axis.set_yticks(range(T), texts, **font)
        axis.tick_params(length=0)
        if numbered:
            _write_numbers(axis, weights[layer, h])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    bar = {"shrink": 0.6, "fraction": 0.4 / width, "pad": 0.1 / width}
    figure.colorbar(image, ax=axes, label="weight (gray: masked)", **bar)
    return figure


def _write_numbers(axis: Any, weights: Array) -> None:
    """Write weights (T, T) into their cells, to three digits."""
    for (query, key), weight in np.ndenumerate(weights):
        if weight > 0:
            text = f"{weight:.3f}".lstrip("0")[:4]  # .123, or 1.00
            color = "white" if weight > 0.45 else "black"
            axis.text(key, query, text, ha="center", va="center", fontsize=6, color=color)


def draw_training(runs: dict[str, list[dict[str, Any]]], in_bits: bool = False) -> Figure:
    """The metrics of runs against tokens seen: losses, learning rate, speed, gradient norm.

    With `in_bits`, losses are those of validation in bits per byte, which do not depend on the
    tokenizer.
    """
    figure = _create_figure(10, 6.5)
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an extra

    axes = figure.subplots(2, 2, sharex=True)
    panels = {
        "train_loss": (axes[0, 0], f"loss ({'bits per byte' if in_bits else 'nats per token'})"),
        "lr": (axes[0, 1], "learning rate"),
        "tokens_per_second": (axes[1, 0], "tokens per second"),
        "grad_norm": (axes[1, 1], "gradient norm"),
    }
    for number, (name, lines) in enumerate(runs.items()):
        color = f"C{number % 10}"
        for key, (axis, _) in panels.items():
            if in_bits and key == "train_loss":
                continue
            thin = {"color": color, "linewidth": 1, "alpha": 0.7, "label": f"{name}, train"}
            _draw_line(axis, _select_points(lines, key), "-", **thin)
        validation = _select_points(lines, "val_bpb" if in_bits else "val_loss")
        _draw_line(axes[0, 0], validation, ".-", color=color, label=f"{name}, validation")
    for axis, title in panels.values():
        axis.set_title(title, fontsize=10)
        _hide_borders(axis)
    for axis in (axes[0, 1], axes[1, 0]):
        axis.set_ylim(bottom=0)
    for axis in (axes[0, 0], axes[1, 1]):  # these fall steeply at first
        axis.set_yscale("log", subs=[])
        axis.yaxis.get_major_locator().set_params(subs=(1, 1.2, 1.5, 2, 3, 5, 7))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(8))  # losses span less than a decade
    per_step = {
        round(tokens / step)
        for lines in runs.values()
        for step, tokens in select_numbers(lines, "step", "tokens")[-1:]
        if step
    }
    steps = f"; {per_step.pop():,} per step" if len(per_step) == 1 else ""
    for axis in axes[1]:
        axis.locator_params(axis="x", nbins=6)
        axis.set_xlabel(f"tokens seen (millions{steps})")
    names, fonts = _make_drawable(axes[0, 0].get_legend_handles_labels()[1])
    axes[0, 0].legend(names, frameon=False, prop={"size": 8, "family": ["sans-serif", *fonts]})
    return figure


def _select_points(lines: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(Millions of tokens seen, figure) of the lines that have the figure."""
    return [(tokens / 1e6, figure) for tokens, figure in select_numbers(lines, "tokens", key)]


def _draw_line(axis: Any, points: list[tuple[float, float]], form: str, **style: Any) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), form, **style)


def draw_comparison(variants: list[Variant]) -> Figure:
    """Bits per byte of each variant against its KV cache, and over the course of training."""
    figure = _create_figure(10, 4)
    left, right = figure.subplots(1, 2)
    _draw_quality_against_cache(left, variants)
    _draw_quality_over_time(right, variants)
    _hide_borders(left)
    _hide_borders(right)
    return figure


def _draw_quality_against_cache(axis: Any, variants: list[Variant]) -> None:
    for number, variant in enumerate(variants):
        color, on_left = f"C{number % 10}", number % 2 == 1
        values = variant.figures("bits_per_byte")
        point = (variant.cache_bytes / 1024, sum(values) / len(values))
        axis.scatter([point[0]] * len(values), values, s=12, color=color, alpha=0.5)
        axis.scatter(*point, s=160, marker="_", color=color)
        axis.annotate(
            variant.name,
            point,
            xytext=(-9 if on_left else 9, 0),
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            color=color,
        )
    axis.set_xscale("log", base=2)
    axis.margins(x=0.4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set(xlabel="KV cache at full context (KiB)", ylabel="bits per byte")
    axis.set_title("quality and KV cache (one dot per seed)", fontsize=10)


def _draw_quality_over_time(axis: Any, variants: list[Variant]) -> None:
    x, histories = build_histories(variants)
    for number, (name, curves) in enumerate(histories.items()):
        for place, points in enumerate(curves):
            label = None if place else name
            style = {"color": f"C{number % 10}", "linewidth": 1, "markersize": 3, "label": label}
            _draw_line(axis, points, ".-", **style)
    axis.set(xlabel=x)
    axis.set_title("validation bits per byte while training (one line per seed)", fontsize=10)
    # The first quarter is steep and would flatten the rest.
    everything = [points for curves in histories.values() for points in curves]
    if late := [bits for points in everything for _, bits in points[len(points) // 4 :]]:
        axis.set_ylim(top=max(late) + 0.1 * (max(late) - min(late)))
    if axis.get_legend_handles_labels()[1]:  # imported runs have no history
        axis.legend(frameon=False)
