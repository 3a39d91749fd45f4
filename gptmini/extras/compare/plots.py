"""Draws a comparison with matplotlib: bits per byte against the KV cache, and over training."""

from typing import Any

from gptmini.extras.compare.variants import Variant, build_histories, drop_steep_start
from gptmini.figures.plots import Figure, create_figure, draw_line, hide_borders


def draw_comparison(variants: list[Variant]) -> Figure:
    """Draw bits per byte of each variant against its KV cache, and over the course of training."""
    figure = create_figure(10, 4)
    left, right = figure.subplots(1, 2)
    _draw_quality_against_cache(left, variants)
    _draw_quality_over_time(right, variants)
    hide_borders(left)
    hide_borders(right)
    return figure


def _draw_quality_against_cache(axis: Any, variants: list[Variant]) -> None:
    for number, variant in enumerate(variants):
        color = f"C{number % 10}"
        values = variant.list_figures("bits_per_byte")
        kib = variant.cache_bytes / 1024
        mean = sum(values) / len(values)
        axis.scatter([kib] * len(values), values, s=12, color=color, alpha=0.5)
        axis.scatter(kib, mean, s=160, marker="_", color=color)
        is_left = number % 2 == 1  # names stand left and right in turn, to overlap less
        axis.annotate(
            variant.name,
            (kib, mean),
            xytext=(-9 if is_left else 9, 0),
            textcoords="offset points",
            ha="right" if is_left else "left",
            va="center",
            color=color,
        )
    axis.set_xscale("log", base=2)
    axis.margins(x=0.4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set(xlabel="KV cache at full context (KiB)", ylabel="bits per byte")
    axis.set_title("quality and KV cache (one dot per seed)", fontsize=10)


def _draw_quality_over_time(axis: Any, variants: list[Variant]) -> None:
    x_label, histories = build_histories(variants)
    late_bits: list[float] = []
    for number, (name, curves) in enumerate(histories.items()):
        for place, points in enumerate(curves):
            label = name if place == 0 else None  # one entry of the legend per variant
            color = f"C{number % 10}"
            draw_line(axis, points, ".-", color=color, linewidth=1, markersize=3, label=label)
            late_bits += [bits for _, bits in drop_steep_start(points)]
    axis.set(xlabel=x_label)
    axis.set_title("validation bits per byte while training (one line per seed)", fontsize=10)
    if late_bits:
        highest = max(late_bits)
        axis.set_ylim(top=highest + 0.1 * (highest - min(late_bits)))
    _, labels = axis.get_legend_handles_labels()
    if labels:  # imported runs have no history
        axis.legend(frameon=False)
