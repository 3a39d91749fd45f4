"""Pictures, drawn with matplotlib (the extra `plot`)."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gptmini.errors import ConfigError, MachineError

PANEL = 2.2  # inches a side
COLOURS = "magma_r"


def _figure(rows: int, columns: int, side: float) -> tuple[Any, Any]:
    """A figure of square panels and their axes, (rows, columns)."""
    try:
        import matplotlib  # noqa: PLC0415 - an extra
        import matplotlib.figure  # noqa: PLC0415
    except ImportError:
        raise MachineError("--out: pictures need matplotlib; pip install 'gptmini[plot]'") from None
    matplotlib.use("agg")
    figure = matplotlib.figure.Figure(
        figsize=(columns * side + 0.8, rows * side + 0.6), layout="constrained"
    )
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)


def _save(figure: Any, path: Path) -> None:
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--out {path}: no kind of picture; end it in .png, .pdf or .svg")
    figure.savefig(path, dpi=100)


def _labels(axis: Any, names: list[str], size: float) -> None:
    font: dict[str, Any] = {"fontsize": size, "family": "monospace"}
    upright = max(map(len, names)) <= 2
    axis.set_xticks(range(len(names)), names, rotation=0 if upright else 90, **font)
    axis.set_yticks(range(len(names)), names, **font)
    axis.tick_params(length=0)


def draw_mask(mask: Tensor, title: str, path: Path) -> None:
    """A mask (T, S): keys across, queries down, visible cells dark."""
    figure, axes = _figure(1, 1, PANEL * 1.5)
    axis = axes[0, 0]
    axis.imshow(mask.numpy(), cmap="Greys", vmin=0, vmax=1.4)
    axis.set_xticks([n - 0.5 for n in range(mask.shape[1])], minor=True)
    axis.set_yticks([n - 0.5 for n in range(mask.shape[0])], minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="minor", length=0)
    axis.set(title=title, xlabel="key", ylabel="query")
    _save(figure, path)


def draw_weights(
    weights: Tensor,
    names: list[str],
    n_kv_head: int,
    layers: list[int],
    head: int | None,
    path: Path,
) -> None:
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
    figure, axes = _figure(len(panels) // columns, columns, max(PANEL, cell * len(names)))
    for axis, (layer, h) in zip(axes.flat, panels, strict=True):
        cells = np.ma.masked_equal(weights[layer, h].numpy(), 0)
        image = axis.imshow(cells, cmap=COLOURS, vmin=0, vmax=1)
        axis.set_facecolor("0.93")
        axis.set_title(f"layer {layer}, head {h}, KV head {h // share}", fontsize=8)
        _labels(axis, names, min(8.0, 60 * cell))
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    _save(figure, path)
