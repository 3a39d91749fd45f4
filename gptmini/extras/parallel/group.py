"""The verbs of `Group` for several processes that train one model."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gptmini import console
from gptmini.config.settings import Config, ModelConfig
from gptmini.errors import ConfigError, DivergedError, GptminiError, RankError, Stopped, shorten
from gptmini.extras.parallel.planning import plan_on_all_ranks
from gptmini.extras.parallel.ranks import Ranks
from gptmini.extras.parallel.replicas import ExactGradients, FastGradients, share_orthogonalize
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Orthogonalize
from gptmini.plan.settle import Plan
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.tensors import Tensors
from gptmini.train.gradients import Gradients

if TYPE_CHECKING:
    from gptmini.extras.parallel.sharding import Shards

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# gloo and NCCL raise plain RuntimeErrors when a connection breaks; only their text tells.
CONNECTION_ERROR = re.compile("gloo|NCCL|[Cc]onnection|Socket|Broken pipe")


class ParallelGroup(Ranks):
    """A process among several, which holds the model whole, or rows of every tensor."""

    device: torch.device
    shards: "Shards | None" = None

    def make_plan(self, requested: Config, run: RunDirectory, started: float) -> Plan:
        plan = plan_on_all_ranks(requested, run, started, self)
        self.device = plan.machine.compute.device
        self.is_sharded = plan.config.train.shard
        if self.is_sharded:
            # Once the ranks are connected: loaded before, it makes torch warn when they part.
            from gptmini.extras.parallel.sharding import Shards  # noqa: PLC0415

            self.shards = Shards(self.device, self.world_size)
        return plan

    # -- what trains -------------------------------------------------------------------------------

    def create_model(self, config: ModelConfig, compute: Compute) -> GPT:
        """Create the model; of one that is sharded, rank 0 draws the weights for all."""
        if self.shards is None:
            return super().create_model(config, compute)
        initial = GPT(config).state_dict() if self.rank == 0 else {}
        model = self.shards.create_blank(config, compute)
        model.load_state_dict(self.scatter(initial))
        return model

    def choose_orthogonalize(self, reduce: str) -> Orthogonalize:
        if self.shards is not None:
            return self.shards.orthogonalize
        return share_orthogonalize(super().choose_orthogonalize(reduce), self)

    def create_gradients(self, model: GPT, reduce: str, n: int) -> Gradients:
        if self.shards is not None:
            return self.shards.create_gradients(model)
        if reduce == "exact":
            return ExactGradients(model.parameters(), n, self)
        return FastGradients(model.parameters(), n)

    # -- checkpoints -------------------------------------------------------------------------------

    def read(self, load: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        found: Checkpoint | None = None

        def load_and_tell() -> Checkpoint | None:
            nonlocal found
            found = load()
            return found and replace(found, model={}, optimizer={})

        told = self.on_rank_zero(load_and_tell)
        return found or told

    def scatter(self, tensors: Tensors) -> Tensors:
        """Send whole tensors, one at a time, of which the ranks keep all or their rows."""
        facts = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        received: Tensors = {}
        for name, (shape, dtype) in self.broadcast_object(facts).items():
            if self.rank == 0:
                tensor = tensors[name].to(self.device)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            if self.shards is not None and shape:
                received[name] = self.shards.keep_rows(tensor)
            else:
                dist.broadcast(tensor, 0)
                received[name] = tensor
        return received

    def gather(self, tensors: Tensors) -> Tensors:
        """Return the whole tensors; RankError naming a rank whose own differ from rank 0's.

        Of sharded ones, one at a time is whole on all ranks, and rank 0 keeps it.
        """
        if self.shards is not None:
            gathered = {}
            for name, tensor in tensors.items():
                whole = self.shards.gather(tensor)
                if self.rank == 0:
                    gathered[name] = whole.cpu()
            return gathered
        sums = {
            name: tensor.view(torch.int32).sum(dtype=torch.int64).item()
            for name, tensor in tensors.items()
            if tensor.dtype == torch.float32
        }
        self.check_same(sums, "nothing of this step was saved; run the same command again")
        return tensors


@contextmanager
def _disconnect_after_failure() -> Iterator[None]:
    """Disconnect from the others, as gloo's threads abort a process that ends while they run."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # a connection that is broken
            dist.destroy_process_group()
        raise


@contextmanager
def _end_at_signals() -> Iterator[None]:
    """Let a signal end the process: torch waits in C++, where no handler of Python's is called."""
    with ExitStack() as restored:
        for number in (signal.SIGINT, signal.SIGTERM):
            in_main = threading.current_thread() is threading.main_thread()
            if in_main and signal.getsignal(number) != signal.SIG_IGN:
                before = signal.signal(number, signal.SIG_DFL)
                restored.callback(signal.signal, number, before)
        yield


def _read_number(name: str, end: int) -> int:
    """Read a variable of torchrun's; ConfigError if it is not a number below `end`."""
    text = os.environ[name]
    if not text.isdecimal() or int(text) >= end:
        raise ConfigError(f"{name}: must be a number below {end}, not {shorten(text)}")
    return int(text)


@contextmanager
def join_ranks() -> Iterator[ParallelGroup]:
    """Join the ranks that torchrun's variables name.

    ConfigError for variables that are wrong or set in part, RankError if another rank does not
    come, or no longer answers.
    """
    names = [name for name in TORCHRUN_VARIABLES if os.environ.get(name)]
    missing = [name for name in TORCHRUN_VARIABLES if name not in names]
    if missing:
        raise ConfigError(
            f"{missing[0]}: not set, but {names[0]} is; start several processes with torchrun"
        )
    world_size = _read_number("WORLD_SIZE", 1 << 16)
    rank = _read_number("RANK", world_size)
    local_rank = _read_number("LOCAL_RANK", world_size)
    _read_number("MASTER_PORT", 1 << 16)
    group = ParallelGroup(rank, world_size, local_rank)
    if rank > 0:
        console.silence()
    try:
        console.say(f"waiting for all {world_size} processes")
        with _end_at_signals():
            group.connect()
        with _disconnect_after_failure():
            yield group
        # Wait for all: a rank that leaves earlier would break the connections of the others.
        group.all_gather_object(None)
        dist.destroy_process_group()
    except (DivergedError, Stopped) as failure:  # raised by every rank, at the same step
        if rank > 0:
            failure.lines = ()
        raise
    except GptminiError as failure:
        if rank > 0 and not isinstance(failure, RankError):
            failure.lines = tuple(f"rank {rank}: {line}" for line in failure.lines)
        raise
    except RuntimeError as failure:
        if not isinstance(failure, dist.DistError) and not CONNECTION_ERROR.search(str(failure)):
            raise
        reason = str(failure).splitlines()[0].partition(". This is")[0]
        raise RankError(
            f"rank {rank}: another rank does not answer ({reason}); run the same command again to "
            f"resume from the last checkpoint"
        ) from None
