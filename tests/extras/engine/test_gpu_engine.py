"""The engine for GPUs, on a CPU: recorded steps, tokens drawn for all rows, narrow weights."""

import pytest
import torch

from gptmini.extras.engine import gpu_engine, graphs
from gptmini.extras.engine.gpu_engine import GpuEngine
from gptmini.generate.engine import TorchEngine
from gptmini.generate.precision import round_weights, widen_weights
from gptmini.model.gpt import GPT
from tests.core.generate.test_engine import LONG, check, make_texts
from tests.core.generate.test_sampler import model_of
from tests.extras.engine.recorded_graphs import RecordedGraph


def engine_of(model: GPT, n_slots: int, weights: str = "float32") -> GpuEngine:
    """An engine that takes the CPU for a GPU."""
    engine = GpuEngine(model, n_slots, weights)
    engine._on_cpu = False
    engine._on_device = True
    return engine


def test_a_recorded_step_reads_new_tokens_and_a_grown_cache(monkeypatch):
    monkeypatch.setattr(graphs, "_Graph", RecordedGraph)
    model = model_of(extra={"window": 30, "full_every": 2}, length=LONG)
    engine = engine_of(model, 8)
    texts = make_texts(5)
    for n_texts in (1, 1, 2, 1, 5, 5, 3, 5):
        check(engine, model, texts[:n_texts])
    for text in texts:
        text.context += [number % 50 for number in range(250)]
    for _ in range(3):  # more keys
        check(engine, model, texts)
    shapes = engine._graphs._graphs.keys()
    assert shapes == {(2, 256), (4, 256), (8, 256), (8, 512)}  # (1, 256) went with its cache


def test_where_no_graph_is_recorded_there_is_one_warning_and_the_same_logits(capsys):
    model = model_of(length=LONG)
    engine = engine_of(model, 2)
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
