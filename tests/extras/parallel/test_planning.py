"""What all ranks must have in common before one of them plans."""

import torch

from gptmini import files
from gptmini.extras.parallel.planning import _describe_environment
from gptmini.machine import Compute


def test_ranks_compare_torch_code_device_dtype_and_threads(monkeypatch, tmp_path):
    mine = _describe_environment(Compute(torch.device("cpu"), torch.float32))
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    monkeypatch.setattr(torch, "__version__", "0.1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    other = _describe_environment(Compute(torch.device("meta"), torch.bfloat16))
    differing = {name for name in mine if mine[name] != other[name]}
    assert differing == {"torch", "gptmini's code", "device", "dtype", "threads"}
