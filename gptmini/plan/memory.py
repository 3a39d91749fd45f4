"""Training steps on tensors that have no memory: what they would hold, before anything is made."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.model.gpt import GPT, loss
from gptmini.model.optim import Optimizer


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds at its peak.

    `activations` are what lies above the three before: what the forward pass keeps for the backward
    pass, or what the optimizer makes meanwhile. `saving` is what a checkpoint takes while it is
    written, in large blocks that are not taken from what the passes have left free.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    saving: int

    @property
    def peak(self) -> int:
        """All of it together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.saving


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.bytes -= size


def dry_run(config: Config, device: torch.device, dtype: torch.dtype) -> Memory:
    """The memory of a training by its sizes; `micro_batch_size` must be set."""
    settings = config.train
    size = settings.micro_batch_size or settings.batch_size
    with FakeTensorMode(), StorageCounter() as held, device:
        model = GPT(config.model).train()
        model.gradient_checkpointing = settings.gradient_checkpointing
        weights = held.bytes
        optimizer = Optimizer(model, settings, dtype)
        for _ in range(2):  # the second has the optimizer's state
            for _ in range(min(2, settings.batch_size // size)):  # the second has gradients
                tokens = torch.zeros(size, config.seq_len, dtype=torch.long, device=device)
                with machine.precision(device, dtype):
                    loss(model, tokens, tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            optimizer.step(settings.lr)
        state = sum(tensor.nbytes for tensor in optimizer.state().values())
    lasting = 2 * weights + state
    # Tensors become bytes, and those a file of bytes: the optimizer's twice beside the model's.
    saving = weights + 2 * state if device.type == "cpu" else 0
    return Memory(weights, weights, state, held.peak - lasting, saving)
