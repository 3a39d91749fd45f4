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
from gptmini.machine import Received, signals

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOINING = 120  # seconds that ranks wait for each other at the start
SILENCE = 60  # seconds without a heartbeat, after which a rank counts as gone
TIMEOUT = 600  # seconds that a collective may take
BEAT = 1.0  # seconds between heartbeats

T = TypeVar("T")
_GONE = "no longer answers; run the same command again to resume from the last checkpoint"


class Told(GptminiError):  # noqa: N818 - the error is another's
    """The failure of another rank, which prints it; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class Ranks:
    """This process among those that train together; rank 0 decides, prints and writes."""

    def __init__(
        self, rank: int = 0, size: int = 1, is_first_here: bool = True, store: Any = None
    ) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.is_first_here = is_first_here  # of its machine
        self._exchanges = 0

    # -- facts, through the store ------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """The JSON value of every rank, by rank; waits for each as long as its heart beats."""
        if self.size == 1:
            return [value]
        self._exchanges += 1
        self.store.set(f"{self._exchanges}/{self.rank}", json.dumps(value))
        return [self._wait(f"{self._exchanges}/{rank}", rank) for rank in range(self.size)]

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, as JSON carries it; if it fails there, all ranks end."""
        return self.together(work if self.rank == 0 else None)[0]

    def once_per_machine(self, work: Callable[[], T]) -> T:
        """Work that leaves files for the other ranks of a machine, so one of them goes first."""
        done: list[T] = []

        def keep() -> None:
            done.append(work())

        self.together(keep if self.is_first_here else None)
        self.together(None if self.is_first_here else keep)
        return done[0]

    def together(self, work: Callable[[], Any] | None) -> list[Any]:
        """The results of all ranks; a rank that fails makes all fail with its lines."""
        failure: Exception | None = None
        result = code = None
        try:
            result = None if work is None else work()
        except (GptminiError, OSError) as error:
            failure, code = error, getattr(error, "exit_code", MachineError.exit_code)
        outcomes = self.exchange([result, code])
        if failure is not None:
            raise failure
        for _, theirs in outcomes:
            if theirs is not None:
                raise Told(theirs)
        return [result for result, _ in outcomes]

    def check_same(self, facts: Mapping[str, Any], remedy: str) -> None:
        """RankError naming each rank and key that differ from rank 0's, and what to do."""
        first, *others = self.exchange(dict(facts))
        lines = [
            f"rank {rank}: {key} is {theirs.get(key)}, on rank 0 {first.get(key)}; {remedy}"
            for rank, theirs in enumerate(others, start=1)
            for key in first | theirs
            if theirs.get(key) != first.get(key)
        ]
        if lines:
            raise RankError(*lines if self.rank == 0 else ())

    def _wait(self, key: str, rank: int) -> Any:
        last, heard = b"", time.monotonic()
        while not self.store.check([key]):
            time.sleep(0.005)
            beat = self._beat(rank)
            if beat != last:
                last, heard = beat, time.monotonic()
            elif time.monotonic() - heard > SILENCE:
                raise self.lost([rank])
        return json.loads(self.store.get(key))

    def _beat(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def lost(self, gone: list[int], reason: str = _GONE) -> RankError:
        """The failure that names the ranks that are gone; the first one left prints it."""
        speaker = min(set(range(self.size)) - set(gone), default=self.rank)
        names = [f"rank {rank} ({self.store.get(f'joined/{rank}').decode()})" for rank in gone]
        line = f"{' and '.join(names)} {reason}" if names else f"the ranks: {reason}"
        return RankError(*[line] * (self.rank == speaker))

    def find_lost(self, reason: str) -> RankError:
        """The failure of a connection: whose hearts have stopped, as the first to notice finds."""
        try:
            before = [self._beat(rank) for rank in range(self.size)]
            time.sleep(3 * BEAT)
            gone = [rank for rank in range(self.size) if self._beat(rank) == before[rank]]
            # Whoever notices later would also count those who noticed first, and left.
            gone = json.loads(self.store.compare_set("lost", "", json.dumps(gone)))
            return self.lost(gone, _GONE if gone else reason)
        except dist.DistError:  # the store has gone with its machine
            return RankError(f"{os.environ['MASTER_ADDR']}, the machine of rank 0, {_GONE}")

    # -- tensors, through collectives --------------------------------------------------------------

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, equal in shape: (...) -> (ranks, ...)."""
        if self.size == 1:
            return tensor[None]
        everywhere = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everywhere, tensor.contiguous())
        return torch.stack(everywhere)

    def total(self, numbers: list[float]) -> float:
        """The sum of numbers that one rank has each, the others as 0, from the first number on."""
        everywhere = self.gather(torch.tensor(numbers, dtype=torch.float64))
        return functools.reduce(operator.add, everywhere.sum(0).tolist())

    def agree(self, received: Received) -> tuple[int | None, bool]:
        """Whether a signal to stop, or to save, has reached any rank."""
        flags = self.gather(torch.tensor([received.stop or 0, received.save]))  # (ranks, 2)
        stop, save = flags.amax(0).tolist()
        return stop or None, bool(save)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """RankError naming a rank whose weights are not those of rank 0, to the bit."""
        if self.size > 1:
            sums = {
                name: tensor.view(torch.int32).sum(dtype=torch.int64).item()
                for name, tensor in weights.items()
            }
            self.check_same(sums, "nothing of this step was saved; run the same command again")

    @contextmanager
    def leading(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """A context that rank 0 alone enters; if that fails, all ranks end."""
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(context)

            self.lead(enter)
            yield


ALONE = Ranks()


@contextmanager
def join() -> Iterator[Ranks]:
    """The ranks that torchrun's variables name; a plain command is alone.

    ConfigError for variables that are set in part, RankError if a rank never comes or goes.
    """
    given = [name for name in VARIABLES if name in os.environ]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        yield ALONE
        return
    if missing := [name for name in VARIABLES if name not in given]:
        raise ConfigError(
            f"{missing[0]}: not set, but {given[0]} is; start several processes with torchrun"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, size, os.environ["LOCAL_RANK"] == "0", _store(rank) if size > 1 else None)
    if size == 1:
        yield ranks
        return
    if rank > 0:
        console.silence()
    ended = threading.Event()
    try:
        _gather_everyone(ranks, ended)
        yield ranks
        ranks.exchange(None)  # whoever leaves earlier would break the connections of the others
        dist.destroy_process_group()
    except (DivergedError, Stopped) as failure:  # every rank's, at the same step
        failure.lines = failure.lines if rank == 0 else ()
        raise
    except GptminiError as failure:
        if rank > 0 and not isinstance(failure, RankError):
            failure.lines = tuple(f"rank {rank}: {line}" for line in failure.lines)
        raise
    except RuntimeError as failure:
        if not isinstance(failure, dist.DistError) and not _BROKEN.search(str(failure)):
            raise
        with signals():  # torchrun sends SIGTERM as soon as one rank is gone
            raise ranks.find_lost(str(failure).splitlines()[0]) from None
    finally:
        ended.set()
        _leave(ranks)


_BROKEN = re.compile("gloo|NCCL|[Cc]onnection|Socket|Broken pipe")  # gloo's errors have no type


def _store(rank: int) -> Any:
    """The store of torchrun, or one that rank 0 serves; a restart begins with an empty one."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not served,
        timeout=timedelta(seconds=JOINING),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return PrefixStore(f"gptmini/{attempt}", store)


def _gather_everyone(ranks: Ranks, ended: threading.Event) -> None:
    """Wait for all ranks, connect them, and start the heart of this one."""
    store, until = ranks.store, time.monotonic() + JOINING
    store.set(f"joined/{ranks.rank}", f"process {os.getpid()} on {platform.node()}")
    names = [f"joined/{rank}" for rank in range(ranks.size)]
    while not store.check(names):
        if time.monotonic() > until:
            joined = [rank for rank, name in enumerate(names) if store.check([name])]
            line = (
                f"{len(joined)} of {ranks.size} ranks joined within {JOINING} seconds; find the "
                f"failure of the others above, or on their machines"
            )
            raise RankError(*[line] * (ranks.rank == joined[0]))
        time.sleep(0.05)
    threading.Thread(target=_beat, args=(ranks.rank, store.clone(), ended), daemon=True).start()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore("collectives", store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=TIMEOUT),
    )


def _beat(rank: int, store: Any, ended: threading.Event) -> None:
    """Show the others that this process lives, until it ends."""
    count = 0
    with suppress(dist.DistError):  # the store is gone, and with it whoever might look
        while not ended.wait(BEAT):
            count += 1
            store.set(f"beat/{rank}", str(count))


def _leave(ranks: Ranks) -> None:
    """Let the others read what is in the store before rank 0, which may serve it, ends."""
    until = time.monotonic() + 3 * BEAT
    with suppress(dist.DistError):
        ranks.store.set(f"left/{ranks.rank}", "")
        names = [f"left/{rank}" for rank in range(ranks.size)]
        while ranks.rank == 0 and time.monotonic() < until and not ranks.store.check(names):
            time.sleep(0.01)
