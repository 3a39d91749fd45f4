"""Draw the pictures of docs/tour.md: python scripts/draw_tour.py [--out data/tour]"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.generate.filters import filter_probabilities
from gptmini.model import mechanisms
from gptmini.tokenizer.load import create_tokenizer

ROOT = Path(__file__).parents[1]
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


def embed_words() -> Tensor:
    """The embeddings of the six words that chapters 2 and 3 compute: (6, 3)."""
    torch.manual_seed(123)
    embed = torch.nn.Embedding(50_000, 3)
    return embed(torch.tensor([0, 4, 5, 2, 1, 3])).detach()


def draw_heatmap(
    axes: Axes, values: Tensor, rows: list[str], columns: list[str], digits: int = 2
) -> None:
    """Draw numbers as colors, and write them into their cells."""
    largest = float(values.abs().max())
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


def draw_tokens() -> Figure:
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
        axes.text(-0.3, -row, f"{len(pieces)} {name}", ha="right", va="center")
        for place, piece in enumerate(pieces):
            color = BLUE if place % 2 else ORANGE
            box = Rectangle(
                (place * width, -row - 0.4), width, 0.8, color=color, alpha=0.25, linewidth=0
            )
            axes.add_patch(box)
            shown = piece.replace(" ", "␣")
            axes.text((place + 0.5) * width, -row, shown, ha="center", va="center", fontsize=8)
    axes.set_xlim(-4.5, 20)
    axes.set_ylim(-2.6, 0.6)
    axes.axis("off")
    return figure


def draw_embeddings() -> Figure:
    figure, axes = pyplot.subplots(figsize=(4, 2.6))
    draw_heatmap(axes, embed_words(), WORDS, ["1", "2", "3"])
    axes.set_title("a row of the table for each word")
    return figure


def draw_attention() -> Figure:
    x = embed_words()
    torch.manual_seed(123)
    w_q, w_k = torch.rand(3, 2), torch.rand(3, 2)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3))
    draw_heatmap(left, (x @ x.T).softmax(dim=-1), WORDS, WORDS)
    left.set_title("by similarity alone")
    draw_heatmap(right, mechanisms.attention_weights(x @ w_q, x @ w_k), WORDS, WORDS)
    right.set_title("by queries and keys")
    for axes in (left, right):
        axes.set_xlabel("looked at")
        axes.tick_params(axis="x", rotation=30)
    left.set_ylabel("looking")
    return figure


def draw_scaling() -> Figure:
    torch.manual_seed(0)
    sizes = [2**power for power in range(13)]
    bits: dict[str, list[float]] = {"unscaled": [], "divided by √K": []}
    for size in sizes:
        queries, keys = torch.randn(400, size), torch.randn(64, size)
        raw = (queries @ keys.T).softmax(dim=-1)  # (400, 64)
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


def draw_masks() -> Figure:
    length = torch.tensor([5])
    masks = {
        "causal": mechanisms.causal_mask(8),
        "window of 3": mechanisms.window_mask(8, 3),
        "padded on the right": mechanisms.causal_padding_mask(length, 8)[0],
        "padded on the left": mechanisms.causal_padding_mask(length, 8, "left")[0],
    }
    figure, grid = pyplot.subplots(1, 4, figsize=(9, 2.4))
    for axes, (name, mask) in zip(grid, masks.items(), strict=True):
        axes.pcolormesh(mask.flip(0).int(), cmap="Blues", vmin=0, vmax=1.4, edgecolors="white")
        axes.set_aspect("equal")
        axes.set_title(name)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("keys")
        for side in axes.spines.values():
            side.set_visible(False)
    grid[0].set_ylabel("queries")
    return figure


def draw_dropout() -> Figure:
    torch.manual_seed(1)
    q, k = torch.randn(2, 6, 8)
    weights = mechanisms.attention_weights(q, k, mechanisms.causal_mask(6))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.8))
    names = [str(place) for place in range(1, 7)]
    draw_heatmap(left, weights, names, names)
    left.set_title("weights")
    draw_heatmap(right, mechanisms.drop(weights, 0.5), names, names)
    right.set_title("half of them dropped, the others doubled")
    return figure


def draw_heads() -> Figure:
    """A wide row of numbers for each position, cut into heads."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.4), width_ratios=[1, 1.3])
    T, H, K = 5, 3, 4
    colors = [BLUE, ORANGE, "#4c9a6a"]

    def draw_block(axes: Axes, x: float, y: float, color: str) -> None:
        for row in range(T):
            for column in range(K):
                box = Rectangle(
                    (x + column, y + row), 0.92, 0.92, color=color, alpha=0.55, linewidth=0
                )
                axes.add_patch(box)

    for head in range(H):
        draw_block(left, head * K, 0, colors[head])
        draw_block(right, head * (K + 1.5), 0, colors[head])
        right.text(head * (K + 1.5) + K / 2, T + 0.4, f"head {head + 1}", ha="center")
    left.text(H * K / 2, T + 0.4, "one product: (T, H·K)", ha="center")
    right.text(H * (K + 1.5) / 2, -1.2, "cut into heads: (H, T, K)", ha="center")
    for axes in (left, right):
        axes.set_xlim(-0.5, H * (K + 1.5))
        axes.set_ylim(-1.6, T + 1.4)
        axes.set_aspect("equal")
        axes.axis("off")
    return figure


