"""Wires an induction head before training: the model begins with attention that finds repetitions.

An induction head continues repetitions: it finds where the current token occurred before and
predicts what followed it there (Elhage et al. 2021, Olsson et al. 2022). After "Mr Dursley ... Mr
Durs" it says "ley". It takes two layers:

1. A head of the first layer looks at the token before and passes it on.
2. A head of the second layer looks for positions where the token before, as passed on, is the
   current one. What stands there followed it the last time.

Training takes hundreds or thousands of steps to find them, as neither is of use without the other.
Here both are in the initial weights, and training improves them from its first step on. The first
one needs RoPE, which can turn a query so that it fits the key one position earlier.

Letters: D width, K head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.model.attention import Attention
from gptmini.model.layers import compute_frequencies

PAIR_SHARE = 3 / 8  # of the pairs that RoPE turns: the fastest find a distance, the slowest a token
LOOK_SCALE = 0.16  # size of the weights by which the first head looks at the token before
MATCH_SCALE = 1.0  # size of the weights by which the second head compares
PASSED_ON = 4.0  # length of what each head passes on, in lengths of an embedding


def wire_induction_head(
    embed: nn.Embedding,
    first: Attention,
    second: Attention,
    config: ModelConfig,
    embedding_std: float,
) -> None:
    """Add what makes an induction head to the embeddings and to head 0 of two layers.

    The same vector, about as long as an embedding, is added to all embeddings. It is what queries
    and keys of the first head read, as "one back" does not depend on the token.
    """
    K = config.head_dim
    D = config.d_model
    with torch.device("cpu"):  # wherever the weights are, so that all draw the same
        common = draw_directions(1, D)  # (1, D)
        add_to(embed.weight, embedding_std * D**0.5 * common)

        query, key = make_query_and_key_of_token_before(config)  # (K,) each
        # The first updates would undo small weights. Without QK-norm, though, the scores grow with
        # the weights, so these make queries and keys of about 1 per number.
        look = LOOK_SCALE * D**0.5 if config.attention.qk_norm else (2 / D) ** 0.5
        read = draw_directions(K, D, common)  # (K, D), of an embedding
        written = draw_directions(K, D, common)  # (K, D), to the residual stream
        add_to_head(first.q_proj, look * query[:, None] * common)
        add_to_head(first.k_proj, look * key[:, None] * common)
        add_to_head(first.v_proj, read)
        add_to_head(first.o_proj, PASSED_ON * embedding_std * written.T)

        slow = choose_pairs(config).flip(0).repeat(2)[:, None]  # (K, 1)
        add_to_head(second.q_proj, MATCH_SCALE * slow * read)
        add_to_head(second.k_proj, MATCH_SCALE * slow * written)
        # It attends to what followed; what to say of it is left to training.
        add_to_head(second.v_proj, draw_directions(K, D, common))
        add_to_head(second.o_proj, PASSED_ON * embedding_std * draw_directions(K, D, common).T)


def make_query_and_key_of_token_before(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Make a query and a key (K,) whose product is highest from one position to the one before.

    The fastest pairs of RoPE tell neighbors apart best. The key is (a, 0) in each of them, and the
    query the same turned by -1 position.
    """
    angles = compute_frequencies(config).float()  # (K/2,), of one position
    fast = choose_pairs(config)  # (K/2,)
    a = fast / fast.mean() ** 0.5  # a mean square of 1
    key = torch.cat([a, torch.zeros_like(a)])  # (K,)
    query = torch.cat([a * angles.cos(), -a * angles.sin()])  # (K,)
    return query, key


def choose_pairs(config: ModelConfig) -> Tensor:
    """Return 1 for the fastest of the pairs that RoPE turns, and 0 for the others, (K/2,)."""
    n_pairs = config.head_dim // 2
    n_fast = max(1, round(PAIR_SHARE * n_pairs))
    return (torch.arange(n_pairs) < n_fast).float()


def draw_directions(count: int, width: int, avoided: Tensor | None = None) -> Tensor:
    """Draw directions (count, width) of length 1, at right angles to `avoided` (1, width)."""
    drawn = torch.randn(count, width)
    drawn = drawn - drawn.mean(dim=1, keepdim=True)  # which LayerNorm would remove
    if avoided is not None:
        drawn = drawn - drawn @ avoided.T * avoided
    return F.normalize(drawn, dim=1)  # zero where D leaves no direction


def add_to_head(projection: nn.Linear, change: Tensor) -> None:
    """Add to the first rows and columns of a projection's weight, which belong to head 0."""
    weight = projection.weight
    rows, columns = change.shape
    add_to(weight, F.pad(change, (0, weight.shape[1] - columns, 0, weight.shape[0] - rows)))


def add_to(weight: Tensor, change: Tensor) -> None:
    """Add on the weight's device."""
    weight.add_(change.to(weight.device))
