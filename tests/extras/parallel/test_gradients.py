"""Muon's share of whole matrices, and buckets of gradients."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gptmini.extras.parallel import gradients
from gptmini.extras.parallel.gradients import FastGradients, share_orthogonalize
from gptmini.extras.parallel.ranks import Ranks
from gptmini.model.optim import orthogonalize, orthogonalize_one_by_one


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
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 48)
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
