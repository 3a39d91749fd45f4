"""Notice that a model was changed since something was made from its weights.

PyTorch counts changes of a tensor, but not all: fused optimizers and what is written through
`.data` leave the count as it is. So a fingerprint also holds a few values of every tensor.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn

# Values that are kept of a tensor, spread over it. A step of an optimizer changes nearly all.
N_VALUES = 16


class Fingerprint:
    """What a model consisted of at some time.

    It sees every change but those of few elements that are written through `.data` or NumPy. It
    keeps the tensors of that time in memory, so that no other takes their addresses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = _list_parts(model)
        self._tensors = [part for part in self._parts if isinstance(part, Tensor)]
        self._states = self._list_states()
        with torch.no_grad():
            views = [_view_values(tensor) for tensor in self._tensors]
        dtypes = {view.dtype for view in views}
        # One concatenation for each type reads them all.
        self._views = [[view for view in views if view.dtype == dtype] for dtype in dtypes]
        self._values = self._read_values()

    def matches(self, model: nn.Module) -> bool:
        """Check whether the model still consists of the same modules, settings and values."""
        parts = _list_parts(model)
        same_parts = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return (
            same_parts
            and self._list_states() == self._states
            and all(map(torch.equal, self._read_values(), self._values))
        )

    def _list_states(self) -> list[tuple[int, int]]:
        """List the address of each tensor and how often PyTorch has seen it change."""
        return [(tensor.data_ptr(), _get_version(tensor)) for tensor in self._tensors]

    @torch.no_grad()
    def _read_values(self) -> list[Tensor]:
        # As bytes, since a NaN differs from itself.
        return [torch.cat(views).view(torch.uint8) for views in self._views]


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


def _get_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _view_values(tensor: Tensor) -> Tensor:
    """View some values of a tensor, from the first to near the last."""
    values = tensor.detach().reshape(-1)
    return values[:: max(1, len(values) // N_VALUES)]
