"""The model: embeddings, a stack of blocks, a head. Tokens (B, T) -> logits (B, T, V).

What the model is, unless the configuration says otherwise (where it depends on the text, `plan/`
decides):

- pre-norm: a block norms what it reads and adds its result to the residual stream;
- multi-head attention whose queries and keys are normed, then rotated by RoPE;
- an MLP four times as wide, with the square of ReLU;
- layer norms without biases, linear layers without biases;
- one matrix for embedding and head where the text is small, two where it is large;
- an induction head in the initial weights, where there are RoPE and two layers;
- dropout of embeddings and of what is added to the stream, where the text is small.

Read `GPT.forward_hidden` and `Block.forward` first. Norm, dropout and loss are those of the field,
computed faster (kernels.py). Nothing here knows tokenizers, batches or files.

Letters: B batch, T positions, D width, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError
from gptmini.model.attention import Attention
from gptmini.model.cache import KVCache, LayerCache, NoCache
from gptmini.model.induction import wire_induction_head
from gptmini.model.kernels import Dropout, cross_entropy_, linear_cross_entropy, softmax_
from gptmini.model.layers import MLP, Rotary, create_norm

WEIGHT_STD = 0.02
EMBEDDING_STD = 0.3  # where the head is untied


class Block(nn.Module):
    """Attention, then feed-forward, each normed first and added to the residual stream x."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = create_norm(config)
        self.attn = Attention(config, layer)
        self.mlp_norm = create_norm(config)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None, cache: LayerCache | None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); the arguments are those of `Attention.forward`, or no cache."""
        cache = cache or NoCache(x.device)
        x = x + self.dropout(self.attn(self.attn_norm(x), cos_sin, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A pre-norm decoder-only transformer.

    Raises ConfigError if the configuration lacks vocab_size.
    """

    def __init__(self, config: ModelConfig, draw: bool = True) -> None:
        """`draw` the weights; `create_undrawn` makes a model for those who have weights."""
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: missing; set it to the size of the tokenizer")
        self.config = config
        self.gradient_checkpointing = False  # recompute each block in backward
        self.uses_cache = True  # False for a model of your own that cannot
        # The softmax of `linear_cross_entropy`, to be replaced by a compiled one.
        self.softmax: Callable[[Tensor, Tensor], Tensor] = softmax_
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions: nn.Embedding | None = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.context_length, config.d_model)
        self.rotary: Rotary | None = None
        if config.position == "rope":
            self.rotary = Rotary(config)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.n_layer))
        self.final_norm = create_norm(config)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if draw:
            init_weights(self)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V); with targets (B, T), the loss instead, a scalar.

        The loss is the mean cross-entropy of the targets, in nats per token and in float32. Targets
        below 0 are ignored: they add 0 to the sum, which is divided by the number of all targets.
        With a cache, the tokens continue those already in it.
        """
        if targets is not None:
            return self.compute_loss(tokens, targets)
        hidden = self.forward_hidden(tokens, cache)  # (B, T, D)
        return self.compute_logits(hidden)

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss that `forward` describes."""
        hidden = self.forward_hidden(tokens)  # (B, T, D)
        if fuses_head_and_loss(tokens.device):
            return linear_cross_entropy(
                hidden.flatten(0, 1), self.head_weight, targets.flatten(), self.softmax
            )
        logits = self.compute_logits(hidden)  # (B, T, V)
        return cross_entropy_(logits.flatten(0, 1), targets.flatten())

    def forward_hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Tokens (B, T) -> the normalized output of the last block (B, T, D).

        With a cache, the tokens continue those already in it.
        """
        T = tokens.shape[1]
        end = T if cache is None else cache.length + T
        if end > self.config.context_length:
            raise ValueError(f"{end} positions in a context of {self.config.context_length}")
        if cache is None:
            positions = torch.arange(T, device=tokens.device)  # (T,)
        else:
            positions = cache.next_positions(T)  # (T,), or (B, T) where rows differ in length
        x = self.embed(tokens)  # (B, T, D)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = self.dropout(x)
        cos_sin = self.rotary(positions) if self.rotary is not None else None
        for layer, block in enumerate(self.blocks):
            layer_cache = cache.layers[layer] if cache is not None else None
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, cos_sin, layer_cache, use_reentrant=False)
            else:
                x = block(x, cos_sin, layer_cache)
        return self.final_norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden (..., D) -> logits (..., V), by the head or, if tied, the embedding table."""
        return F.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """The weight (V, D) of the head or, if tied, the embedding table."""
        head = self.head if self.head is not None else self.embed
        return head.weight


class _SkipDraws(TorchFunctionMode):
    """Leaves tensors as they are where torch would fill them with random numbers."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def create_undrawn(config: ModelConfig) -> GPT:
    """Create a model without drawing its weights, for those who load them or need their shapes.

    They hold whatever lies in memory, and no page of it is touched. A model on the meta device has
    no memory either, but torch takes seconds to import what that device needs.
    """
    with _SkipDraws():
        return GPT(config, draw=False)


def fuses_head_and_loss(device: torch.device) -> bool:
    """Check whether the loss takes `linear_cross_entropy`, made for accelerators."""
    return device.type != "cpu"


@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Draw the weights much as GPT-2 does (Radford et al. 2019, where positions have std 0.01).

    | role                                            | distribution              |
    |-------------------------------------------------|---------------------------|
    | embeddings, positions                           | normal, std 0.02          |
    | embeddings where the head is untied             | normal, std 0.3           |
    | the untied head                                 | normal, std 0.001         |
    | projections that read the residual stream       | normal, std 0.02          |
    | o_proj and down_proj, which add to it           | normal, std 0.02 / √(2 L) |
    | biases                                          | 0                         |
    | norm weights                                    | 1, as PyTorch makes them  |

    With RoPE, `wire_induction_head` then adds to the embeddings and to the first attention head of
    two layers, unless `induction_head` is false.

    An embedding that is not the head may be large. A head near zero begins at the loss of guessing,
    and its first gradients are those of the errors (scripts/LOG.md: What learns more from each
    token in a quarter of an epoch?).
    """
    config = model.config
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=WEIGHT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    embedding_std = WEIGHT_STD
    if model.head is not None:
        embedding_std = EMBEDDING_STD
        nn.init.normal_(model.embed.weight, std=embedding_std)
        nn.init.normal_(model.head.weight, std=0.001)
    residual_std = WEIGHT_STD / (2 * config.n_layer) ** 0.5
    for block in model.blocks:
        assert isinstance(block, Block)
        nn.init.normal_(block.attn.o_proj.weight, std=residual_std)
        nn.init.normal_(block.mlp.down_proj.weight, std=residual_std)
    if config.induction_head and config.position == "rope" and config.n_layer > 1:
        first = model.blocks[0]
        second = model.blocks[1]
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        wire_induction_head(model.embed, first.attn, second.attn, config, embedding_std)
