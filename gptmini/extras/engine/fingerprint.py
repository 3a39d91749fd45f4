"""Notice that a model was changed since something was made from its weights.

PyTorch counts changes of a tensor, but not all: fused optimizers and what is written through
`.data` or NumPy leave the count as it is. So a fingerprint reads every bit. For 124 million weights
in float32 that takes 0.1 s of a core.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn

# Words of 8 bytes are added up in so many places, each word in that of its index. As a prime
# divides no size of a tensor, whole rows, columns or heads cannot change places unseen.
N_SUMS = 1021


class Fingerprint:
    """The parts and values of a model at some time.

    It keeps the tensors of that time in memory, so that no other takes their addresses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = _list_parts(model)
        tensors = [part for part in self._parts if isinstance(part, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._sums = torch.cat([_sum_bits(tensor) for tensor in tensors])

    def matches(self, model: nn.Module) -> bool:
        """Check whether the model still consists of the same modules, settings and values."""
        now = Fingerprint(model)
        return (
            len(now._parts) == len(self._parts)
            and all(map(operator.is_, now._parts, self._parts))
            and now._addresses == self._addresses
            and torch.equal(now._sums, self._sums)
        )


def _list_parts(model: nn.Module) -> list[Any]:
    """List the attributes, hooks and tensors of all modules of a model."""
    parts: list[Any] = []
    modules: list[nn.Module | None] = [model]
    for module in modules:  # which grows meanwhile
        parts.append(module)
        if module is not None:
            parts += vars(module).values()  # settings such as a window, and `training`
            parts += module._forward_hooks.values()
            parts += module._forward_pre_hooks.values()
            parts += module._parameters.values()
            parts += module._buffers.values()
            modules += module._modules.values()
    return parts


def _sum_bits(tensor: Tensor) -> Tensor:
    """Add up the bits of a tensor of any type; whatever changes in it changes the sums (N,)."""
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if data.storage_offset() % 8:  # words begin at multiples of 8 bytes
        data = data.clone()
    n_bytes = len(data) // 8 * 8
    words = data[:n_bytes].view(torch.int64)
    n_words = len(words) // N_SUMS * N_SUMS
    sums = words[:n_words].view(-1, N_SUMS).sum(0)
    # In 64 bits an even number of changed signs adds up to nothing, so signs are counted, too.
    n_negative = -(words >> 63).sum()
    return torch.cat([sums, words[n_words:], data[n_bytes:].long(), n_negative[None]])
