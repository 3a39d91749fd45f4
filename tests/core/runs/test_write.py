"""Runs of weights that were trained elsewhere."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from gptmini.config.load import validate
from gptmini.generate.run import load_run
from gptmini.model.gpt import GPT
from gptmini.runs import write
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.tokenizers import ByteTokenizer


def test_large_weights_are_written_in_parts_while_they_are_read(tmp_path, monkeypatch):
    config = validate({"model": {"vocab_size": 257, "d_model": 32, "context_length": 16}}, {})
    torch.manual_seed(1)
    model = GPT(config.model).to(torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(write, "PART_BYTES", 40_000)  # the embedding alone has 32,896
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def read() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in weights.items():
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            held = [each() for each in alive]
            most = max(most, sum(each.nbytes for each in held if each is not None))
            del held
            yield name, copy

    write.write_run(RunDirectory(tmp_path / "run"), config, read(), ByteTokenizer())
    assert most < sum(tensor.nbytes for tensor in weights.values()) / 2
    names = {path.name for path in (tmp_path / "run/checkpoints/step-00000000").iterdir()}
    assert "model-00002-of-00007.safetensors" in names, names
    found = load_run(tmp_path / "run", "cpu", "float32").model.state_dict()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.float()), name
