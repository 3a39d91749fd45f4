"""Attention to be looked at: the weights of a model, read off from outside, and what they favour.

Letters: L layers, H query heads, T positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmini.errors import ConfigError
from gptmini.model import mechanisms
from gptmini.model.attention import Attention, visible
from gptmini.model.gpt import GPT
from gptmini.text.tokenizer import Tokenizer


@torch.no_grad()
def attention_weights(model: GPT, tokens: list[int]) -> Tensor:
    """The weights (L, H, T, T) of a model reading these tokens, query by key.

    They are computed by the written-out formula from the queries and keys that the model's own
    attention makes; the model itself does not change.
    """
    limit = model.config.context_length
    if not 1 <= len(tokens) <= limit:
        raise ConfigError(f"--prompt: {len(tokens)} tokens; give between 1 and {limit}")
    layers: list[Tensor] = []

    def look(module: Attention, arguments: tuple[Any, ...]) -> None:
        q, k, _ = module.heads(*arguments[:2])
        positions = torch.arange(q.shape[2], device=q.device)
        mask = visible(positions, positions, module.window)
        k = k.repeat_interleave(module.n_head // module.n_kv_head, dim=1)
        layers.append(mechanisms.attention_weights(q[0], k[0], mask))

    hooks = [
        module.register_forward_pre_hook(look)
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    try:
        model.eval()(torch.tensor([tokens], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(layers).cpu()


class HeadSummary(NamedTuple):
    """Mean weights of one head on certain keys, and the mean entropy of its rows in nats."""

    layer: int
    head: int
    previous: float
    first: float
    itself: float
    entropy: float


def summarise(weights: Tensor) -> list[HeadSummary]:
    """What each head of weights (L, H, T, T) looks at; the first row, without choice, aside."""
    L, H, T, _ = weights.shape
    rows = weights[:, :, min(1, T - 1) :]
    quantities = (
        weights.diagonal(-1, 2, 3) if T > 1 else weights[..., 0],
        rows[..., 0],
        weights.diagonal(0, 2, 3)[..., min(1, T - 1) :],
        torch.special.entr(rows).sum(dim=-1),
    )
    means = torch.stack([quantity.mean(dim=-1) for quantity in quantities], dim=-1)
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
        f"--mask {name}: no such mask; take causal, window:N with N from 1, or padding:N with N "
        f"below {size}"
    )
