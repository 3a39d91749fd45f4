import pytest
import torch

from gptmini.errors import ConfigError
from gptmini.model import masks, mechanisms


@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_masks_are_the_written_out_ones(window):
    positions = torch.arange(5)
    expected = mechanisms.causal_mask(5) if window is None else mechanisms.window_mask(5, window)
    assert torch.equal(masks.visible(positions, positions, window), expected)
    assert torch.equal(masks.visible(positions[3:], positions, window), expected[3:])
    shuffled = torch.tensor([2, 0, 4, 1, 3])
    assert torch.equal(masks.visible(positions, shuffled, window), expected[:, shuffled])


def test_left_padding_is_seen_by_itself_only():
    positions = torch.arange(4)
    padding = masks.left_padding([4, 2])
    assert padding.tolist() == [0, 2]
    full, padded = masks.visible(positions, positions, None, padding)[:, 0]
    assert torch.equal(full, mechanisms.causal_mask(4))
    assert ["".join(".x"[int(cell)] for cell in row) for row in padded] == [
        "x...",
        ".x..",
        "..x.",
        "..xx",
    ]


def test_a_row_of_nothing_but_padding_is_refused():
    with pytest.raises(ConfigError, match="hides all of row 1; give each row 1 token or more"):
        masks.left_padding([3, 0])


def test_cross_masks_are_the_written_out_ones():
    lengths = torch.tensor([3, 1])
    found = masks.cross(lengths, 2, 4)
    assert torch.equal(found[:, 0], mechanisms.cross_mask(lengths, 2, 4))
