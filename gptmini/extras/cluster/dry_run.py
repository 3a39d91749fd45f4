"""Estimate the memory of a training run by a dry run: two steps on tensors without storage."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptmini.config.settings import Config
from gptmini.console import show_elapsed
from gptmini.errors import MachineError
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import Memory


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


@show_elapsed("estimating the memory")
def estimate_memory(config: Config, compute: Compute) -> Memory:
    """Estimate the memory of a training run without allocating it; `micro_batch_size` must be set.

    The steps are real ones (our model, our optimizers), so nothing is estimated by formula.
    MachineError for a PyTorch without torch.distributed, which its fake tensors need.
    """
    if not torch.distributed.is_available():
        raise MachineError(
            "memory: cannot be estimated, as this PyTorch lacks torch.distributed; install one "
            "with it, or set train.micro_batch_size to train without the estimate"
        )
    train = config.train
    size = train.micro_batch_size or train.batch_size
    with FakeTensorMode(), StorageCounter() as storages, compute.device:
        model = GPT(config.model).train()
        model.gradient_checkpointing = train.gradient_checkpointing
        weights = storages.bytes
        optimizer = Optimizer(model, train, compute.dtype)
        passes = min(2, train.batch_size // size)
        for _ in range(2):  # the second step has the optimizer's state
            for _ in range(passes):  # the second pass has the first one's gradients
                tokens = torch.zeros(size, config.seq_len, dtype=torch.long, device=compute.device)
                with compute.autocast():
                    mean = model(tokens, tokens)
                mean.backward()
            nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
            optimizer.step(train.lr)
        state = sum(tensor.nbytes for tensor in optimizer.state_dict().values())
    activations = storages.peak - 2 * weights - state
    return Memory(weights, weights, state, activations)
