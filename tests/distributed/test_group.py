"""Which accelerator each rank takes."""

import pytest
import torch
import torch.distributed as dist

from gptmini.distributed.group import Group
from gptmini.errors import MachineError

CUDA = torch.device("cuda")


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
        Group(4 + local_rank, 8, local_rank).select_accelerator(CUDA)
    assert chosen == [0, 1]


def test_a_rank_that_sees_a_single_accelerator_takes_that(chosen, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    Group(3, 8, 3).select_accelerator(CUDA)
    assert chosen == [0]


def test_more_ranks_than_accelerators_are_refused(chosen):
    with pytest.raises(MachineError, match="2 devices for at least 3 ranks on this machine"):
        Group(2, 8, 2).select_accelerator(CUDA)
    assert chosen == []


def test_accelerators_whose_tensors_cannot_be_exchanged_are_refused(chosen):
    with pytest.raises(MachineError, match="--device mps: several processes cannot train on it"):
        Group(0, 2).select_accelerator(torch.device("mps"))
    Group(0, 1).select_accelerator(torch.device("mps"))  # a single process exchanges nothing
    Group(0, 2).select_accelerator(torch.device("cpu"))
    assert chosen == []
