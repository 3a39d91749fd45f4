"""Computes the attention weights of a model, and shows them and masks.

Letters: L layers, H query heads, T positions.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptmini import console
from gptmini.errors import ConfigError, shorten
from gptmini.generate.run import Run
from gptmini.model.attention import Attention, make_mask
from gptmini.model.cache import NoCache
from gptmini.model.gpt import GPT
from gptmini.tokenizer.spelling import explain_labels, label_tokens

MAX_MATRIX_TOKENS = 12  # of a head that is shown whole


@dataclass(frozen=True)
class AttentionView:
    """The attention weights (L, H, T, T) of a model on a prompt, and which heads to show.

    `head` is None for all heads of these layers. `legend` explains marks in the labels.
    """

    weights: Tensor
    labels: list[str]
    n_kv_head: int
    layers: list[int]
    head: int | None
    legend: tuple[str, ...] = ()

    def format_text(self) -> str:
        """Return a table of the heads to show and its legend; of a single head also its weights."""
        T = len(self.labels)
        if T == 1:
            return f"1 token: {self.labels[0]}; it sees only itself, so there is nothing to compare"
        parts = [
            self.format_table(),
            "previous, first, itself: mean weight that a token gives to the one before it, to the\n"
            "first and to itself, which overlap at the beginning; entropy, in nats: 0 = all on\n"
            "one token, 2.1 = evenly on eight",
        ]
        if len(self.layers) > 1 or self.head is None:
            more = "for the weights of one head: --layer N --head N"
            parts.append(f"{T} tokens: {' '.join(self.labels)}\n{more}")
        else:
            parts.append("each token (query) with the weights that it gives to others (keys):")
            parts.append(self._format_head(self.weights[self.layers[0], self.head]))
        if self.legend:
            parts.append("\n".join(self.legend))
        return "\n\n".join(parts)

    def _format_head(self, weights: Tensor) -> str:
        """Return one head (T, T) as a matrix or, if it is large, the top keys of each query."""
        if len(self.labels) <= MAX_MATRIX_TOKENS:
            rows = [["query", *self.labels]]
            for query, label in enumerate(self.labels):
                cells = [f"{weight:.3f}" if weight else "" for weight in weights[query].tolist()]
                rows.append([label, *cells])
            return console.format_table(rows)
        rows = [["", "query", "strongest keys", "", ""]]
        for query, label in enumerate(self.labels):
            top = weights[query].topk(3)
            cells = [
                f"{key} {self.labels[key]} {weight:.3f}" if weight else ""
                for key, weight in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
            rows.append([str(query), label, *cells])
        return console.format_table(rows)

    def format_table(self) -> str:
        """Return a table with the summary of each head to show."""
        heads = range(self.weights.shape[1]) if self.head is None else [self.head]
        rows = [["layer", "head", "previous", "first", "itself", "entropy"]]
        means = summarize_heads(self.weights).tolist()
        for layer in self.layers:
            for head in heads:
                cells = [f"{mean:.3f}" for mean in means[layer][head]]
                rows.append([str(layer), str(head), *cells])
        return console.format_table(rows)


def view_attention(
    run: Run, tokens: list[int], layers: list[int] | None = None, head: int | None = None
) -> AttentionView:
    """View the attention of a run that reads these tokens, by default in all layers and heads."""
    config = run.config.model
    if layers is None:
        layers = list(range(config.n_layer))
    for layer in layers:
        if not 0 <= layer < config.n_layer:
            raise ConfigError(f"--layer {layer}: this model has layers 0 to {config.n_layer - 1}")
    if head is not None and not 0 <= head < config.n_head:
        raise ConfigError(f"--head {head}: this model has heads 0 to {config.n_head - 1}")
    weights = compute_attention_weights(run.model, tokens)
    labels = label_tokens(run.tokenizer, tokens)
    legend = explain_labels([run.tokenizer.decode_token(token) for token in tokens])
    return AttentionView(weights, labels, config.n_kv_head, layers, head, tuple(legend))


@torch.no_grad()
def compute_attention_weights(model: GPT, tokens: list[int]) -> Tensor:
    """Compute the weights (L, H, T, T) of a model that reads these tokens, query by key.

    Fused attention never stores its weights. But its output is a weighted mean of the values, so
    with unit vectors as values the output is the weights. That asks the model's own attention, and
    whoever changes it sees the change here.
    """
    context_length = model.config.context_length
    if not 1 <= len(tokens) <= context_length:
        raise ConfigError(f"--prompt: {len(tokens)} tokens; give between 1 and {context_length}")
    layers: list[Tensor] = []

    def record(module: Attention, arguments: tuple[Any, ...]) -> None:
        q, k, v = module.project_qkv(*arguments[:2])  # (1, H, T, K), (1, G, T, K), (1, G, T, K)
        T, K = v.shape[2:]
        whole = NoCache(v.device)
        # K keys at a time, as fused kernels want values of the size of keys.
        n_chunks = -(-T // K)
        unit_vectors = torch.eye(T, n_chunks * K, device=v.device)
        chunks = [
            module.mix(q, k, values.to(v.dtype).expand_as(v), whole)  # (1, H, T, K)
            for values in unit_vectors.split(K, dim=1)  # (T, K)
        ]
        layers.append(torch.cat(chunks, dim=-1)[0, :, :, :T])  # (H, T, T)

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


def summarize_heads(weights: Tensor) -> Tensor:
    """Summarize weights (L, H, T, T), without the first query, which can see only itself.

    Returns, (L, H, 4), the mean weight of each head on the previous token, the first and the
    query's own, and the mean entropy of its weights, in nats.
    """
    rows = weights[:, :, 1:]
    previous = weights.diagonal(-1, 2, 3)
    first = rows[..., 0]
    itself = weights.diagonal(0, 2, 3)[..., 1:]
    entropy = torch.special.entr(rows).sum(dim=-1)
    quantities = [previous, first, itself, entropy]  # each (L, H, T - 1)
    return torch.stack([quantity.mean(dim=-1) for quantity in quantities], dim=-1)


def build_mask(name: str, size: int) -> Tensor:
    """Build the mask of a model (size, size) by its name, `causal` or `window:N`."""
    positions = torch.arange(size)
    if name == "causal":
        return make_mask(positions, positions)
    window = re.fullmatch(r"window:([1-9]\d{0,8})", name)
    if window is None:
        raise ConfigError(
            f"--mask {shorten(name)}: unknown mask; use causal, or window:N with N at least 1"
        )
    return make_mask(positions, positions, int(window[1]))


def format_mask(mask: Tensor) -> str:
    """Format a mask as rows of x (visible) and . (masked): queries down, keys across."""
    return "\n".join(" ".join(".x"[is_visible] for is_visible in row) for row in mask.tolist())
