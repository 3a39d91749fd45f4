"""Draw the pictures of docs/tour.md and tour.zh.md: python scripts/draw_tour.py [--out data/tour]

Numbers come from the code of the page: its blocks run first, one chapter after another, and a
picture reads the variables that its chapter leaves. A picture whose words have a translation below
is drawn twice; Chinese needs the font Noto Sans CJK (Debian's package fonts-noto-cjk).
"""

# ruff: noqa: RUF001 - Chinese has punctuation of its own

import argparse
import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from PIL import Image
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.generate.filters import filter_probabilities
from gptmini.model import mechanisms
from gptmini.tokenizer.load import create_tokenizer

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COLORS = 64  # of a picture's palette: a third of the bytes
WORDS = ["Life", "is", "short", "eat", "dessert", "first"]
BLUE, ORANGE, GREY = "#2f6db5", "#d9772b", "#b8bec6"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.dpi": 110,
    "savefig.bbox": "tight",
}


CHINESE = {
    "characters": "字符",
    "bytes": "字节",
    "byte pairs": "字节对",
    "a row of the table for each word": "每个词在表里占一行",
    "unscaled": "未缩放",
    "divided by √K": "除以 √K",
    "64 keys alike": "64 个键平分",
    "numbers in a query, K": "查询的维数 K",
    "bits of entropy": "熵（比特）",
    "causal": "因果",
    "window of 2": "窗口 2",
    "padded on the right": "右侧填充",
    "padded on the left": "左侧填充",
    "strided by 3": "跨步 3",
    "window of 3, 1 global": "窗口 3，全局 1",
    "keys": "键",
    "queries": "查询",
    "weights": "权重",
    "half of them dropped, the others doubled": "约一半置零，其余加倍",
    "one product: (T, H·K)": "一次乘积：(T, H·K)",
    "head 0": "头 0",
    "head 1": "头 1",
    "head 0: (T, K)": "头 0：(T, K)",
    "head 1: (T, K)": "头 1：(T, K)",
    "MHA: 8 heads on 8": "MHA：8 个头用 8 个",
    "GQA: 8 heads on 2": "GQA：8 个头用 2 个",
    "MQA: 8 heads on 1": "MQA：8 个头用 1 个",
    "RoPE, the fastest pair": "RoPE，最快的一对",
    "RoPE, the next pair": "RoPE，下一对",
    "ALiBi, for the last query": "ALiBi，最后一个查询",
    "key": "键",
    "logits": "logits（分数）",
    "temperature 0.5": "温度 0.5",
    "temperature 1": "温度 1",
    "temperature 2": "温度 2",
    "one weight": "一个权重",
    "loss": "损失",
    "a GPT": "一个 GPT",
    "step": "步",
    "guessing": "随机猜",
    "one pass, six\npredictions": "读一遍，\n六个预测",
    "without a cache": "无缓存",
    "with a cache": "有缓存",
    "keys computed": "计算的键",
    "tokens generated": "生成的词元",
    "all at once": "一次全部",
    "tiles of 128 keys": "每块 128 个键",
    "scores held": "保存的分数",
    "positions": "位置数",
    "unchanged": "原样",
    "read": "读的",
    "written": "写的",
    "text": "文本",
    "tokens": "词元",
    "embeddings": "嵌入",
    "attention": "注意力",
    "norm": "归一化",
    "head": "输出层",
    "next token": "下一个词元",
    "append, read again": "接在后面，再读",
    "gradient: every weight a little better": "梯度：每个权重都改好一点",
    "residual stream": "残差流",
    "q k v, softmax, o_proj": "q k v、softmax、o_proj",
    "up, curve, down": "升维、弯曲、降维",
    "3 to 9, 14": "3 至 9, 14",
}


