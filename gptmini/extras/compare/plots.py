"""Draws a comparison: bits per byte against the KV cache, over training, and the differences."""

from statistics import mean
from typing import Any

from rich.cells import cell_len

from gptmini.doors import load_plots
from gptmini.extras.compare.variants import Variant, build_histories, compare_with_first


def draw_comparison(variants: list[Variant]) -> Any:
    """Draw how good each variant is: by its KV cache, while training, and beside the first.

    Returns matplotlib's figure; MachineError where nothing can draw.
    """
    plots = load_plots()
    layout = [["cache", "time"]]
    heights = [4.0]  # inches
    if len(variants) > 1:
        layout.append(["beside", "beside"])
        heights.append(1.0 + 0.3 * len(variants))
    figure = plots.create_figure(10, sum(heights))
    panels = figure.subplot_mosaic(layout, height_ratios=heights)
    _draw_quality_against_cache(panels["cache"], variants)
    _draw_quality_over_time(panels["time"], variants)
    if len(variants) > 1:
        _draw_differences(panels["beside"], variants)
    for axis in panels.values():
        plots.hide_borders(axis)
    columns = max(1, 100 // (8 + max(cell_len(variant.name) for variant in variants)))
    figure.legend(loc="outside upper left", ncols=columns, frameon=False)
    return figure


def _draw_quality_against_cache(axis: Any, variants: list[Variant]) -> None:
    make_label = load_plots().make_label
    for number, variant in enumerate(variants):
        label = make_label(variant.name)
        color = f"C{number % 10}"
        values = variant.list_figures("bits_per_byte")
        kib = variant.cache_bytes / 1024
        axis.scatter([kib] * len(values), values, s=12, color=color, alpha=0.5)
        axis.scatter(kib, mean(values), s=160, marker="_", color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({variant.cache_bytes / 1024 for variant in variants}))
    axis.margins(x=0.2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set(xlabel="KV cache at full context (KiB)", ylabel="bits per byte")
    axis.set_title("quality and KV cache (one dot per seed)", fontsize=10)


def _draw_quality_over_time(axis: Any, variants: list[Variant]) -> None:
    draw_line = load_plots().draw_line
    x_label, histories = build_histories(variants)
    late_bits: list[float] = []
    for number, curves in enumerate(histories.values()):
        for points in curves:
            draw_line(axis, points, ".-", color=f"C{number % 10}", linewidth=1, markersize=3)
            # The first quarter is steep and would flatten the rest.
            late_bits += [bits for _, bits in points[len(points) // 4 :]]
    axis.set(xlabel=x_label)
    axis.set_title("validation bits per byte while training (one line per seed)", fontsize=10)
    if late_bits:  # imported runs have no history
        highest = max(late_bits)
        axis.set_ylim(top=highest + 0.1 * (highest - min(late_bits)))


def _draw_differences(axis: Any, variants: list[Variant]) -> None:
    """Draw how far each variant is from the first, with its interval where that is known."""
    first, *others = variants
    axis.axvline(0, color="0.6", linewidth=1)
    for place, found in enumerate(compare_with_first(variants)):
        color = f"C{(place + 1) % 10}"
        axis.errorbar(
            found.difference, place, xerr=found.half_width, fmt="o", color=color, capsize=4
        )
    axis.set_yticks(range(len(others)), [variant.name for variant in others])
    axis.set_ylim(len(others) - 0.5, -0.5)
    axis.set(xlabel="bits per byte; less is better, a bar across 0 is unresolved")
    axis.set_title(f"difference from {first.name}, with its 95 % interval", fontsize=10)
