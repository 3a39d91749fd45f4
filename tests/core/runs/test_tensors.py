from pathlib import Path

import pytest
import safetensors.torch
import torch

from gptmini.runs.tensors import write_tensors


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_tensor_files_are_those_of_the_library(tmp_path: Path, metadata):
    tensors = {
        "matrix": torch.randn(3, 5),
        "slice": torch.randn(6, 5)[2:4],
        "transposed": torch.randn(4, 3).T,
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 4),
        "step": torch.tensor([2**40]),
        "half": torch.randn(3).half(),
        "brain": torch.randn(5).bfloat16(),
        "größe": torch.randn(2),
    }
    tensors["shared"] = tensors["matrix"]  # as in a model that ties weights itself
    path = tmp_path / "model.safetensors"
    entry = write_tensors(path, tensors, metadata)
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    expected = safetensors.torch.save(contiguous, metadata)
    assert path.read_bytes() == expected
    assert entry["bytes"] == len(expected)
    for name, tensor in safetensors.torch.load_file(path).items():
        assert tensor.equal(tensors[name])
        assert tensor.dtype == tensors[name].dtype
