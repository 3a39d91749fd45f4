"""Muon's share of whole matrices, and the tree over the ranks."""

import pytest
import torch

from gptmini.extras.parallel.gradients import share_orthogonalize
from gptmini.extras.parallel.ranks import Ranks
from gptmini.model.optim import orthogonalize, orthogonalize_one_by_one


class Recording(Ranks):
    """One of several processes, which keeps what it would send."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent = tensor
        return torch.stack([tensor] * self.world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(10, 35), (3, 7), (16, 35), (16, 32), (22, 44), (33, 77)])
@pytest.mark.parametrize("count", [1, 4, 8, 9])
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


def test_a_rank_without_matrices_orthogonalizes_none():
    nothing = torch.empty(0, 3, 5)
    assert orthogonalize_one_by_one(nothing).shape == (0, 3, 5)
