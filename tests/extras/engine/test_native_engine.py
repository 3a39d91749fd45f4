"""The compiled engine gives a text the same bits in every call and batch."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gptmini.config.settings import SampleConfig
from gptmini.extras.engine import door, native_engine
from gptmini.extras.engine.fingerprint import Fingerprint
from gptmini.extras.engine.native_engine import NativeEngine
from gptmini.generate import engine as torch_engine
from gptmini.generate.engine import open_engine
from gptmini.generate.precision import PRECISIONS
from gptmini.generate.run import load_run
from gptmini.generate.sampler import sample_tokens
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT
from tests.core.generate.samples import run_of
from tests.core.generate.test_sampler import LIMIT, model_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


def test_the_compiled_engine_gives_a_text_the_same_bits_in_every_batch():
    model = model_of()
    texts = [Sequence(n, list(range(n + 1, n + 1 + n % 7 + 1)), LIMIT) for n in range(40)]
    together = open_engine(model, 40)(texts)  # in several calls
    for text, logits in zip(texts, together, strict=True):
        text.n_cached = 0
        assert torch.equal(open_engine(model, 1)([text])[0], logits)


@pytest.mark.parametrize("attention", [{}, {"window": 5, "full_every": 2}], ids=str)
@pytest.mark.parametrize("weights", PRECISIONS)
def test_prompts_and_steps_have_one_arithmetic(weights, attention, monkeypatch):
    """The bits are the same token by token, in chunks, in calls that cut a prompt, in batches."""
    for module in (native_engine, torch_engine):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(native_engine, "MAX_CALL_TOKENS", 32)
    model = model_of(extra=attention, length=128)
    open_one = lambda n=1: open_engine(model, n, weights)
    prompt = [n * n % 50 for n in range(100)]
    slowly, engine = Sequence(0, prompt[:1], 128), open_one()
    (expected,) = engine([slowly])
    for token in prompt[1:]:
        slowly.context.append(token)
        (expected,) = engine([slowly])
    expected = expected.clone()

    together = open_one(3)
    texts = [Sequence(1, prompt, 128), Sequence(2, prompt[:70], 128), Sequence(3, prompt, 128)]
    while together.prefill_chunk(texts[0]):
        pass
    found = together(texts)  # the first ends, the second is cut, the third begins as the first
    assert torch.equal(found[0], expected)
    assert torch.equal(found[2], expected)
    assert texts[2].n_reused == (64 if attention else 96)
    texts[1].context, texts[1].n_logits = list(prompt), 30
    (rest,) = together(texts[1:2])
    assert torch.equal(rest[-1:], expected)


def test_a_text_that_slides_still_tells_how_much_of_its_prompt_was_reused():
    model, prompt = model_of(length=256), [n * n % 50 for n in range(256)]  # two chunks
    engine = open_engine(model, 2)
    engine([Sequence(0, prompt, 256)])
    text = Sequence(1, prompt, 256, SampleConfig(max_new_tokens=60))
    for _ in sample_tokens(engine, [text]):
        pass
    assert text.context_start > 0
    assert text.n_reused == 128  # as one token at least is left to compute


@pytest.mark.parametrize("weights", PRECISIONS)
def test_tokens_taken_back_are_no_longer_shared(weights):
    """Not even if they were part of a prompt, once others have taken their place."""
    model = model_of(length=256)
    prompt = [n * n % 50 for n in range(200)]
    (expected,) = open_engine(model, 1, weights)([Sequence(0, prompt, 256)])
    engine = open_engine(model, 2, weights)
    before, again = Sequence(0, prompt, 256), Sequence(1, prompt, 256)
    engine([before])
    before.context[100:] = [7]
    before.n_cached = 100
    engine([before])
    assert torch.equal(engine([again])[0], expected)
    assert again.n_reused == 0


@pytest.mark.parametrize("weights", PRECISIONS)
def test_a_chunk_that_goes_round_a_ring_leaves_no_keys_to_share(weights):
    model = model_of(extra={"window": 120}, length=1024)
    tokens = [n * n % 50 for n in range(1000)]
    prompt = tokens[:200]
    (expected,) = open_engine(model, 1, weights)([Sequence(0, prompt, 1024)])
    engine = open_engine(model, 2, weights)
    before, again = Sequence(0, tokens[:128], 1024), Sequence(1, prompt, 1024)
    for end in (129, 1000):  # a step, then chunks behind it
        engine([before])
        before.context = tokens[:end]
    while engine.prefill_chunk(before):
        pass
    assert torch.equal(engine([again])[0], expected)
    assert again.n_reused == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run_of().save(tmp_path / "run")
    return tmp_path / "run"


def test_a_draft_and_a_borrowed_engine_follow_a_changed_model(path: Path):
    run, draft = load_run(path), load_run(path)
    run.generate("the ", draft=draft)
    with draft.borrow_engine(1) as old:
        draft.model.load_state_dict({n: -2 * t for n, t in draft.model.state_dict().items()})
    run.generate("the ", draft=draft)
    with draft.borrow_engine(1) as new:
        assert new is not old
        assert new.is_current(draft.model)
        assert not old.is_current(draft.model)


CHANGES: dict[str, Callable[[GPT], object]] = {
    "a setting": lambda model: setattr(model.blocks[0].attn, "window", 3),
    "a weight": lambda model: model.embed.weight.data.mul_(2),
    "a buffer": lambda model: model.rotary.cosines.mul_(2),
    "a module": lambda model: setattr(model, "final_norm", nn.Identity()),
    "a hook": lambda model: model.final_norm.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.embed.register_forward_pre_hook(lambda *_: None),
}


def write(change: Callable[[Tensor], object]) -> Callable[[GPT], object]:
    """Change a matrix (D, D) in a way that PyTorch does not count."""
    return lambda model: change(model.blocks[0].attn.o_proj.weight.data)


def swap(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


CHANGES |= {
    "one weight": write(lambda weight: weight[5, 6].mul_(1.0001)),
    "a sign": write(lambda weight: weight[5, 7].neg_()),
    "half of the signs": write(lambda weight: weight[:, 1::2].neg_()),
    "all but a column": write(lambda weight: weight[:, 1:].zero_()),
    "columns": write(lambda weight: weight[:, 4:8].mul_(3)),
    "a row": write(lambda weight: weight[1].normal_()),
    "a head": write(lambda weight: weight[:, 8:16].normal_()),
    "two rows": write(lambda weight: swap(weight[0], weight[1])),
    "two columns": write(lambda weight: swap(weight[:, 0], weight[:, 1])),
    "two heads": write(lambda weight: swap(weight[:, :8], weight[:, 8:16])),
    "through NumPy": write(lambda weight: weight.numpy().__setitem__((3, 5), 1.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_in_a_model_is_noticed(name):
    model = model_of()
    before = Fingerprint(model)
    assert before.matches(model)
    CHANGES[name](model)
    assert not before.matches(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_any_element_of_any_tensor_counts(dtype: torch.dtype):
    torch.manual_seed(1)
    module = nn.Module()
    whole = torch.randn(3, 7001).to(dtype)
    module.register_buffer("part", whole[1, 1:])  # begins and ends within a word
    before = Fingerprint(module)
    for index in (0, 1, 2, 3, 4000, 6998, 6999):
        changed = ~module.part.data[index] if dtype == torch.bool else module.part.data[index] + 1
        kept = module.part[index].clone()
        module.part.data[index] = changed
        assert not before.matches(module)
        module.part.data[index] = kept
        assert before.matches(module)


def test_a_model_that_was_not_changed_is_compared_once(path: Path, monkeypatch):
    run = load_run(path)
    compared = []
    load_library = door.load_library
    monkeypatch.setattr(
        door, "load_library", lambda *inputs: compared.append(1) or load_library(*inputs)
    )
    with torch.inference_mode():
        run.generate("the ")
    run.generate(["a", "b"])
    run.start(["c"], draft="lookup").finish()
    assert len(compared) == 1


def test_engines_of_one_run_share_its_weights(path: Path):
    run = load_run(path)
    with run.borrow_engine(1) as first, run.borrow_engine(1) as second:
        assert isinstance(first, NativeEngine)
        steps = [first._step._model, second._step._model]
        assert len({step.layers[0].qkv.data for step in steps}) == 1
        assert len({step.head.data for step in steps}) == 1
        assert len({step.layers[0].keys for step in steps}) == 2


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_run_that_only_generates_never_has_its_matrices_in_float32(path: Path, weights: str):
    run = load_run(path, weights=weights, rounds_model=True)
    run.generate("the ")
    generation = run.start(["the "])
    generation.finish()
    assert generation.engine == "compiled"
    assert run.tensors["embed.weight"].dtype != torch.int8
    stored = run._model
    matrices = [weight for weight in stored.blocks.parameters() if weight.ndim == 2]
    assert {weight.dtype for weight in matrices} == {getattr(torch, weights)}
    assert {weight.dtype for weight in stored.parameters() if weight.ndim == 1} == {torch.float32}
    assert run.model is stored
    assert {weight.dtype for weight in stored.parameters()} == {torch.float32}


def test_a_package_that_the_engine_needs_and_lacks_is_no_missing_part(monkeypatch):
    monkeypatch.delitem(sys.modules, "gptmini.extras.engine.door")
    monkeypatch.delattr("gptmini.extras.engine.door")
    monkeypatch.setitem(sys.modules, "ctypes", None)
    with pytest.raises(ModuleNotFoundError, match="ctypes"):
        open_engine(model_of(), 1)