def draw_heatmap(
    axes: Axes,
    values: Tensor,
    rows: list[str],
    columns: list[str],
    digits: int = 2,
    largest: float = 0.0,
) -> None:
    """Draw numbers as colors, and write them into their cells; the darkest is `largest`."""
    largest = max(largest, float(values.abs().max()))
    lowest = -largest if values.min() < 0 else 0.0
    colors = "RdBu_r" if lowest < 0 else "Blues"
    axes.imshow(values, cmap=colors, vmin=lowest, vmax=largest, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for row in range(len(rows)):
        for column in range(len(columns)):
            value = float(values[row, column])
            color = "white" if abs(value) > 0.6 * largest else "black"
            axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", color=color)


Names = dict[str, Any]  # the variables of the page


def draw_box(axes: Axes, x: float, y: float, text: str, color: str, width: float = 1.5) -> None:
    """Draw a box of the height 0.7 with its center at (x, y)."""
    corner = (x - width / 2, y - 0.35)
    axes.add_patch(
        FancyBboxPatch(corner, width, 0.7, "round,pad=0.05", fc=color, ec="none", alpha=0.3)
    )
    axes.text(x, y, text, ha="center", va="center")


def draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], **how: Any
) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "->", "color": "grey", "lw": 1.2} | how
    axes.annotate("", end, start, arrowprops=style)


def draw_path(names: Names) -> Figure:
    """The stations from a text to the next token, each with the chapters that explain it."""
    figure, axes = pyplot.subplots(figsize=(11.5, 3))
    stations = [
        (0.0, "text", "", GREY),
        (2.0, "tokens", "1", ORANGE),
        (4.0, "embeddings", "2, 9", ORANGE),
        (6.3, "attention", "3 to 9, 14", BLUE),
        (8.4, "MLP", "10", BLUE),
        (10.7, "head", "10, 11", ORANGE),
        (12.7, "softmax", "3, 11", ORANGE),
        (14.7, "next token", "11, 15", GREY),
    ]
    for (x, name, chapters, color), following in zip(stations, [*stations[1:], None], strict=True):
        draw_box(axes, x, 0, name, color, 1.45)
        axes.text(x, -0.55, chapters, ha="center", va="center", color="grey", fontsize=8)
        if following is not None:
            draw_arrow(axes, (x + 0.75, 0), (following[0] - 0.75, 0))
    axes.add_patch(Rectangle((5.3, -0.85), 4.1, 1.55, fill=False, ec=BLUE, ls="--"))
    axes.text(9.3, 0.85, "× L", color=BLUE, ha="right")
    bend = {"connectionstyle": "arc3,rad=0.16"}
    draw_arrow(axes, (14.7, 0.45), (0.0, 0.45), **bend)
    axes.text(7.35, 1.95, "append, read again", ha="center", va="center", color="grey")
    draw_arrow(axes, (12.7, -0.75), (4.0, -0.75), color=ORANGE, connectionstyle="arc3,rad=-0.16")
    axes.text(
        8.35,
        -1.68,
        "gradient: every weight a little better",
        ha="center",
        va="center",
        color=ORANGE,
    )
    axes.text(8.35, -2.02, "12, 13", ha="center", va="center", color="grey", fontsize=8)
    axes.set_xlim(-0.9, 15.6)
    axes.set_ylim(-2.2, 2.1)
    axes.axis("off")
    return figure


def draw_tokens(names: Names) -> Figure:
    """A sentence as characters, bytes and byte pairs, one box for each token."""
    text = "the café on the mat"
    learned = ["the cat sat on the mat, the rat sat on the café. " * 20]
    pairs = create_tokenizer("bpe", 290, learned)
    strips = {
        "characters": list(text),
        "bytes": [f"{number}" for number in text.encode()],
        "byte pairs": [pairs.decode([token]) for token in pairs.encode(text).tolist()],
    }
    figure, axes = pyplot.subplots(figsize=(8, 1.8))
    for row, (name, pieces) in enumerate(strips.items()):
        width = 20 / len(pieces)
        axes.text(-1.2, -row, name, ha="right", va="center")
        axes.text(-0.3, -row, f"{len(pieces)}", ha="right", va="center")
        for place, piece in enumerate(pieces):
            color = BLUE if place % 2 else ORANGE
            box = Rectangle(
                (place * width, -row - 0.4), width, 0.8, color=color, alpha=0.25, linewidth=0
            )
            axes.add_patch(box)
            shown = piece.replace(" ", "␣")
            axes.text((place + 0.5) * width, -row, shown, ha="center", va="center", fontsize=8)
    axes.set_xlim(-5, 20)
    axes.set_ylim(-2.6, 0.6)
    axes.axis("off")
    return figure


