"""One process or several: several offer the methods of `Group`, which is one process alone.

Rank 0 decides, prints and writes; all compute. Everything that training does otherwise with several
processes is one of these verbs, and extras/parallel has the others' version of them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gptmini.doors import load_replicas
from gptmini.errors import explain_missing_part
from gptmini.model.gpt import GPT
from gptmini.model.optim import orthogonalize
from gptmini.train.gradients import Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gptmini.config.settings import Config, ModelConfig
    from gptmini.machine import Compute, ReceivedSignals
    from gptmini.model.optim import Orthogonalize
    from gptmini.plan.settle import Plan
    from gptmini.runs.directory import Checkpoint, RunDirectory
    from gptmini.runs.tensors import Tensors

P = ParamSpec("P")
T = TypeVar("T")


class Group:
    """The processes that train a model: here a single one, which has nobody to ask."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_sharded = False  # then every rank must take part in every forward pass

    def make_plan(self, requested: Config, run: RunDirectory, started: float) -> Plan:
        """Make the plan of all ranks."""
        from gptmini.plan.settle import make_plan  # noqa: PLC0415 - loads the formats of texts

        return make_plan(requested, run, started)

    # -- facts -------------------------------------------------------------------------------------

    def on_rank_zero(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work` on rank 0 alone and return its result everywhere; if it fails, all do."""
        return work(*args, **kwargs)

    def enter_on_rank_zero(
        self, context: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """Enter a context on rank 0 alone; if that fails, all ranks fail."""
        return context

    def agree_on_signals(self, received: ReceivedSignals) -> tuple[int | None, bool]:
        """Return whether a signal to stop, or to save, has reached any rank."""
        return received.stop, received.save

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Add the numbers of all ranks, on the CPU; exact where the others have zeros."""
        return numbers

    # -- what trains -------------------------------------------------------------------------------

    def create_model(self, config: ModelConfig, compute: Compute) -> GPT:
        """Create a model with the initial weights of the current random seed."""
        return GPT(config).to(compute.device)

    def choose_orthogonalize(self, reduce: str) -> Orthogonalize:
        """Return how Muon orthogonalizes the matrices of one shape."""
        if reduce == "exact":
            return load_replicas().orthogonalize_one_by_one
        return orthogonalize

    def create_gradients(self, model: GPT, reduce: str, n: int) -> Gradients:
        """Return the way of adding gradients for n micro-batches of each rank."""
        if reduce == "exact":
            return load_replicas().ExactGradients(model.parameters(), n, self)
        return Gradients(model.parameters())

    # -- checkpoints, which rank 0 reads and writes ------------------------------------------------

    def read(self, load: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """Read a checkpoint on rank 0; the others get it without its tensors."""
        return load()

    def scatter(self, tensors: Tensors) -> Tensors:
        """Give every rank what it holds of the tensors that rank 0 has."""
        return tensors

    def gather(self, tensors: Tensors) -> Tensors:
        """Return on rank 0 the whole tensors of which each rank holds its part."""
        return tensors


SINGLE_PROCESS = Group()


@contextmanager
def join_group() -> Iterator[Group]:
    """Join the processes that torchrun's variables name; a plain command is alone.

    MachineError without extras/parallel; raises what `join_ranks` does.
    """
    several = os.environ.get("WORLD_SIZE") or os.environ.get("RANK")
    if not several or os.environ.get("WORLD_SIZE") == "1":
        yield SINGLE_PROCESS
        return
    with explain_missing_part("training on several processes"):
        from gptmini.extras.parallel import group as parallel  # noqa: PLC0415 - may be missing
    with parallel.join_ranks() as group:
        yield group
