import math

import pytest
import torch

from gptmini.config.settings import ModelConfig
from gptmini.model.layers import Dropout, Rotary, rotate


def test_dropout_zeroes_its_share_keeps_the_mean_and_rests_outside_training():
    torch.manual_seed(0)
    dropout, ones = Dropout(0.25), torch.ones(400, 401)
    dropped = dropout.train()(ones)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1, abs=0.01)
    assert torch.equal(dropout.eval()(ones), ones)
    assert torch.equal(Dropout(None).train()(ones), ones)


def test_rotated_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    config = ModelConfig(head_dim=8, n_head=1, d_model=8, context_length=40)
    rotary = Rotary(config)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> float:
        return float(
            (rotate(q, rotary(torch.tensor([i]))) * rotate(k, rotary(torch.tensor([j])))).sum()
        )

    for distance in (0, 1, 7):
        scores = [score(j + distance, j) for j in (0, 3, 20)]
        assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)
    assert score(7, 0) != pytest.approx(score(0, 0), abs=1e-3)
    # by definition, the first pair rotates by one radian per position
    unit = torch.eye(8)[0].view(1, 1, 1, 8)
    turned = rotate(unit, rotary(torch.tensor([2])))[0, 0, 0]
    assert turned[[0, 4]].tolist() == pytest.approx([math.cos(2), math.sin(2)])