def draw_embeddings(names: Names) -> Figure:
    figure, axes = pyplot.subplots(figsize=(4, 2.6))
    draw_heatmap(axes, names["x"], WORDS, ["0", "1", "2"])
    axes.set_title("a row of the table for each word")
    return figure


def draw_attention(names: Names) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3))
    draw_heatmap(left, names["weights"], WORDS, WORDS)
    left.set_title("softmax(x xᵀ)")
    weights = mechanisms.attention_weights(names["q"], names["k"])
    draw_heatmap(right, weights, WORDS, WORDS)
    right.set_title("softmax(q kᵀ / √2)")
    for axes in (left, right):
        axes.set_xlabel("keys")
        axes.tick_params(axis="x", rotation=30)
    left.set_ylabel("queries")
    return figure


def draw_scaling(names: Names) -> Figure:
    torch.manual_seed(0)
    sizes = [2**power for power in range(13)]
    bits: dict[str, list[float]] = {"unscaled": [], "divided by √K": []}
    for size in sizes:
        queries, keys = torch.randn(1000, size), torch.randn(64, size)
        raw = (queries @ keys.T).softmax(dim=-1)  # (1000, 64)
        scaled = mechanisms.attention_weights(queries, keys)
        for name, weights in (("unscaled", raw), ("divided by √K", scaled)):
            entropy = -(weights * weights.clamp(min=1e-30).log2()).sum(dim=-1).mean()
            bits[name].append(float(entropy))
    figure, axes = pyplot.subplots(figsize=(5.5, 2.6))
    for (name, values), color in zip(bits.items(), (ORANGE, BLUE), strict=True):
        axes.plot(sizes, values, color=color, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.axhline(6, color=GREY, linewidth=0.8, linestyle="--")
    axes.text(1, 6.05, "64 keys alike", color="grey", va="bottom")
    axes.set_ylim(0, 6.8)
    axes.set_xlabel("numbers in a query, K")
    axes.set_ylabel("bits of entropy")
    axes.legend(frameon=False)
    return figure


def draw_masks(names: Names) -> Figure:
    masks = {
        "causal": mechanisms.causal_mask(5),
        "window of 2": mechanisms.window_mask(5, 2),
        "padded on the right": names["right"][0],
        "padded on the left": names["left"][0],
        "strided by 3": mechanisms.strided_mask(8, 3),
        "window of 3, 1 global": mechanisms.global_mask(8, 3, 1),
    }
    figure, grid = pyplot.subplots(1, 6, figsize=(12, 2.1))
    for axes, (name, mask) in zip(grid, masks.items(), strict=True):
        axes.imshow(mask.int(), cmap="Blues", vmin=0, vmax=1.4)
        for row, cells in enumerate(mask.int().tolist()):
            for column, cell in enumerate(cells):
                color = "white" if cell else "grey"
                size = 8 if len(mask) < 6 else 6
                axes.text(
                    column, row, str(cell), ha="center", va="center", color=color, fontsize=size
                )
        axes.set_title(name)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("keys")
    grid[0].set_ylabel("queries")
    return figure


def draw_dropout(names: Names) -> Figure:
    """The weights of chapter 6, and what its seed leaves of them."""
    torch.manual_seed(123)
    weights = names["weights"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.8))
    positions = [str(position) for position in range(6)]
    draw_heatmap(left, weights, positions, positions)
    left.set_title("weights")
    draw_heatmap(right, mechanisms.drop(weights, 0.5), positions, positions)
    right.set_title("half of them dropped, the others doubled")
    return figure


