"""Places a model on the ranks: whole on each of them, or sharded over all.

Both offer the same few methods, and a run picks one when it is built. On a single process the
model is whole, and nothing here goes over a network.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from gptmini.config.settings import ModelConfig, TrainConfig
from gptmini.distributed.gradients import (
    ExactGradients,
    FastGradients,
    Gradients,
    list_micro_batches,
    make_orthogonalize,
)
from gptmini.distributed.group import Group
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer


class Placement(Protocol):
    """How the ranks hold a model: creates it and what trains it."""

    is_sharded: bool  # then every rank must take part in every forward pass

    def create_model(self, config: ModelConfig) -> GPT:
        """Create a model with the initial weights of the current random seed."""

    def create_optimizer(self, model: GPT, train: TrainConfig) -> Optimizer:
        """Create the optimizer of this rank."""

    def create_gradients(self, model: GPT, n: int) -> Gradients:
        """Return the way of adding gradients for n micro-batches of each rank."""

    def list_micro_batches(self, n: int) -> list[int]:
        """Return this rank's n micro-batches, by their number in the step."""

    def enter_inference(self) -> AbstractContextManager[object]:
        """Enter what a forward pass outside of a training step needs."""


class Replicated:
    """A placement in which each rank holds the whole model, as a single process does."""

    is_sharded = False

    def __init__(self, group: Group, compute: Compute, reduce: str) -> None:
        self.group = group
        self.compute = compute
        self.reduce = reduce

    def create_model(self, config: ModelConfig) -> GPT:
        return GPT(config).to(self.compute.device)

    def create_optimizer(self, model: GPT, train: TrainConfig) -> Optimizer:
        orthogonalize = make_orthogonalize(self.group, self.reduce)
        return Optimizer(model, train, self.compute.dtype, orthogonalize)

    def create_gradients(self, model: GPT, n: int) -> Gradients:
        if self.reduce == "exact":
            return ExactGradients(model.parameters(), self.group, n)
        if self.group.world_size > 1:
            return FastGradients(model.parameters(), self.group, n)
        return Gradients(model.parameters())

    def list_micro_batches(self, n: int) -> list[int]:
        return list_micro_batches(n, self.group)

    def enter_inference(self) -> AbstractContextManager[object]:
        return nullcontext()
