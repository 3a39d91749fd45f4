"""What processes that share a batch choose, and how they add gradients and share Muon's work."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gptmini.config.settings import Config
from gptmini.errors import ConfigError
from gptmini.extras.parallel import replicas
from gptmini.extras.parallel.ranks import Ranks
from gptmini.extras.parallel.replicas import (
    ExactGradients,
    FastGradients,
    orthogonalize_one_by_one,
    share_batch,
    share_orthogonalize,
)
from gptmini.model.optim import orthogonalize
from gptmini.plan import cost
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from gptmini.train.group import SINGLE_PROCESS
from tests.core.plan.machines import FakeMachine
from tests.core.plan.test_timing import STATIC
from tests.support import tiny


def choose(config: Config, machine: FakeMachine) -> int | None:
    """The rows of a pass."""
    return share_batch(config, config.train, machine, dry_run=True).train.micro_batch_size


@pytest.mark.parametrize(("batch_size", "expected"), [(64, 8), (24, 3), (12, 3), (2, 1), (7, 7)])
def test_exact_has_the_same_micro_batch_on_1_to_8_processes(batch_size, expected):
    config = tiny(train={"batch_size": batch_size, "reduce": "exact"}).with_tokenizer("byte", 257)
    numbers = [n for n in (1, 2, 4, 8) if batch_size % n == 0]
    for n in numbers:
        assert choose(config, FakeMachine(world_size=n)) == expected
    fast = config.with_train(reduce="fast")
    shares = [batch_size // n for n in numbers]
    found = [choose(fast, FakeMachine(world_size=n)) for n in numbers]
    assert found == shares
    static = STATIC * cost.count_parameters(config.model)
    row = static // 8
    for most in numbers:  # so many processes fit, each with two rows
        memory = most * static + 4 * row
        machines = [FakeMachine(world_size=n, memory=memory, row=row) for n in numbers]
        sizes = {choose(config, machine) for machine in machines}
        assert sizes == {2 if expected % 2 == 0 else 1}


def test_sharded_processes_hold_one_model_together_and_have_room_for_more_rows():
    train = {"batch_size": 16, "reduce": "fast"}
    config = tiny(train=train).with_tokenizer("byte", 257)
    sharded = config.with_train(shard=True)
    static = STATIC * cost.count_parameters(config.model)
    row = static // 4
    # Twice the rows that fit into half of what 2 whole models, or one in two shards, leave free.
    machine = FakeMachine(world_size=2, memory=2 * static + 2 * row, row=row)
    assert choose(config, machine) == 1
    assert choose(sharded, machine) == 2
    roomy = replace(machine, memory=static + 8 * row)
    assert choose(sharded, roomy) == 4


@pytest.mark.parametrize(
    ("begun_on", "reduce", "resumed_on"), [(2, "exact", 1), (1, "fast", 2), (3, "fast", 4)]
)
def test_a_resumed_run_adds_gradients_as_it_did(
    text_file: Path, tmp_path: Path, begun_on: int, reduce: str, resumed_on: int
):
    train = {"batch_size": 12, "micro_batch_size": 1, "compile": "off"}
    requested = tiny(data={"path": str(text_file)}, train=train)
    plan = make_plan(requested, None, world_size=begun_on)
    assert plan.config.train.reduce == reduce
    run = RunDirectory(tmp_path / "run")
    run.create(plan.config, plan.corpus.tokenizer, requested)
    resumed = make_plan(requested, run, world_size=resumed_on)
    assert resumed.config.train.reduce == reduce
    new = make_plan(requested, None, world_size=resumed_on)
    assert new.config.train.reduce != reduce


def test_a_run_of_two_processes_goes_on_with_three(text_file: Path, tmp_path: Path):
    requested = tiny(data={"path": str(text_file)}, train={"batch_size": 12, "compile": "off"})
    plan = make_plan(requested, None, world_size=2)
    run = RunDirectory(tmp_path / "run")
    run.create(plan.config, plan.corpus.tokenizer, requested)
    with pytest.raises(ConfigError, match=r"train\.reduce: exact needs .*; use fast"):
        make_plan(requested, run, world_size=3)
    resumed = make_plan(requested.with_train(reduce="fast"), run, world_size=3)
    assert resumed.config.train.reduce == "fast"


@pytest.mark.parametrize("n", [1, 4, 6])
def test_gradients_are_added_in_a_tree(n: int):
    """Of parts that are used, in the order of the tree; others get zeros."""
    model = nn.ModuleDict({"used": nn.Linear(3, 3, bias=False), "unused": nn.Linear(1, 1)})
    gradients = ExactGradients(model.parameters(), n, SINGLE_PROCESS)
    inputs = torch.randn(n, 5, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # steps
        parts = []
        for x in inputs:
            loss = model["used"](x).square().sum()
            parts += torch.autograd.grad(loss, [model["used"].weight], retain_graph=True)
            loss.backward()
            gradients.after_backward()
        gradients.finish()
        if n == 4:
            expected = (parts[0] + parts[1]) + (parts[2] + parts[3])
        elif n == 6:
            expected = (parts[0] + parts[1] + parts[2]) + (parts[3] + parts[4] + parts[5])
        else:
            expected = parts[0]
        assert torch.equal(model["used"].weight.grad, expected)
        assert not model["unused"].weight.grad.any()
        model.zero_grad()


class Recording(Ranks):
    """One of several processes, which keeps what it would send."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent = tensor
        return torch.stack([tensor] * self.world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(10, 35), (16, 32), (33, 77)])
@pytest.mark.parametrize("count", [4, 9])
def test_bits_of_a_matrix_do_not_depend_on_how_many_a_rank_has(dtype, shape, count):
    """Kernels may round otherwise for one matrix than for several, and by its alignment."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(count, *shape, generator=generator).to(dtype)
    alone = orthogonalize_one_by_one(matrices)
    assert alone.float() == pytest.approx(orthogonalize(matrices).float(), abs=0.05)
    for world_size in range(2, 9):
        sent = []
        for rank in range(world_size):
            group = Recording(rank, world_size)
            share = share_orthogonalize(orthogonalize_one_by_one, group)
            assert share(matrices).shape == matrices.shape
            sent.append(group.sent)
        assert torch.equal(torch.cat(sent)[:count], alone)


def test_each_bucket_is_sent_once_a_step_when_its_gradients_are_complete(monkeypatch):
    """As if another rank had the same gradients; here several buckets and micro-batches."""
    sent: list[int] = []

    def double(flat: torch.Tensor, async_op: bool) -> Any:
        sent.append(len(flat))
        flat.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", double)
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 48)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))  # 31 numbers
    alone = copy.deepcopy(model)
    fast = FastGradients(model.parameters(), n=3)
    for step in (1, 2):
        for each in (model, alone):
            each.zero_grad()
        for _ in range(3):
            x = torch.randn(5, 3)
            for each in (model, alone):
                each(x).square().sum().backward()
            fast.after_backward()
        fast.finish()
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours.grad, 2 * expected.grad)
        assert sum(sent) == step * 31
    assert len(sent) > 2


def test_a_frozen_parameter_is_not_collected():
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert FastGradients([frozen], 1).parameters == []
