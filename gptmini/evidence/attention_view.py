"""The attention weights of a model, computed from outside without touching it.

Letters: L layers, H query heads, T positions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmini import console
from gptmini.errors import ConfigError
from gptmini.evidence import plots
from gptmini.generate.run import Run
from gptmini.model import mechanisms
from gptmini.model.attention import Attention, visible
from gptmini.model.gpt import GPT
from gptmini.text.tokenizer import Tokenizer

MORE = "for the weights of one head: --layer N --head N; as a page: --out FILE.html"


@dataclass(frozen=True)
class View:
    """The attention weights (L, H, T, T) of a model on a prompt, and which heads are shown."""

    weights: Tensor
    labels: list[str]
    n_kv_head: int
    layers: list[int]
    head: int | None

    def text(self) -> str:
        """A table of the heads that are shown, its legend and the tokens; a head's own weights."""
        T = len(self.labels)
        if T == 1:
            return f"1 token: {self.labels[0]}; it sees only itself, so there is nothing to compare"
        parts = [
            self.table(),
            "previous, first, itself: mean weight on that token, from the second query on;\n"
            "entropy: how widely a query spreads its weights, in nats",
        ]
        if len(self.layers) > 1 or self.head is None:
            parts.append(f"{T} tokens: {' '.join(self.labels)}\n{MORE}")
        else:
            parts.append(self._weights(self.weights[self.layers[0], self.head]))
        return "\n\n".join(parts)

    def _weights(self, weights: Tensor) -> str:
        """One head (T, T) as a matrix or, if it is large, the strongest keys of each query."""
        if len(self.labels) <= plots.MAX_NUMBERED:
            rows = [["query", *self.labels]]
            for n, label in enumerate(self.labels):
                seen = [f"{weight:.3f}" if weight else "" for weight in weights[n].tolist()]
                rows.append([label, *seen])
            return console.table(rows)
        rows = [["", "query", "strongest keys", "", ""]]
        for n, label in enumerate(self.labels):
            best = zip(*(tensor.tolist() for tensor in weights[n].topk(3)), strict=True)
            keys = [
                f"{key} {self.labels[key]} {weight:.3f}" if weight else "" for weight, key in best
            ]
            rows.append([str(n), label, *keys])
        return console.table(rows)

    def table(self) -> str:
        """The summary of each head that is shown."""
        share = self.weights.shape[1] // self.n_kv_head
        rows = [["layer", "head", "KV head", "previous", "first", "itself", "entropy"]]
        for layer, head, *means in summarize(self.weights):
            if layer in self.layers and self.head in (None, head):
                numbers = (layer, head, head // share)
                rows.append([*map(str, numbers), *(f"{mean:.3f}" for mean in means)])
        return console.table(rows)

    def figure(self) -> plots.Figure:
        """A panel per head."""
        weights = self.weights.numpy()
        return plots.attention(weights, self.labels, self.n_kv_head, self.layers, self.head)


def view(
    run: Run, tokens: list[int], layers: list[int] | None = None, head: int | None = None
) -> View:
    """The attention of a run reading these tokens; by default of all layers and heads."""
    config = run.config.model
    layers = list(range(config.n_layer)) if layers is None else layers
    heads = [] if head is None else [head]
    for name, numbers, count in (("layer", layers, config.n_layer), ("head", heads, config.n_head)):
        for number in numbers:
            if not 0 <= number < count:
                raise ConfigError(f"--{name} {number}: this model has {name}s 0 to {count - 1}")
    weights = attention_weights(run.model, tokens)
    labels = [label(run.tokenizer, token) for token in tokens]
    return View(weights, labels, config.n_kv_head, layers, head)


@torch.no_grad()
def attention_weights(model: GPT, tokens: list[int]) -> Tensor:
    """The weights (L, H, T, T) of a model reading these tokens, query by key.

    The model's own attention computes them, so whoever changes it sees the change: its output is a
    mean of the values, and the mean of unit vectors has the weights as its numbers.
    """
    limit = model.config.context_length
    if not 1 <= len(tokens) <= limit:
        raise ConfigError(f"--prompt: {len(tokens)} tokens; give between 1 and {limit}")
    layers: list[Tensor] = []

    def record(module: Attention, arguments: tuple[Any, ...]) -> None:
        q, k, v = module.heads(*arguments[:2])  # (1, H, T, K), (1, G, T, K), (1, G, T, K)
        T, K = v.shape[2:]
        # K at a time, as fused kernels want values of the size of keys.
        units = torch.eye(T, -(-T // K) * K, device=v.device).split(K, dim=1)  # each (T, K)
        parts = [module.mix(q, k, unit.to(v.dtype).expand_as(v)) for unit in units]
        layers.append(torch.cat(parts, dim=-1)[0, :, :, :T])  # (H, T, T)

    hooks = [
        module.register_forward_pre_hook(record)
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    try:
        model.eval()(torch.tensor([tokens], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(layers).cpu()  # (L, H, T, T)


class HeadSummary(NamedTuple):
    """Mean weight of one head on the previous, first and own token; mean entropy in nats."""

    layer: int
    head: int
    previous: float
    first: float
    itself: float
    entropy: float


def summarize(weights: Tensor) -> list[HeadSummary]:
    """Summaries of weights (L, H, T, T), without the first row, which can see only itself."""
    L, H, T, _ = weights.shape
    rows = weights[:, :, min(1, T - 1) :]
    quantities = (
        weights.diagonal(-1, 2, 3) if T > 1 else weights[..., 0],
        rows[..., 0],
        weights.diagonal(0, 2, 3)[..., min(1, T - 1) :],
        torch.special.entr(rows).sum(dim=-1),
    )
    means = torch.stack([quantity.mean(dim=-1) for quantity in quantities], dim=-1)  # (L, H, 4)
    return [
        HeadSummary(layer, head, *means[layer, head].tolist())
        for layer in range(L)
        for head in range(H)
    ]


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token as a picture can show it."""
    return "".join(spell(tokenizer, token))


def spell(tokenizer: Tokenizer, token: int) -> list[str]:
    """A token as text and symbols in turn, text first; [] for an empty one.

    Symbols make the rest visible: spaces, line ends and other control characters, bytes that are
    only part of a character (in hex), and the document token.
    """
    if token == tokenizer.document_token:
        return ["", "<doc>"]
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        return ["", tokenizer.token_bytes(token).hex()]
    parts: list[str] = [""] * bool(text)
    for c in text:
        plain = c.isprintable() and c != " "
        if plain == (len(parts) % 2 == 0):
            parts.append("")
        parts[-1] += c if plain else "␣" if c == " " else repr(c)[1:-1]
    return parts


def named_mask(name: str, size: int | None = None) -> Tensor:
    """A mask by its name, (size, size), by default of 12 positions.

    `causal`, `window:N`, `padding:N` (N positions of padding on the left, as in the model), or
    `cross:T,S`: T queries on S keys of another sequence, which is padded on the right to `size`.
    """
    kind, _, number = name.partition(":")
    if kind == "cross":
        T, S = (int(n) if n.isdecimal() else 0 for n in (f"{number},".split(",", 2))[:2])
        if not name == f"cross:{T},{S}" or not T or not 0 < S <= (size or S):
            raise ConfigError(
                f"--mask {name}: unknown mask; use cross:T,S with at least 1 query and 1 key, and "
                f"a --size of at least S"
            )
        return mechanisms.cross_mask(torch.tensor([S]), T, size or S)[0]  # (T, size)
    size = size or 12
    positions = torch.arange(size)
    if name == "causal":
        return visible(positions, positions)
    if number.isdecimal() and kind == "window" and int(number) > 0:
        return visible(positions, positions, int(number))
    if number.isdecimal() and kind == "padding" and int(number) < size:
        return visible(positions, positions, None, torch.tensor([int(number)]))[0, 0]
    raise ConfigError(
        f"--mask {name}: unknown mask; use causal, window:N with N at least 1, padding:N with N "
        f"below {size}, or cross:T,S"
    )


def mask_lines(mask: Tensor) -> str:
    """A mask as rows of x (visible) and . (masked): queries down, keys across."""
    return "\n".join(" ".join("x" if visible else "." for visible in row) for row in mask.tolist())