def draw_heads(names: Names) -> Figure:
    """The queries of chapter 7, and the same numbers cut into heads."""
    wide = names["x"] @ names["wide"][0]  # (T, H·K)
    heads = mechanisms.split_heads(wide, names["H"])  # (H, T, K)
    figure, grid = pyplot.subplots(1, 3, figsize=(9, 2.5), width_ratios=[2, 1, 1])
    rows = [str(position) for position in range(len(wide))]
    draw_heatmap(grid[0], wide, rows, [str(number) for number in range(8)], digits=1)
    grid[0].axvline(3.5, color="black")
    grid[0].set_title("one product: (T, H·K)")
    for head, axes in enumerate(grid[1:]):
        columns = [str(4 * head + number) for number in range(4)]
        draw_heatmap(axes, heads[head], rows, columns, digits=1, largest=float(wide.abs().max()))
        axes.set_title(f"head {head}: (T, K)")
    return figure


def draw_sharing(names: Names) -> Figure:
    figure, grid = pyplot.subplots(1, 3, figsize=(9, 2))
    for axes, G, name in zip(grid, (8, 2, 1), ("MHA", "GQA", "MQA"), strict=True):
        for head in range(8):
            shared = head // (8 // G)
            place = (shared + 0.5) * 8 / G - 0.5
            axes.plot([head, place], [1, 0], color=GREY, linewidth=1)
            axes.scatter([head], [1], s=80, color=BLUE, zorder=2)
            axes.scatter([place], [0], s=110, color=ORANGE, zorder=2, marker="s")
        axes.set_title(f"{name}: 8 heads on {G}")
        axes.set_ylim(-0.5, 1.4)
        axes.axis("off")
    return figure


def draw_positions(names: Names) -> Figure:
    figure, (fast, slow, bias) = pyplot.subplots(1, 3, figsize=(9, 2.8))
    pair = torch.zeros(6, 8)
    pair[:, 0] = 1  # the first of the fastest pair
    pair[:, 1] = 1  # and of the next
    turned = mechanisms.rotate_by_position(pair)  # (6, 8)
    for axes, number, name in ((fast, 0, "fastest"), (slow, 1, "next")):
        for position in range(6):
            x, y = float(turned[position, number]), float(turned[position, number + 4])
            axes.annotate(
                "", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 1.3}
            )
            if number == 0 or position in (0, 5):  # the others lie close together
                axes.text(1.15 * x, 1.15 * y, str(position), ha="center", va="center")
        axes.set_title(f"RoPE, the {name} pair")
        axes.set_xlim(-1.35, 1.35)
        axes.set_ylim(-1.35, 1.35)
        axes.set_aspect("equal")
        axes.axis("off")
    slopes = mechanisms.alibi_bias(2, 16)[:, -1]  # (H, T), of the last query
    for head, color in enumerate((BLUE, ORANGE)):
        bias.plot(range(16), slopes[head], color=color, label=f"head {head}")
    bias.legend(frameon=False, loc="lower right")
    bias.set_title("ALiBi, for the last query")
    bias.set_xlabel("key")
    bias.set_xlim(0, 15)
    return figure


def draw_block(names: Names) -> Figure:
    """The stream from left to right; attention and MLP read it and add to it."""
    figure, axes = pyplot.subplots(figsize=(8, 2.3))
    draw_arrow(axes, (-0.6, 0), (11.6, 0), color=BLUE, lw=5, alpha=0.5)
    axes.text(-0.6, -0.4, "residual stream", color=BLUE, va="center")
    for x, name, inside in (
        (0.8, "attention", "q k v, softmax, o_proj"),
        (6.2, "MLP", "up, curve, down"),
    ):
        draw_arrow(axes, (x, 0.05), (x, 0.85))
        draw_box(axes, x, 1.25, "norm", GREY, 1.2)
        draw_arrow(axes, (x + 0.7, 1.25), (x + 1.25, 1.25))
        draw_box(axes, x + 2.3, 1.25, name, ORANGE, 2)
        axes.text(x + 2.3, 1.85, inside, ha="center", va="center", color="grey", fontsize=8)
        draw_arrow(axes, (x + 3.4, 1.25), (x + 4, 1.25))
        draw_arrow(axes, (x + 4, 1.25), (x + 4, 0.2))
        axes.text(x + 4, 0, "+", ha="center", va="center", fontsize=13, fontweight="bold")
    axes.set_xlim(-0.8, 11.8)
    axes.set_ylim(-0.7, 2.1)
    axes.axis("off")
    return figure


