"""The KV cache: keys and values of earlier tokens, so that each token is read once.

`KVCache` is for reading and for loops of your own, as in scripts/nano.py: its rows grow together.
`StaticCache` is for generating: each row holds a text of its own length, at addresses that never
change, and PyTorch's engine passes some of the rows at a time. A layer gives `Attention` its cache
as a `LayerCache`, whose `update` adds new keys and values and returns all that the new queries may
see. A cache knows nothing of attention: it says at which position each key is, and masks are made
from positions.

Letters: B rows of a batch or a pass, R rows of a cache, T tokens, S keys, G KV heads, K head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gptmini.config.settings import ModelConfig

Rows = slice | Tensor
# The masks that the layers of a pass share, by window.
Masks = dict[int | None, Tensor]


class LayerCache:
    """Preallocated keys and values of one layer, (B, G, size, K), in the order of positions."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.length = 0  # positions seen so far
        self.masks: Masks = {}

    def next_positions(self, n: int) -> Tensor:
        """Return the positions (n,) of the next tokens."""
        return torch.arange(self.length, self.length + n, device=self.keys.device)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add k and v (B, G, T, K); return the keys and values (B, G, S, K) to attend to.

        Their positions (S,) come third.
        """
        start = self.length
        end = start + k.shape[2]
        self.length = end
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        return self.keys[:, :, :end], self.values[:, :, :end], torch.arange(end, device=k.device)


class NoCache(LayerCache):
    """Keeps nothing, as a text is read as a whole in training."""

    def __init__(self, device: torch.device) -> None:
        self.masks = {}
        self._device = device

    def next_positions(self, n: int) -> Tensor:
        return torch.arange(n, device=self._device)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return k, v, self.next_positions(k.shape[2])


class KVCache:
    """One LayerCache per layer: 2 · G · K elements per row and position of the context."""

    def __init__(
        self, config: ModelConfig, batch_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layers = []
        shape = (2, batch_size, config.n_kv_head, config.context_length, config.head_dim)
        for _ in range(config.n_layer):
            memory = torch.empty(shape, device=device, dtype=dtype)
            self.layers.append(LayerCache(memory[0], memory[1]))

    @property
    def length(self) -> int:
        return self.layers[0].length

    def next_positions(self, n: int) -> Tensor:
        """Return the positions (n,) of the next tokens."""
        return self.layers[0].next_positions(n)


# -- texts of different lengths --------------------------------------------------------------------

# Texts come, grow, are cut and leave without any effect on the other rows. `select` prepares a pass
# over some of the rows. The shapes of a pass depend on nothing but the number of rows, tokens and
# keys that it is asked for, and all else is computed on the device. So a pass can be recorded as a
# CUDA graph and repeated with other tokens.


class StaticCache:
    """Keys and values of R texts in every layer, (R, G, size + 1, K).

    A ring buffer: position p lies at index p % size and overwrites position p - size. A pass writes
    all its keys before its queries look at them, so layers with a window store `max_pass_tokens`
    more than the window; that many tokens may also be taken back. The last index takes what must
    not be kept: keys of padding and of idle rows. It is never read.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_rows: int,
        device: torch.device,
        dtype: torch.dtype,
        max_pass_tokens: int,
    ) -> None:
        self.n_rows = n_rows
        self.memory: list[Tensor] = []
        for layer in range(config.n_layer):
            size = min(config.get_cache_length(layer) + max_pass_tokens, config.context_length)
            shape = (2, n_rows, config.n_kv_head, size + 1, config.head_dim)
            # Zeros: a key that is masked still takes part in products, and NaN would spread.
            self.memory.append(torch.zeros(shape, device=device, dtype=dtype))

    def copy_row(self, source: int, target: int, other: "StaticCache | None" = None) -> None:
        """Copy a row of this cache, or of another one, to row `target`."""
        layers = self.memory if other is None else other.memory
        for theirs, ours in zip(layers, self.memory, strict=True):
            ours[:, target] = theirs[:, source]

    def select(
        self, rows: Rows, positions: Tensor, is_token: Tensor, n_keys: int
    ) -> "SelectedRows":
        """Prepare a pass over B rows: tokens at `positions` (B, T) that see keys before `n_keys`.

        Where `is_token` (B, T) is False, nothing is kept. The last column of `positions` is the
        newest position of each row.
        """
        if isinstance(rows, slice):
            row_numbers = torch.arange(rows.start, rows.stop, device=positions.device)  # (B,)
        else:
            row_numbers = rows
        indices: dict[int, RingIndices] = {}
        layers = []
        for memory in self.memory:
            size = memory.shape[3] - 1
            if size not in indices:
                indices[size] = RingIndices(row_numbers[:, None], positions, is_token, size, n_keys)
            layers.append(SelectedLayer(memory, rows, indices[size]))
        return SelectedRows(layers)


class RingIndices:
    """Where the tokens of a pass go in layers of one size, and what lies at each index."""

    def __init__(
        self, rows: Tensor, positions: Tensor, is_token: Tensor, size: int, n_keys: int
    ) -> None:
        self.rows = rows  # (B, 1)
        self.positions = positions  # (B, T)
        self.indices = torch.where(is_token, positions % size, size)  # (B, T)
        # Going back from the newest position, around the ring, each index is one position older.
        newest = positions[:, -1:]  # (B, 1)
        stored = torch.arange(min(n_keys, size), device=positions.device)  # (S,)
        self.key_positions = newest - (newest - stored) % size  # (B, S)
        self.masks: Masks = {}


class SelectedLayer(LayerCache):
    """One layer of the rows of a pass."""

    def __init__(self, memory: Tensor, rows: Rows, ring: RingIndices) -> None:
        super().__init__(memory[0], memory[1])
        self.masks = ring.masks
        self._rows = rows
        self._ring = ring

    def next_positions(self, n: int) -> Tensor:
        return self._ring.positions  # (B, T)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write k and v (B, G, T, K); return keys and values (B, G, S, K) and positions (B, S)."""
        ring = self._ring
        S = ring.key_positions.shape[1]
        read = []
        for memory, new in ((self.keys, k), (self.values, v)):
            memory[ring.rows, :, ring.indices] = new.transpose(1, 2).to(memory.dtype)
            read.append(memory[self._rows, :, :S])  # (B, G, S, K)
        return read[0], read[1], ring.key_positions


class SelectedRows(KVCache):
    """The rows of a pass, as the model takes them. Their lengths are in their positions."""

    def __init__(self, layers: Sequence[SelectedLayer]) -> None:
        self.layers: list[LayerCache] = list(layers)
