"""Ranks that agree on facts: threads of this process, which exchange them through a table."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gptmini.errors import DataError, MachineError, RankError, Stopped
from gptmini.extras.parallel.group import ParallelGroup
from gptmini.extras.parallel.ranks import Ranks, RemoteFailure
from gptmini.extras.parallel.replicas import ExactGradients, FastGradients
from gptmini.model.gpt import GPT
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import tiny

CUDA = torch.device("cuda")


class ThreadGroup(ParallelGroup):
    """Stands for a process; `table` has the values of all, by rank."""

    def __init__(
        self, rank: int, local_rank: int, table: list[Any], all_ranks: threading.Barrier
    ) -> None:
        super().__init__(rank, len(table), local_rank)
        self.table = table
        self.all_ranks = all_ranks

    def all_gather_object(self, value: Any) -> list[Any]:
        self.table[self.rank] = value
        self.all_ranks.wait()
        gathered = list(self.table)
        self.all_ranks.wait()  # before anybody lays out the next one
        return gathered


def run_on_ranks(
    world_size: int, work: Callable[[ParallelGroup], Any], ranks_per_machine: int = 1
) -> list[Any]:
    """Run `work` on every rank; returns what each returned or raised."""
    table: list[Any] = [None] * world_size
    all_ranks = threading.Barrier(world_size, timeout=60)
    groups = [
        ThreadGroup(rank, rank % ranks_per_machine, table, all_ranks) for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, group) for group in groups]
    return [future.exception() or future.result() for future in futures]


def test_all_ranks_get_the_values_of_all_and_the_decision_of_the_first():
    def exchange(group: ParallelGroup) -> tuple[Any, Any, Any]:
        gathered = group.all_gather_object({"rank": group.rank})
        decided = group.on_rank_zero(lambda: f"of rank {group.rank}")
        return gathered, group.broadcast_object(group.rank), decided

    everything = [{"rank": rank} for rank in range(3)]
    assert run_on_ranks(3, exchange) == [(everything, 0, "of rank 0")] * 3


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ([{"a": 1}, {"a": 2}], "rank 1: a is 2, on rank 0 1; do it"),
        ([{"a": 1}, {"a": 1, "b": 2}], "rank 1: b is 2, on rank 0 None; do it"),
        ([{"a": 1, "b": 2}, {"a": 1}], "rank 1: b is None, on rank 0 2; do it"),
    ],
)
def test_what_only_one_rank_has_is_a_difference(facts, line):
    first, second = run_on_ranks(2, lambda group: group.check_same(facts[group.rank], "do it"))
    assert isinstance(first, RankError)
    assert isinstance(second, RankError)
    assert (first.lines, second.lines) == ((line,), ())  # said once
    same = run_on_ranks(2, lambda group: group.check_same(facts[0], "do it"))
    assert same == [None, None]


def test_one_rank_of_each_machine_works_before_the_others():
    order: list[int] = []

    def work(group: ParallelGroup) -> int:
        group.on_local_rank_zero_first(lambda: order.append(group.rank))
        return group.rank

    assert run_on_ranks(4, work, ranks_per_machine=2) == [0, 1, 2, 3]
    assert [set(order[:2]), set(order[2:])] == [{0, 2}, {1, 3}]


@pytest.mark.parametrize(
    ("failure", "code"),
    [(DataError("no text; choose one"), 3), (MachineError("full"), 5), (OSError(28, "full"), 5)],
)
def test_a_rank_that_fails_ends_all_with_its_exit_code(failure, code):
    def fail_on_rank_1() -> None:
        raise failure

    def work(group: ParallelGroup) -> None:
        group.on_all_ranks(fail_on_rank_1 if group.rank == 1 else lambda: None)

    first, second, third = run_on_ranks(3, work)
    assert second is failure
    for other in (first, third):
        assert isinstance(other, RemoteFailure)
        assert (other.exit_code, other.lines) == (code, ())


def test_rank_0_reads_for_all(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.create(tiny(), ByteTokenizer())

    def read(group: ParallelGroup) -> Any:
        def load() -> Checkpoint | None:
            assert group.rank == 0
            return run.load_newest()

        return group.read(load)

    assert run_on_ranks(2, read) == [None, None]
    run.save(Checkpoint({"step": 7, "best": None}, {"a": torch.ones(1)}, {}))
    first, second = run_on_ranks(2, read)
    assert (first.step, first.sha256) == (second.step, second.sha256)
    assert (first.model.keys(), second.model.keys()) == ({"a"}, set())


@pytest.mark.parametrize(("reduce", "kind"), [("fast", FastGradients), ("exact", ExactGradients)])
def test_several_ranks_add_their_gradients(reduce: str, kind: type):
    model = GPT(tiny(model={"n_layer": 1}).with_tokenizer("byte", 257).model)
    assert type(ParallelGroup(0, 2).create_gradients(model, reduce, 1)) is kind


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the devices that were selected, on a machine with two."""
    numbers: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", numbers.append)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    return numbers


def test_each_rank_of_a_machine_takes_an_accelerator_of_its_own(chosen):
    for local_rank in range(2):
        Ranks(4 + local_rank, 8, local_rank).select_accelerator(CUDA)
    assert chosen == [0, 1]


def test_a_rank_that_sees_a_single_accelerator_takes_that(chosen, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    Ranks(3, 8, 3).select_accelerator(CUDA)
    assert chosen == [0]


def test_more_ranks_than_accelerators_are_refused(chosen):
    with pytest.raises(MachineError, match="2 devices for at least 3 ranks on this machine"):
        Ranks(2, 8, 2).select_accelerator(CUDA)
    assert chosen == []


def test_accelerators_whose_tensors_cannot_be_exchanged_are_refused(chosen):
    with pytest.raises(MachineError, match="--device mps: several processes need NCCL"):
        Ranks(0, 2).select_accelerator(torch.device("mps"))
    Ranks(0, 2).select_accelerator(torch.device("cpu"))
    assert chosen == []


def test_a_rank_that_failed_says_so_though_the_others_have_gone(monkeypatch):
    """As when one signal reaches all of them."""

    def lose_connection(*_: object) -> None:
        raise RuntimeError("gloo: Connection closed by peer")

    def stop() -> None:
        raise Stopped(15, "stopped by SIGTERM")

    group = Ranks(rank=0, world_size=2)
    monkeypatch.setattr(group, "all_gather_object", lose_connection)
    with pytest.raises(Stopped):
        group.on_rank_zero(stop)
    with pytest.raises(RuntimeError, match="gloo"):
        group.on_rank_zero(int)
