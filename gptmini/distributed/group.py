"""The processes of one training, its ranks: how they find each other, agree, and fail.

torchrun starts them. Facts travel as JSON through torchrun's store, where a rank can wait for long
and still answer signals; tensors travel through collectives. A plain command is one rank, for which
all of this does nothing.
"""

import functools
import json
import operator
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gptmini import console
from gptmini.errors import (
    ConfigError,
    DivergedError,
    GptminiError,
    MachineError,
    RankError,
    Stopped,
)
from gptmini.machine import ReceivedSignals, catch_signals

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT_SECONDS = 120  # seconds that ranks wait for each other at the start
HEARTBEAT_TIMEOUT_SECONDS = 60  # seconds without a heartbeat, after which a rank counts as gone
COLLECTIVE_TIMEOUT_SECONDS = 600  # seconds that a collective may take
HEARTBEAT_INTERVAL_SECONDS = 1.0  # seconds between heartbeats

T = TypeVar("T")
_NO_ANSWER = "no longer answers; run the same command again to resume from the last checkpoint"


class RemoteFailure(GptminiError):  # noqa: N818 - the error is another's
    """The failure of another rank, which prints it; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class Group:
    """This process among those that train together; rank 0 decides, prints and writes."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, is_local_rank_zero: bool = True, store: Any = None
    ) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        self.is_local_rank_zero = is_local_rank_zero  # of its machine
        self._exchanges = 0

    # -- facts, through the store ------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """The JSON value of every rank, by rank; waits for each as long as its heart beats."""
        if self.world_size == 1:
            return [value]
        self._exchanges += 1
        self.store.set(f"{self._exchanges}/{self.rank}", json.dumps(value))
        return [
            self._wait_for_value(f"{self._exchanges}/{rank}", rank)
            for rank in range(self.world_size)
        ]

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, as JSON carries it; if it fails there, all ranks end."""
        return self.on_all_ranks(work if self.rank == 0 else None)[0]

    def on_local_rank_zero_first(self, work: Callable[[], T]) -> T:
        """Work that leaves files for the other ranks of a machine, so one of them goes first."""
        done: list[T] = []

        def keep() -> None:
            done.append(work())

        self.on_all_ranks(keep if self.is_local_rank_zero else None)
        self.on_all_ranks(None if self.is_local_rank_zero else keep)
        return done[0]

    def on_all_ranks(self, work: Callable[[], Any] | None) -> list[Any]:
        """The results of all ranks; a rank that fails makes all fail with its lines."""
        failure: Exception | None = None
        result = code = None
        try:
            result = None if work is None else work()
        except (GptminiError, OSError) as error:
            failure, code = error, getattr(error, "exit_code", MachineError.exit_code)
        outcomes = self.all_gather_object([result, code])
        if failure is not None:
            raise failure
        for _, theirs in outcomes:
            if theirs is not None:
                raise RemoteFailure(theirs)
        return [result for result, _ in outcomes]

    def check_same(self, facts: Mapping[str, Any], remedy: str) -> None:
        """RankError naming each rank and key that differ from rank 0's, and what to do."""
        first, *others = self.all_gather_object(dict(facts))
        lines = [
            f"rank {rank}: {key} is {theirs.get(key)}, on rank 0 {first.get(key)}; {remedy}"
            for rank, theirs in enumerate(others, start=1)
            for key in first | theirs
            if theirs.get(key) != first.get(key)
        ]
        if lines:
            raise RankError(*lines if self.rank == 0 else ())

    def _wait_for_value(self, key: str, rank: int) -> Any:
        last, heard = b"", time.monotonic()
        while not self.store.check([key]):
            time.sleep(0.005)
            beat = self._read_heartbeat(rank)
            if beat != last:
                last, heard = beat, time.monotonic()
            elif time.monotonic() - heard > HEARTBEAT_TIMEOUT_SECONDS:
                raise self.lost_ranks_error([rank])
        return json.loads(self.store.get(key))

    def _read_heartbeat(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def lost_ranks_error(self, gone: list[int], reason: str = _NO_ANSWER) -> RankError:
        """The failure that names the ranks that are gone; the first one left prints it."""
        speaker = min(set(range(self.world_size)) - set(gone), default=self.rank)
        names = [f"rank {rank} ({self.store.get(f'joined/{rank}').decode()})" for rank in gone]
        line = f"{' and '.join(names)} {reason}" if names else f"the ranks: {reason}"
        return RankError(*[line] * (self.rank == speaker))

    def find_lost_ranks(self, reason: str) -> RankError:
        """The failure of a connection: whose hearts have stopped, as the first to notice finds."""
        try:
            before = [self._read_heartbeat(rank) for rank in range(self.world_size)]
            time.sleep(3 * HEARTBEAT_INTERVAL_SECONDS)
            gone = [
                rank
                for rank in range(self.world_size)
                if self._read_heartbeat(rank) == before[rank]
            ]
            # Whoever notices later would also count those who noticed first, and left.
            gone = json.loads(self.store.compare_set("lost", "", json.dumps(gone)))
            return self.lost_ranks_error(gone, _NO_ANSWER if gone else reason)
        except dist.DistError:  # the store has gone with its machine
            return RankError(f"{os.environ['MASTER_ADDR']}, the machine of rank 0, {_NO_ANSWER}")

    # -- tensors, through collectives --------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, equal in shape: (...) -> (ranks, ...)."""
        if self.world_size == 1:
            return tensor[None]
        everywhere = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(everywhere, tensor.contiguous())
        return torch.stack(everywhere)

    def all_reduce_sum(self, numbers: list[float]) -> float:
        """The sum of numbers that one rank has each, the others as 0, from the first number on."""
        everywhere = self.all_gather(torch.tensor(numbers, dtype=torch.float64))
        return functools.reduce(operator.add, everywhere.sum(0).tolist())

    def agree_on_signals(self, received: ReceivedSignals) -> tuple[int | None, bool]:
        """Whether a signal to stop, or to save, has reached any rank."""
        flags = self.all_gather(torch.tensor([received.stop or 0, received.save]))  # (ranks, 2)
        stop, save = flags.amax(0).tolist()
        return stop or None, bool(save)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """RankError naming a rank whose weights are not those of rank 0, to the bit."""
        if self.world_size > 1:
            sums = {
                name: tensor.view(torch.int32).sum(dtype=torch.int64).item()
                for name, tensor in weights.items()
            }
            self.check_same(sums, "nothing of this step was saved; run the same command again")

    @contextmanager
    def enter_on_rank_zero(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """A context that rank 0 alone enters; if that fails, all ranks end."""
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(context)

            self.on_rank_zero(enter)
            yield


SINGLE_PROCESS = Group()


@contextmanager
def join_group() -> Iterator[Group]:
    """The ranks that torchrun's variables name; a plain command is alone.

    ConfigError for variables that are set in part, RankError if a rank never comes or goes.
    """
    given = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        yield SINGLE_PROCESS
        return
    if missing := [name for name in TORCHRUN_VARIABLES if name not in given]:
        raise ConfigError(
            f"{missing[0]}: not set, but {given[0]} is; start several processes with torchrun"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = Group(
        rank,
        world_size,
        os.environ["LOCAL_RANK"] == "0",
        _create_store(rank) if world_size > 1 else None,
    )
    if world_size == 1:
        yield group
        return
    if rank > 0:
        console.silence()
    ended = threading.Event()
    try:
        _connect_all_ranks(group, ended)
        yield group
        group.all_gather_object(
            None
        )  # whoever leaves earlier would break the connections of the others
        dist.destroy_process_group()
    except (DivergedError, Stopped) as failure:  # every rank's, at the same step
        failure.lines = failure.lines if rank == 0 else ()
        raise
    except GptminiError as failure:
        if rank > 0 and not isinstance(failure, RankError):
            failure.lines = tuple(f"rank {rank}: {line}" for line in failure.lines)
        raise
    except RuntimeError as failure:
        if not isinstance(failure, dist.DistError) and not _CONNECTION_ERROR.search(str(failure)):
            raise
        with catch_signals():  # torchrun sends SIGTERM as soon as one rank is gone
            raise group.find_lost_ranks(str(failure).splitlines()[0]) from None
    finally:
        ended.set()
        _leave(group)


_CONNECTION_ERROR = re.compile(
    "gloo|NCCL|[Cc]onnection|Socket|Broken pipe"
)  # gloo's errors have no type


def _create_store(rank: int) -> Any:
    """The store of torchrun, or one that rank 0 serves; a restart begins with an empty one."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not served,
        timeout=timedelta(seconds=JOIN_TIMEOUT_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return PrefixStore(f"gptmini/{attempt}", store)


def _connect_all_ranks(group: Group, ended: threading.Event) -> None:
    """Wait for all ranks, connect them, and start the heart of this one."""
    store, until = group.store, time.monotonic() + JOIN_TIMEOUT_SECONDS
    store.set(f"joined/{group.rank}", f"process {os.getpid()} on {platform.node()}")
    names = [f"joined/{rank}" for rank in range(group.world_size)]
    while not store.check(names):
        if time.monotonic() > until:
            joined = [rank for rank, name in enumerate(names) if store.check([name])]
            line = (
                f"{len(joined)} of {group.world_size} ranks joined within {JOIN_TIMEOUT_SECONDS} seconds; find the "
                f"failure of the others above, or on their machines"
            )
            raise RankError(*[line] * (group.rank == joined[0]))
        time.sleep(0.05)
    threading.Thread(
        target=_send_heartbeats, args=(group.rank, store.clone(), ended), daemon=True
    ).start()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore("collectives", store),
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )


def _send_heartbeats(rank: int, store: Any, ended: threading.Event) -> None:
    """Show the others that this process lives, until it ends."""
    count = 0
    with suppress(dist.DistError):  # the store is gone, and with it whoever might look
        while not ended.wait(HEARTBEAT_INTERVAL_SECONDS):
            count += 1
            store.set(f"beat/{rank}", str(count))


def _leave(group: Group) -> None:
    """Let the others read what is in the store before rank 0, which may serve it, ends."""
    until = time.monotonic() + 3 * HEARTBEAT_INTERVAL_SECONDS
    with suppress(dist.DistError):
        group.store.set(f"left/{group.rank}", "")
        names = [f"left/{rank}" for rank in range(group.world_size)]
        while group.rank == 0 and time.monotonic() < until and not group.store.check(names):
            time.sleep(0.01)
