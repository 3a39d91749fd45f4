"""Connects the processes of one training run, which torchrun starts: rank 0 decides, all compute.

Small facts travel as JSON through torchrun's key-value store. A rank that waits there polls, so it
still answers signals, and it can name the rank that it waits for. Tensors travel through
collectives. A plain command is a group of one, for which all of this does nothing.

Every rank must call these methods in the same order. A rank that fails alone would leave the others
waiting in a collective, so whatever may fail on one rank runs in `on_rank_zero` or `on_all_ranks`.
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
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gptmini import console
from gptmini.errors import (
    ConfigError,
    DivergedError,
    GptminiError,
    MachineError,
    RankError,
    Stopped,
)
from gptmini.files import IS_WINDOWS
from gptmini.machine import ReceivedSignals, catch_signals

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT_SECONDS = 120  # to wait for the other ranks at the start
HEARTBEAT_INTERVAL_SECONDS = 1.0
HEARTBEAT_TIMEOUT_SECONDS = 60  # without a heartbeat, after which a rank counts as lost
# Further seconds in which whoever waits for a lost rank may say so, before the process is ended.
TIME_TO_NOTICE_SECONDS = 15
COLLECTIVE_TIMEOUT_SECONDS = 600
# gloo and NCCL raise plain RuntimeErrors when a connection breaks; only their text tells.
CONNECTION_ERROR = re.compile("gloo|NCCL|[Cc]onnection|Socket|Broken pipe")

T = TypeVar("T")
_NO_ANSWER = "no longer answers; run the same command again to resume from the last checkpoint"


class RemoteFailure(GptminiError):  # noqa: N818 - the error is another's
    """The failure of another rank, which prints it; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class Group:
    """This process and those it trains with; rank 0 decides, prints and writes."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, local_rank: int = 0, store: Any = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank  # among the ranks of its machine
        self.store = store
        self._exchanges = 0  # made so far, for keys that are never used twice

    def select_accelerator(self, device: torch.device) -> None:
        """Give each rank of a machine an accelerator of its own.

        Raises MachineError if there are fewer, or if ranks cannot exchange their tensors.
        """
        if device.type == "cpu" or self.world_size == 1:
            return
        if f"{device.type}:" not in dist.get_backend_config():
            raise MachineError(
                f"--device {device.type}: several processes cannot train on it here, for want of "
                f"NCCL or XCCL; start a single one, or use --device cpu"
            )
        count = torch.accelerator.device_count()
        # A rank that sees a single one has it for itself: Slurm can hide those of the others.
        if self.local_rank >= count > 1:
            raise MachineError(
                f"{count} devices for at least {self.local_rank + 1} ranks on this machine; start "
                f"one rank per device, or use --device cpu"
            )
        torch.accelerator.set_device_index(self.local_rank % count)

    # -- facts, through the store ------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, by rank.

        RankError for a rank whose heartbeat stops before its value arrives.
        """
        if self.world_size == 1:
            return [value]
        self._exchanges += 1
        prefix = str(self._exchanges)
        self.store.set(f"{prefix}/{self.rank}", json.dumps(value))
        return [self._wait_for_value(f"{prefix}/{rank}", rank) for rank in range(self.world_size)]

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank; what the others pass is ignored."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its JSON result everywhere; if it fails, all do."""
        result: T | None = None
        failure: Exception | None = None
        if self.rank == 0:
            result, failure = _attempt(work)
        results = self._gather_or_fail(result, failure)
        return results[0]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's own result; if one fails, all do."""
        result, failure = _attempt(work)
        self._gather_or_fail(None, failure)
        return cast(T, result)  # it has not failed

    def on_local_rank_zero_first(self, work: Callable[[], T]) -> T:
        """Run `work` on one rank of each machine, then on the others, which find its files."""
        if self.local_rank == 0:
            result = self.on_all_ranks(work)
            self.on_all_ranks(_do_nothing)  # while the others work
        else:
            self.on_all_ranks(_do_nothing)  # while the first one works
            result = self.on_all_ranks(work)
        return result

    def _gather_or_fail(self, result: Any, failure: Exception | None) -> list[Any]:
        """Return the JSON results of all ranks; raise if one has failed.

        The rank that failed raises its own error and prints it. The others end silently with its
        exit code, so that the user reads each failure once.
        """
        exit_code = getattr(failure, "exit_code", MachineError.exit_code) if failure else None
        outcomes = self.all_gather_object([result, exit_code])
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

    def _wait_for_value(self, key: str, rank: int) -> Any:
        """Poll for a rank's value as long as its heartbeat goes on.

        store.wait() would block in C++, where no signal is answered, and could not tell a slow rank
        from a dead one.
        """
        last_beat = b""
        last_heard = time.monotonic()
        while not self.store.check([key]):
            time.sleep(0.005)
            beat = self.read_heartbeat(rank)
            if beat != last_beat:
                last_beat = beat
                last_heard = time.monotonic()
            elif time.monotonic() - last_heard > HEARTBEAT_TIMEOUT_SECONDS:
                raise self.lost_ranks_error([rank])
        return json.loads(self.store.get(key))

    def read_heartbeat(self, rank: int) -> bytes:
        """Return the counter that a rank increments; empty before its first heartbeat."""
        key = f"beat/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def lost_ranks_error(self, lost: list[int], reason: str = _NO_ANSWER) -> RankError:
        """Return the error that names the lost ranks; the first rank that is left prints it."""
        left = set(range(self.world_size)) - set(lost)
        speaker = min(left, default=self.rank)
        if self.rank != speaker:
            return RankError()
        names = [f"rank {rank} ({self.store.get(f'joined/{rank}').decode()})" for rank in lost]
        return RankError(f"{' and '.join(names)} {reason}" if names else f"the ranks: {reason}")

    def find_lost_ranks(self, reason: str) -> RankError:
        """Return the error for a broken connection, naming the ranks whose heartbeats have stopped.

        A broken connection does not say which rank is gone: gloo names a socket, and every rank
        that has noticed leaves and breaks more connections.
        """
        try:
            before = [self.read_heartbeat(rank) for rank in range(self.world_size)]
            time.sleep(3 * HEARTBEAT_INTERVAL_SECONDS)
            lost = [
                rank for rank in range(self.world_size) if self.read_heartbeat(rank) == before[rank]
            ]
            # The first list counts: whoever notices later would also find those silent who noticed
            # first, and left.
            lost = json.loads(self.store.compare_set("lost", "", json.dumps(lost)))
            return self.lost_ranks_error(lost, _NO_ANSWER if lost else reason)
        except dist.DistError:  # the store has gone with its machine
            return _lost_store_error()

    # -- tensors, through collectives --------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks, equal in shape: (...) -> (W, ...)."""
        if self.world_size == 1:
            return tensor[None]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)  # (W, ...)

    def all_reduce_sum(self, numbers: list[float]) -> float:
        """Add numbers of which each rank has some, the others as 0, in the order of the list.

        Adding zeros is exact, so the sum has the same bits on any number of ranks.
        """
        gathered = self.all_gather(torch.tensor(numbers, dtype=torch.float64))  # (W, N)
        return functools.reduce(operator.add, gathered.sum(0).tolist())

    def agree_on_signals(self, received: ReceivedSignals) -> tuple[int | None, bool]:
        """Return whether a signal to stop, or to save, has reached any rank."""
        flags = self.all_gather(torch.tensor([received.stop or 0, received.save]))  # (W, 2)
        stop, save = flags.amax(0).tolist()
        return stop or None, bool(save)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise RankError naming a rank whose weights differ from rank 0's in a bit."""
        if self.world_size > 1:
            sums = {
                name: tensor.view(torch.int32).sum(dtype=torch.int64).item()
                for name, tensor in weights.items()
            }
            self.check_same(sums, "nothing of this step was saved; run the same command again")

    @contextmanager
    def enter_on_rank_zero(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter a context on rank 0 alone; if that fails, all ranks fail."""
        with ExitStack() as stack:

            def enter() -> None:  # without the context's own value, which may not be JSON
                stack.enter_context(context)

            self.on_rank_zero(enter)
            yield


SINGLE_PROCESS = Group()


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `work` and no failure, or the failure; bugs raise as always."""
    try:
        return work(), None
    except (GptminiError, OSError) as failure:
        return None, failure


def _do_nothing() -> None:
    """Take part in an exchange in which other ranks work."""


@contextmanager
def join_group() -> Iterator[Group]:
    """Join the ranks that torchrun's variables name; a plain command is alone.

    ConfigError for variables that are set in part, MachineError for a PyTorch without
    torch.distributed, RankError if a rank never joins or is lost.
    """
    names = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    if not {"RANK", "WORLD_SIZE"} & set(names):
        yield SINGLE_PROCESS
        return
    missing = [name for name in TORCHRUN_VARIABLES if name not in names]
    if missing:
        raise ConfigError(
            f"{missing[0]}: not set, but {names[0]} is; start several processes with torchrun"
        )
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    if world_size == 1:
        yield Group(rank, world_size, local_rank)
        return
    if not dist.is_available():
        raise MachineError(
            "this PyTorch lacks torch.distributed; start a single process, without torchrun"
        )
    group = Group(rank, world_size, local_rank, _create_store(rank))
    if rank > 0:
        console.silence()
    ended = threading.Event()
    try:
        _connect_all_ranks(group, ended)
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
        # torchrun sends SIGTERM as soon as one rank is gone, but the message must still be found.
        with catch_signals():
            raise group.find_lost_ranks(str(failure).splitlines()[0]) from None
    finally:
        ended.set()
        _leave(group)


def _create_store(rank: int) -> Any:
    """Connect to torchrun's store, or to one that rank 0 serves.

    Keys carry the number of torchrun's restart, so that a restart finds none of the old values.
    """
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not torchrun_serves,
        timeout=timedelta(seconds=JOIN_TIMEOUT_SECONDS),
        wait_for_workers=False,  # they are counted in _connect_all_ranks
        multi_tenant=True,
        use_libuv=not IS_WINDOWS,  # whose wheels of torch lack it
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(f"gptmini/{attempt}", store)  # type: ignore[attr-defined]


def _connect_all_ranks(group: Group, ended: threading.Event) -> None:
    """Wait for all ranks, connect them, and start the heartbeat of this one."""
    store = group.store
    deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
    store.set(f"joined/{group.rank}", f"process {os.getpid()} on {platform.node()}")
    names = [f"joined/{rank}" for rank in range(group.world_size)]
    while not store.check(names):
        if time.monotonic() > deadline:
            raise _missing_ranks_error(group, names)
        time.sleep(0.05)
    # A connection of its own: the main thread may hold the other one while it waits.
    heartbeat = threading.Thread(
        target=_send_heartbeats, args=(group.rank, store.clone(), ended), daemon=True
    )
    heartbeat.start()
    observer = Group(group.rank, group.world_size, group.local_rank, store.clone())
    threading.Thread(target=_watch_ranks, args=(observer, ended), daemon=True).start()
    backends = "cpu:gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():  # Windows has no NCCL
        backends += ",cuda:nccl"
    if torch.xpu.is_available() and dist.is_xccl_available():
        backends += ",xpu:xccl"
    dist.init_process_group(
        backends,
        store=dist.PrefixStore("collectives", store),  # type: ignore[attr-defined]
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )


def _missing_ranks_error(group: Group, names: list[str]) -> RankError:
    """Return the error that counts the ranks that joined; the first of them prints it."""
    joined = [rank for rank, name in enumerate(names) if group.store.check([name])]
    if group.rank != joined[0]:
        return RankError()
    return RankError(
        f"{len(joined)} of {group.world_size} ranks joined within {JOIN_TIMEOUT_SECONDS} seconds; "
        f"find the failure of the others above, or on their machines"
    )


def _send_heartbeats(rank: int, store: Any, ended: threading.Event) -> None:
    """Count up in the store until the process ends, so that the others see it alive.

    A thread of its own beats through long computations and blocked collectives, and stops only with
    the process, also when that is stopped or its machine hangs.
    """
    count = 0
    with suppress(dist.DistError):  # the store is gone, and with it whoever might look
        while not ended.wait(HEARTBEAT_INTERVAL_SECONDS):
            count += 1
            store.set(f"beat/{rank}", str(count))


def _watch_ranks(group: Group, ended: threading.Event) -> None:
    """End this process, with a message, if a rank is lost while it waits for it in a collective.

    NCCL does not notice that a rank of the same machine is gone: the main thread would wait for the
    GPU until torch's watchdog kills the process, after COLLECTIVE_TIMEOUT_SECONDS and without our
    message. It cannot be interrupted there, so this thread ends the process for it. Nothing is
    lost by that: checkpoints are whole or absent.
    """
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    beats = dict.fromkeys(others, b"")
    # Looks since the last new beat, not seconds: while this process is stopped, it looks at nobody.
    silent_looks = dict.fromkeys(others, 0)
    limit = (HEARTBEAT_TIMEOUT_SECONDS + TIME_TO_NOTICE_SECONDS) / HEARTBEAT_INTERVAL_SECONDS
    try:
        while not ended.wait(HEARTBEAT_INTERVAL_SECONDS):
            for rank in others:
                beat = group.read_heartbeat(rank)
                silent_looks[rank] = silent_looks[rank] + 1 if beat == beats[rank] else 0
                beats[rank] = beat
            lost = [rank for rank in others if silent_looks[rank] > limit]
            if lost and not ended.is_set():
                error = group.lost_ranks_error(lost)
                console.end_process(error.lines, error.exit_code)
    except dist.DistError:  # the store has gone, with rank 0 or its machine; or all is over
        if not ended.wait(TIME_TO_NOTICE_SECONDS):
            error = _lost_store_error()
            console.end_process(error.lines, error.exit_code)


def _lost_store_error() -> RankError:
    return RankError(f"{os.environ['MASTER_ADDR']}, the machine of rank 0, {_NO_ANSWER}")


def _leave(group: Group) -> None:
    """Let the others read what is in the store before rank 0, which may serve it, ends."""
    deadline = time.monotonic() + 3 * HEARTBEAT_INTERVAL_SECONDS
    with suppress(dist.DistError):
        group.store.set(f"left/{group.rank}", "")
        names = [f"left/{rank}" for rank in range(group.world_size)]
        while group.rank == 0 and time.monotonic() < deadline and not group.store.check(names):
            time.sleep(0.01)