def draw_logits(names: Names) -> Figure:
    """The logits of chapter 11, and what a softmax makes of them."""
    logits = names["logits"]
    words = list(names["vocabulary"])
    figure, grid = pyplot.subplots(1, 4, figsize=(10, 2.2))
    grid[0].bar(words, logits, color=ORANGE)
    grid[0].axhline(0, color="black", linewidth=0.8)
    grid[0].set_title("logits")
    for axes, temperature in zip(grid[1:], (0.5, 1, 2), strict=True):
        bars = axes.bar(words, (logits / temperature).softmax(dim=-1), color=BLUE)
        axes.bar_label(bars, [f"{bar.get_height():.2f}" for bar in bars], fontsize=7)
        axes.set_ylim(0, 0.7)
        axes.set_yticks([])
        axes.set_title(f"temperature {temperature}")
    for axes in grid:
        axes.tick_params(axis="x", rotation=60)
    return figure


def draw_learning(names: Names) -> Figure:
    """The weight of chapter 12 on its way; and its GPT, trained again with every loss kept."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.4))
    places = torch.linspace(0.5, 5.5, 50)
    left.plot(places, (places - 3) ** 2, color=GREY)
    steps = torch.tensor([1.0, 2.0, 2.5, 2.75])
    left.plot(steps, (steps - 3) ** 2, color=BLUE, marker="o", markersize=4)
    left.set_title("one weight")
    left.set_xlabel("w")
    left.set_ylabel("loss")
    losses = [loss for loss in names["losses"] if loss.ndim == 0]
    right.plot([loss.item() for loss in losses], color=BLUE)
    right.axhline(float(torch.tensor(13.0).log()), color=GREY, linestyle="--", linewidth=0.8)
    right.text(200, 2.6, "guessing", ha="right", va="bottom", color="grey")
    right.set_ylim(0, 2.9)
    right.set_title("a GPT")
    right.set_xlabel("step")
    return figure


def draw_training(names: Names) -> Figure:
    letters = list("teacher")
    figure, axes = pyplot.subplots(figsize=(6, 2.6))
    for row in range(len(letters) - 1):
        for place, letter in enumerate(letters[: row + 1]):
            axes.text(place, -row, letter, ha="center", va="center", color=BLUE)
        axes.annotate(
            "",
            (row + 1.55, -row),
            (row + 0.45, -row),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
        axes.text(row + 2, -row, letters[row + 1], ha="center", va="center", color=ORANGE)
    axes.text(8.2, -2.5, "one pass, six\npredictions", ha="left", va="center")
    axes.set_xlim(-0.5, 11)
    axes.set_ylim(-5.6, 0.6)
    axes.axis("off")
    return figure


def draw_cache(names: Names) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.5, 2.7))
    lengths = [2**power for power in range(4, 13)]
    without = [length * (length + 1) / 2 for length in lengths]
    left.plot(lengths, without, color=ORANGE, label="without a cache")
    left.plot(lengths, lengths, color=BLUE, label="with a cache")
    left.set_ylabel("keys computed")
    left.set_xlabel("tokens generated")
    right.plot(lengths, [length**2 for length in lengths], color=ORANGE, label="all at once")
    right.plot(
        lengths,
        [min(length, 128) * length for length in lengths],
        color=BLUE,
        label="tiles of 128 keys",
    )
    right.set_ylabel("scores held")
    right.set_xlabel("positions")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(frameon=False)
    figure.tight_layout()
    return figure


def draw_drawing(names: Names) -> Figure:
    words, logits = names["choices"], names["logits"]
    settings: dict[str, dict[str, Any]] = {
        "unchanged": {},
        "temperature 0.5": {"temperature": 0.5},
        "top-k 2": {"top_k": 2},
        "top-p 0.8": {"top_p": 0.8},
        "min-p 0.2": {"min_p": 0.2},
    }
    figure, grid = pyplot.subplots(1, 5, figsize=(9, 2))
    for axes, (name, changed) in zip(grid, settings.items(), strict=True):
        sample = SampleConfig(**{"temperature": 1.0, "top_k": None, **changed})
        found, weights = filter_probabilities(logits, sample)
        chances = [0.0] * len(words)
        places = list(range(6)) if found is None else found.tolist()
        for place, weight in zip(places, weights, strict=True):
            chances[place] = float(weight / weights.sum())
        axes.bar(words, chances, color=BLUE)
        axes.set_ylim(0, 0.75)
        axes.set_title(name)
        axes.tick_params(axis="x", rotation=60)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    return figure


def draw_cross(names: Names) -> Figure:
    """Where the decoder of chapter 16 looks while it writes."""
    source, digits, places = names["source"], names["digits"], names["places"]
    w_q, w_k, _ = names["reader"]
    with torch.no_grad():
        x = digits[source] + places  # (1, T, D)
        x = x + mechanisms.self_attention(x, *names["encoder"])
        before = torch.cat([torch.full_like(source[:, :1], 10), source.flip(1)[:, :-1]], dim=1)
        y = digits[before] + places
        q, k, v = (y @ weight for weight in names["decoder"])
        mask = mechanisms.causal_mask(source.shape[1])
        y = y + mechanisms.scaled_dot_product_attention(q, k, v, mask)
        weights = mechanisms.attention_weights(y @ w_q, x @ w_k)[0]
    figure, axes = pyplot.subplots(figsize=(4, 2.6))
    draw_heatmap(axes, weights, list("51413"), list("31415"))
    axes.set_xlabel("read")
    axes.set_ylabel("written")
    return figure


PICTURES: dict[str, Callable[[Names], Figure]] = {
    "0-path": draw_path,
    "1-tokens": draw_tokens,
    "2-embeddings": draw_embeddings,
    "3-attention": draw_attention,
    "4-scaling": draw_scaling,
    "5-masks": draw_masks,
    "6-dropout": draw_dropout,
    "7-heads": draw_heads,
    "8-sharing": draw_sharing,
    "9-positions": draw_positions,
    "10-block": draw_block,
    "11-logits": draw_logits,
    "12-learning": draw_learning,
    "13-training": draw_training,
    "14-cache": draw_cache,
    "15-drawing": draw_drawing,
    "16-cross": draw_cross,
}


def run_chapters() -> dict[str, Names]:
    """Run the code of the page; the variables that each chapter leaves, by its number."""
    chapters = re.split(r"^## ", (ROOT / "docs" / "tour.md").read_text(), flags=re.MULTILINE)
    names: Names = {}
    left = {"0": names}
    for chapter in chapters[1:]:
        for code in CODE.findall(chapter):
            # The loop of chapter 12 keeps its last loss only; a picture wants all.
            kept = code.replace(
                "    loss.backward()\n", "    loss.backward(); losses.append(loss)\n"
            )
            names["losses"] = []
            with contextlib.redirect_stdout(io.StringIO()):
                exec(kept, names)  # noqa: S102 - the page's own code
        left[chapter.partition(".")[0]] = dict(names)
    return left


def save(figure: Figure, path: Path) -> None:
    """Write a picture with a palette, which takes a third of the bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, metadata={"Software": None})
    Image.open(drawn).convert("RGB").quantize(COLORS).save(path, optimize=True)


def translate(figure: Figure) -> bool:
    """Put Chinese words into a picture; say whether there were any."""
    found = [text for text in figure.findobj(Text) if text.get_text() in CHINESE]
    for text in found:
        assert isinstance(text, Text)
        text.set_text(CHINESE[text.get_text()])
        text.set_fontfamily(["DejaVu Sans", "Noto Sans CJK SC"])
    return bool(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "tour")
    options = parser.parse_args()
    mpl.use("agg")
    options.out.mkdir(parents=True, exist_ok=True)
    chapters = run_chapters()
    with mpl.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw(chapters[name.partition("-")[0]])
            save(figure, options.out / f"{name}.png")
            if translate(figure):
                save(figure, options.out / f"{name}.zh.png")
            pyplot.close(figure)


if __name__ == "__main__":
    main()