def draw_sharing() -> Figure:
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


def draw_positions() -> Figure:
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
        bias.plot(range(16), slopes[head], color=color, label=f"head {head + 1}")
    bias.legend(frameon=False, loc="lower right")
    bias.set_title("ALiBi, for the last query")
    bias.set_xlabel("key")
    bias.set_xlim(0, 15)
    return figure


def draw_training() -> Figure:
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


def draw_cache() -> Figure:
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


def draw_drawing() -> Figure:
    words = ["the", "a", "my", "his", "no", "xylem"]
    logits = torch.tensor([3.0, 2.5, 1.5, 1.0, 0.0, -3.0])
    settings: dict[str, dict[str, Any]] = {
        "as they are": {},
        "temperature 0.5": {"temperature": 0.5},
        "top-k 2": {"top_k": 2},
        "top-p 0.8": {"top_p": 0.8},
        "min-p 0.2": {"min_p": 0.2},
    }
    ratios = [1, 1, 1, 1, 1, 1.6]
    figure, grid = pyplot.subplots(1, 6, figsize=(11, 2.3), width_ratios=ratios)
    for axes, (name, changed) in zip(grid[:5], settings.items(), strict=True):
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
    draw_heatmap(
        grid[5], learn_to_reverse(), ["5", "1", "4", "1", "3"], ["3", "1", "4", "1", "5"], digits=1
    )
    grid[5].set_title("cross attention: 31415 backwards")
    figure.tight_layout()
    return figure


def learn_to_reverse() -> Tensor:
    """Train the encoder-decoder of chapter 12; where it looks while it writes (5, 5)."""
    torch.manual_seed(0)
    D, DIGITS, LENGTH = 32, 10, 5

    def create(*shape: int) -> Tensor:
        return torch.nn.Parameter(torch.randn(*shape) / math.sqrt(shape[0]))

    digits, places, head = create(DIGITS + 1, D), create(LENGTH, D), create(D, DIGITS)
    encoder, decoder, reader = ([create(D, D) for _ in range(3)] for _ in range(3))

    def read(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder offers and the decoder has before it reads, (B, T, D) each."""
        x = digits[source] + places
        before = torch.cat([torch.full_like(target[:, :1], DIGITS), target[:, :-1]], dim=1)
        y = digits[before] + places
        q, k, v = (y @ weight for weight in decoder)
        mask = mechanisms.causal_mask(LENGTH)
        y = y + mechanisms.scaled_dot_product_attention(q, k, v, mask)
        w_q, w_k, w_v = encoder
        return x + mechanisms.self_attention(x, w_q, w_k, w_v), y

    parameters = [digits, places, head, *encoder, *decoder, *reader]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    w_q, w_k, w_v = reader
    for _ in range(300):
        source = torch.randint(DIGITS, (64, LENGTH))
        target = source.flip(1)
        x, y = read(source, target)
        logits = (y + mechanisms.cross_attention(y, x, (w_q, w_k, w_v))) @ head
        loss = torch.nn.functional.cross_entropy(logits.mT, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        x, y = read(source, source.flip(1))
        return mechanisms.attention_weights(y @ w_q, x @ w_k)[0]


PICTURES: dict[str, Callable[[], Figure]] = {
    "1-tokens": draw_tokens,
    "2-embeddings": draw_embeddings,
    "3-attention": draw_attention,
    "4-scaling": draw_scaling,
    "5-masks": draw_masks,
    "6-dropout": draw_dropout,
    "7-heads": draw_heads,
    "8-sharing": draw_sharing,
    "9-positions": draw_positions,
    "10-training": draw_training,
    "11-cache": draw_cache,
    "12-drawing": draw_drawing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "tour")
    options = parser.parse_args()
    mpl.use("agg")
    options.out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(options.out / f"{name}.png", metadata={"Software": None})
            pyplot.close(figure)


if __name__ == "__main__":
    main()
