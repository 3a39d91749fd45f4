"""Takes from a model what attention computes with, so that a page can show the arithmetic.

The page computes scores, weights, weighted sums and outputs itself, from these numbers. The last
one, what a layer added to the residual stream, is the model's own: a page can check itself.

Letters: L layers, H query heads, G KV heads, T positions, D width, K head size, V vocabulary, R
numbers of the residual stream that are shown.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.figures import page
from gptmini.model.attention import Attention
from gptmini.model.gpt import GPT, Block

MAX_STREAM_NUMBERS = 256  # R: of a wider residual stream a page shows only the first
LISTED_NEIGHBORS = 8  # of an embedding


class LayerNumbers(NamedTuple):
    """The numbers of one layer as it reads a text.

    `q` (H, T, K) and `k` (G, T, K) are normalized and rotated as the scores want them, `v` is
    (G, T, K). `output_weight` (R, H·K) and `output_bias` (R,) are those of o_proj. `stream` (T, R)
    is the residual stream before the layer, and `added` (T, R) what its attention adds to it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output_weight: Tensor
    output_bias: Tensor
    stream: Tensor
    added: Tensor


@torch.no_grad()
def record_layers(model: GPT, tokens: list[int], layers: list[int]) -> list[LayerNumbers]:
    """Record the numbers of some layers, in order, while the model reads these tokens."""
    R = min(model.config.d_model, MAX_STREAM_NUMBERS)
    streams: list[Tensor] = []  # (1, T, D) each
    recorded: list[LayerNumbers] = []

    def record_stream(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        streams.append(arguments[0])

    def record_attention(module: Attention, arguments: tuple[Any, ...], added: Tensor) -> None:
        q, k, v = module.project_qkv(*arguments[:2])  # (1, H, T, K), (1, G, T, K), (1, G, T, K)
        bias = module.o_proj.bias
        numbers = LayerNumbers(
            q=q[0],
            k=k[0],
            v=v[0],
            output_weight=module.o_proj.weight[:R],
            output_bias=added.new_zeros(R) if bias is None else bias[:R],
            stream=streams[-1][0, :, :R],
            added=added[0, :, :R],
        )
        recorded.append(LayerNumbers(*(each.detach().float().cpu() for each in numbers)))

    hooks = []
    for layer in layers:
        block = model.blocks[layer]
        assert isinstance(block, Block)
        hooks.append(block.register_forward_pre_hook(record_stream))
        hooks.append(block.attn.register_forward_hook(record_attention))
    try:
        model.eval().forward_hidden(torch.tensor([tokens], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def get_frequencies(model: GPT) -> Tensor | None:
    """Get the angles (K/2,) by which each position turns the pairs of a head; None without RoPE."""
    if model.rotary is None:
        return None
    position = min(1, model.config.context_length - 1)
    return torch.atan2(model.rotary.sines[position], model.rotary.cosines[position]).cpu()


def get_slopes(model: GPT) -> Tensor | None:
    """Get the slopes (H,) by which ALiBi takes distance from scores; None without ALiBi."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    slopes = block.attn.alibi_slopes
    return None if slopes is None else slopes.float().cpu()


@torch.no_grad()
def find_neighbors(table: Tensor, tokens: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Find the rows of an embedding table (V, D) with the smallest angles to those of N tokens.

    Returns their numbers and cosines, (N, count) each, the nearest first, without the token itself.
    """
    rows = F.normalize(table.float(), dim=-1)  # (V, D)
    cosines = rows[tokens] @ rows.T  # (N, V)
    cosines[torch.arange(len(tokens)), tokens] = -2
    nearest = cosines.topk(min(count, len(table) - 1))
    return nearest.indices.cpu(), nearest.values.cpu()


def encode_layer(numbers: LayerNumbers) -> page.PageItem:
    """Encode the numbers of a layer for the page, as float32 in base64."""
    return {name: page.encode_base64(each.numpy()) for name, each in numbers._asdict().items()}


def count_layer_numbers(config: ModelConfig, T: int) -> int:
    """Count the numbers in a `LayerNumbers` of T tokens."""
    H = config.n_head
    R = min(config.d_model, MAX_STREAM_NUMBERS)
    of_token = (H + 2 * config.n_kv_head) * config.head_dim + 2 * R
    return T * of_token + R * (H * config.head_dim + 1)


def build_notes(config: ModelConfig, is_partial: bool) -> dict[str, str]:
    """Write a sentence or two on each step, as this model computes it.

    `is_partial` says that the page has the numbers of one layer only.
    """
    K = config.head_dim
    output_bias = ", plus a bias," if config.bias else ""
    output = (
        f"o_proj turns the {K} numbers of each head into {config.d_model:,}. Their sum over all "
        f"heads{output_bias} is added to the residual stream, which every layer reads from and "
        "adds to."
    )
    if config.d_model > MAX_STREAM_NUMBERS:
        output += f" Of its numbers this page has the first {MAX_STREAM_NUMBERS}."
    bias = "the bias of position is added; " if config.position == "alibi" else ""
    partial = ""
    if is_partial:
        partial = (
            "With the numbers of all layers this page would be too large, so it has those of one; "
            "--layer N chooses which."
        )
    return {
        "vectors": _describe_vectors(config),
        "position": _describe_position(config),
        "scores": "The product q·k of the query with each key says how well they match. It is "
        f"divided by √{K}, so that long vectors do not saturate the softmax; {bias}it becomes -∞ "
        "where the mask hides the key; and the softmax turns all scores into weights, which sum "
        "to 1.",
        "mixed": "Each value times its weight, added up: a mean of what the tokens pass on.",
        "output": output,
        "partial": partial,
        "near": "By the cosine of the angle between rows of the trained embedding table: 1 points "
        "the same way, 0 is unrelated. Tokens that are used alike come to lie near each other.",
    }


def _describe_vectors(config: ModelConfig) -> str:
    """Say how q, k and v are made."""
    qkv_bias = config.attention.qkv_bias
    has_bias = config.bias if qkv_bias is None else qkv_bias
    sentences = [
        "The matrices q_proj, k_proj and v_proj make them from the normed residual stream"
        f"{', plus biases' if has_bias else ''}.",
        "The query is what the token looks for, the key what it is found by, the value what it "
        "passes on.",
    ]
    if config.attention.qk_norm:
        sentences.append("Query and key are normed too (RMSNorm), which keeps scores small.")
    if config.n_kv_head < config.n_head:
        sharing = config.n_head // config.n_kv_head
        sentences.append(f"Groups of {sharing} query heads share a key and a value.")
    if config.position == "rope":
        sentences.append("Query and key are shown as the scores need them, turned by step 2.")
    return " ".join(sentences)


def _describe_position(config: ModelConfig) -> str:
    """Say how the model knows where a token is."""
    half = config.head_dim // 2
    sentences = {
        "rope": "RoPE takes the numbers of q and k in pairs, each a point in a plane, and turns "
        f"pair i (numbers i and i + {half}) by the position times an angle, which is smaller for "
        "each further pair. What a pair adds to a score then depends only on how far query and key "
        "are apart.",
        "learned": "This model adds a learned row for each position to the embedding, before the "
        "first layer. Its heads have nothing more to do with positions.",
        "alibi": "ALiBi leaves q and k as they are, and subtracts from each score the distance "
        "times the slope of the head.",
        "none": "This model has no positions. It knows the order of tokens only from what the mask "
        "hides.",
    }
    return sentences[config.position]
