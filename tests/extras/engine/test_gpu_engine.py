"""The engine for GPUs, on a CPU: narrow weights, and steps that cannot be recorded."""

import pytest
import torch

from gptmini.extras.engine import gpu_engine
from gptmini.extras.engine.gpu_engine import GpuEngine
from gptmini.generate.engine import TorchEngine
from gptmini.generate.precision import round_weights, widen_weights
from tests.core.generate.test_engine import LONG, check, make_texts
from tests.core.generate.test_sampler import model_of


def test_where_no_graph_is_recorded_there_is_one_warning_and_the_same_logits(capsys):
    model = model_of(length=LONG)
    engine = GpuEngine(model, 2, "float32")
    engine._on_device = True  # it takes the CPU for a GPU
    texts = make_texts(2)
    for n_texts in (1, 2, 2):
        check(engine, model, texts[:n_texts])
        check(engine, model, texts[:n_texts])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: CUDA graph: not recorded (")
    assert line.endswith("); generating without, which is slower")


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_a_model_in_bfloat16_has_a_cache_in_bfloat16_and_logits_close_by(position, monkeypatch):
    monkeypatch.setattr(gpu_engine, "multiplies_bfloat16", lambda device: True)
    model = model_of(position=position, extra={"qk_norm": True}, length=LONG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(4 if parameter.ndim == 2 else 1)
    round_weights(model, "bfloat16")
    narrow = GpuEngine(model, 2, "bfloat16")
    widen_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in narrow._model.parameters()} == {torch.bfloat16}
    engines = [TorchEngine(model, 2), narrow]
    both = [make_texts(2, 30), make_texts(2, 30)]
    for _ in range(4):
        exact, found = (engine(texts) for engine, texts in zip(engines, both, strict=True))
        for ours, theirs in zip(found, exact, strict=True):
            assert ours.dtype == torch.float32
            assert 0 < (ours - theirs).norm() < 0.03 * theirs.norm()
        for text in both[0] + both[1]:
            text.context.append(7)
    assert {memory.dtype for memory in engines[1]._cache.memory} == {torch.bfloat16}


def test_engines_of_one_model_share_its_copies_until_it_changes(monkeypatch):
    monkeypatch.setattr(gpu_engine, "multiplies_bfloat16", lambda device: True)
    model = model_of()
    engine = GpuEngine(model, 1, "bfloat16")
    other = engine.open_another(2)
    assert other._model is engine._model is not model
    assert other.is_current(model)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    assert not engine.is_current(model)
    assert not other.is_current(model)
