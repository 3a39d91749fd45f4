"""Estimate the memory of a training run.

By a dry run, two steps on tensors without storage; or, at once, by a formula that comes close.
"""

import weakref
from dataclasses import astuple, dataclass
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
from gptmini.plan.cost import count_parameters_by_part

# There torch keeps freed blocks, and a recording (cuda_graph.py) gradients of its own: 12.8 GB for
# a step of GPT-2 whose tensors take 11.6 (scripts/LOG.md, 2026-11-26). Compiled steps need less.
KEPT_ON_ACCELERATORS = 1.12


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds at its peak.

    `activations` is everything above the first three: what the forward pass keeps for the backward
    pass, or the optimizer's temporaries. Writing a checkpoint takes none.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        return sum(astuple(self))


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


def approximate_memory(config: Config, compute: Compute) -> Memory:
    """Approximate `estimate_memory` at once, by formula; `micro_batch_size` must be set.

    Activations are those of a model without dropout. For SmolLM2-135M in bfloat16 on a CPU, rows of
    256 tokens, this gives 2.36 GB for one row and 2.98 for four; `estimate_memory` 2.38 and 2.98.
    """
    model = config.model
    train = config.train
    parts = count_parameters_by_part(model)
    weights = 4 * sum(parts.values())
    state = 2 * weights  # two moments in float32, but one for the matrices that Muon updates
    orthogonalizing = 0
    is_half = compute.dtype != torch.float32
    itemsize = 2 if is_half else 4
    if train.optimizer == "muon":
        matrices = parts["attention"] + parts["mlp"]
        state -= 4 * matrices
        orthogonalizing = int(3.4 * itemsize * matrices)  # several copies of most of them
    n_heads = 2 * model.n_head + 2 * model.n_kv_head  # q, k, v and the result
    layer = 3 * model.d_model + 3 * model.d_ff + n_heads * model.head_dim
    if compute.device.type == "cpu" and is_half and config.seq_len < 1024:
        layer += model.n_head * config.seq_len  # attention without a fused kernel
    n_layers = model.n_layer
    kept = 0
    if train.gradient_checkpointing:
        kept = model.n_layer * model.d_model
        n_layers = 1
    per_token = itemsize * (n_layers * layer + kept) + 4 * (model.vocab_size or 0)
    rows = train.micro_batch_size or train.batch_size
    activations = max(rows * config.seq_len * per_token, orthogonalizing)
    return Memory(weights, weights, state, activations)


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
    if compute.device.type != "cpu":
        activations = int(KEPT_ON_ACCELERATORS * activations)
    return Memory(weights, weights, state, activations)
