"""Counts the memory that tensors hold, as a reference for what is estimated or promised."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of all live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._live: dict[int, int] = {}  # bytes of each storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        self._measure(tensor.untyped_storage())

    def _measure(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._live:
            weakref.finalize(storage, self._release, key)
        self.bytes += size - self._live.get(key, 0)
        self._live[key] = size

    def _release(self, key: int) -> None:
        self.bytes -= self._live.pop(key)
