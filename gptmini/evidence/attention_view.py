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


@dataclass(frozen=True)
class View:
    """The attention weights (L, H, T, T) of a model on a prompt, and which heads are shown."""

    weights: Tensor
    labels: list[str]
    n_kv_head: int
    layers: list[int]
    head: int | None

    def table(self) -> str:
        """The summary of each head that is shown."""
        share = self.weights.shape[1] // self.n_kv_head
        rows = [["layer", "head", "KV head", "previous", "first", "itself", "entropy"]]
        for layer, head, *means in summarise(self.weights):
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

    The written-out formula of `mechanisms` is applied to the queries and keys that the model's own
    attention computes.
    """
    limit = model.config.context_length
    if not 1 <= len(tokens) <= limit:
        raise ConfigError(f"--prompt: {len(tokens)} tokens; give between 1 and {limit}")
    layers: list[Tensor] = []

    def record(module: Attention, arguments: tuple[Any, ...]) -> None:
        q, k, _ = module.heads(*arguments[:2])  # (1, H, T, K), (1, G, T, K)
        positions = torch.arange(q.shape[2], device=q.device)
        mask = visible(positions, positions, module.window)
        k = k.repeat_interleave(module.n_head // module.n_kv_head, dim=1)  # (1, H, T, K)
        layers.append(mechanisms.attention_weights(q[0], k[0], mask))

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


def summarise(weights: Tensor) -> list[HeadSummary]:
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
    """A token as a picture can show it: spaces and line ends visible, broken characters in hex."""
    if token == tokenizer.document_token:
        return "<doc>"
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        return tokenizer.token_bytes(token).hex()
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text)


def named_mask(name: str, size: int) -> Tensor:
    """The mask (size, size) called `causal`, `window:N` or `padding:N` (N hidden on the left)."""
    kind, _, number = name.partition(":")
    positions = torch.arange(size)
    if name == "causal":
        return visible(positions, positions)
    if number.isdecimal() and kind == "window" and int(number) > 0:
        return visible(positions, positions, int(number))
    if number.isdecimal() and kind == "padding" and int(number) < size:
        return visible(positions, positions, None, torch.tensor([int(number)]))[0, 0]
    raise ConfigError(
        f"--mask {name}: unknown mask; use causal, window:N with N at least 1, or padding:N with N "
        f"below {size}"
    )


def mask_lines(mask: Tensor) -> str:
    """A mask as rows of x (visible) and . (hidden)."""
    return "\n".join(" ".join("x" if visible else "." for visible in row) for row in mask.tolist())
