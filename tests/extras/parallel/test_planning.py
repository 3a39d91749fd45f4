"""What ranks must have in common before they train together."""

import pytest
import torch

from gptmini.extras.parallel import planning
from gptmini.machine import Compute


def test_ranks_are_compared_in_all_that_decides_the_bits(monkeypatch: pytest.MonkeyPatch):
    cpu = Compute(torch.device("cpu"), torch.float32)
    before = planning._describe_environment(cpu)
    assert before == planning._describe_environment(cpu)

    def find_changes(compute: Compute = cpu) -> set[str]:
        now = planning._describe_environment(compute)
        return {key for key in before | now if before.get(key) != now.get(key)}

    assert find_changes(Compute(torch.device("cpu"), torch.bfloat16)) == {"dtype"}
    assert find_changes(Compute(torch.device("cuda"), torch.float32)) == {"device"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert find_changes() == {"threads"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.0")
        assert find_changes() == {"torch"}
