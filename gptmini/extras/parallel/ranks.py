"""Connects the processes of one training run, which torchrun starts: rank 0 decides, all compute.

All that they exchange travels through collectives: tensors, and small facts, which are pickled.

Every rank must call these methods in the same order. A rank that fails alone would break the
connections of the others, so whatever may fail on one rank runs in `on_rank_zero` or
`on_all_ranks`, which tell all of them. A rank that is killed is reported by torchrun; here, the
others end when their connection breaks or a collective has waited too long.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gptmini.errors import GptminiError, MachineError, RankError
from gptmini.files import IS_WINDOWS
from gptmini.machine import ReceivedSignals
from gptmini.train.group import Group

COLLECTIVE_TIMEOUT_SECONDS = 600
# Facts wait longer: meanwhile one rank may prepare a text.
FACTS_TIMEOUT_SECONDS = 6 * 3600

P = ParamSpec("P")
T = TypeVar("T")


class RemoteFailure(GptminiError):  # noqa: N818 - the error is another's
    """The failure of another rank, which prints it; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class Ranks(Group):
    """This process and those it trains with; rank 0 decides, prints and writes."""

    def __init__(self, rank: int, world_size: int, local_rank: int = 0) -> None:
        super().__init__(rank, world_size)
        self.local_rank = local_rank  # among the ranks of its machine
        self._facts_group: dist.ProcessGroup | None = None  # with a timeout of its own

    def connect(self) -> None:
        """Connect to the other ranks; RuntimeError if one does not come."""
        backends = "cpu:gloo"
        if torch.cuda.is_available() and dist.is_nccl_available():  # Windows has no NCCL
            backends += ",cuda:nccl"
        if torch.xpu.is_available() and dist.is_xccl_available():
            backends += ",xpu:xccl"
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
        url = f"env://?use_libuv={int(not IS_WINDOWS)}"  # whose wheels of torch lack it
        found = dist.rendezvous(url, timeout=timeout)  # type: ignore[attr-defined]
        store, rank, world_size = next(found)
        # torchrun's own store outlives a restart: the old addresses in it must not be found again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            backends, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        facts_timeout = timedelta(seconds=FACTS_TIMEOUT_SECONDS)
        self._facts_group = dist.new_group(backend="gloo", timeout=facts_timeout)

    def select_accelerator(self, device: torch.device) -> None:
        """Give each rank of a machine an accelerator of its own.

        Raises MachineError if there are fewer, or if ranks cannot exchange their tensors.
        """
        if device.type == "cpu":
            return
        if f"{device.type}:" not in dist.get_backend_config():
            raise MachineError(
                f"--device {device.type}: several processes need NCCL or XCCL; start a single one, "
                f"or use --device cpu"
            )
        count = torch.accelerator.device_count()
        # A rank that sees a single one has it for itself: Slurm can hide those of the others.
        if self.local_rank >= count > 1:
            raise MachineError(
                f"{count} devices for at least {self.local_rank + 1} ranks on this machine; start "
                f"one rank per device, or use --device cpu"
            )
        torch.accelerator.set_device_index(self.local_rank % count)

    # -- facts -------------------------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, self._facts_group)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank; what the others pass is ignored."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def on_rank_zero(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        result: T | None = None
        failure: Exception | None = None
        if self.rank == 0:
            result, failure = _attempt(lambda: work(*args, **kwargs))
        return self._gather_or_fail(result, failure)[0]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's own result; if one fails, all do."""
        result, failure = _attempt(work)
        self._gather_or_fail(None, failure)
        return cast(T, result)  # it has not failed

    def on_local_rank_zero_first(self, work: Callable[[], T]) -> T:
        """Run `work` on one rank of each machine, then on the others, which find its files."""
        if self.local_rank == 0:
            result = self.on_all_ranks(work)
            self.on_all_ranks(lambda: None)  # while the others work
        else:
            self.on_all_ranks(lambda: None)  # while the first one works
            result = self.on_all_ranks(work)
        return result

    def _gather_or_fail(self, result: Any, failure: Exception | None) -> list[Any]:
        """Return the results of all ranks; raise if one has failed.

        The rank that failed raises its own error and prints it. The others end silently with its
        exit code, so that the user reads each failure once.
        """
        exit_code = getattr(failure, "exit_code", MachineError.exit_code) if failure else None
        try:
            outcomes = self.all_gather_object([result, exit_code])
        except RuntimeError:
            if failure is not None:  # the same signal may have ended the others already
                raise failure from None
            raise
        if failure is not None:
            raise failure
        for _, remote_exit_code in outcomes:
            if remote_exit_code is not None:
                raise RemoteFailure(remote_exit_code)
        return [remote_result for remote_result, _ in outcomes]

    def check_same(self, facts: Mapping[str, Any], remedy: str) -> None:
        """Raise RankError naming each rank and key that differ from rank 0's, and the remedy."""
        first, *others = self.all_gather_object(dict(facts))
        lines = []
        for rank, remote in enumerate(others, start=1):
            for key in first | remote:
                if remote.get(key) != first.get(key):
                    lines.append(
                        f"rank {rank}: {key} is {remote.get(key)}, on rank 0 {first.get(key)}; "
                        f"{remedy}"
                    )
        if lines:
            raise RankError(*lines) if self.rank == 0 else RankError()

    # -- tensors -----------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks, equal in shape: (...) -> (W, ...)."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)  # (W, ...)

    def all_reduce(self, numbers: Tensor) -> Tensor:
        return self.all_gather(numbers).sum(0)

    def agree_on_signals(self, received: ReceivedSignals) -> tuple[int | None, bool]:
        flags = self.all_gather(torch.tensor([received.stop or 0, received.save]))  # (W, 2)
        stop, save = flags.amax(0).tolist()
        return stop or None, bool(save)

    @contextmanager
    def enter_on_rank_zero(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            self.on_rank_zero(stack.enter_context, context)
            yield


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `work` and no failure, or the failure; bugs raise as always."""
    try:
        return work(), None
    except (GptminiError, OSError) as failure:
        return None, failure
