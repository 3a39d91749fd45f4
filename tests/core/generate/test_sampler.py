"""Every engine and batch draws the same tokens."""

import subprocess
import sys

import pytest
import torch

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError
from gptmini.generate import engine as torch_engine
from gptmini.generate.engine import Engine, TorchEngine, open_engine
from gptmini.generate.sampler import check_overflow, sample_tokens
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT
from tests.support import tiny

LIMIT = 16
ENGINES = ["torch", "no cache"]
WITH_FASTEST = [*ENGINES, "fastest"]  # without the compiled engine, torch's once more


def model_of(
    variant: str = "gqa",
    position: str = "rope",
    extra: dict | None = None,
    seed: int = 5,
    length: int = LIMIT,
) -> GPT:
    torch.manual_seed(seed)
    heads = {"variant": variant, "n_kv_head": 2 if variant == "gqa" else None} | (extra or {})
    shape = {"attention": heads, "position": position, "tie_embeddings": False}
    shape["context_length"] = length
    model = GPT(tiny(model=shape).with_tokenizer("byte", 50).model).eval()
    with torch.no_grad():  # strong weights: a text that varies, far from ties
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def engine_of(model: GPT, engine: str, n_texts: int = 1) -> Engine:
    if engine == "fastest":
        return open_engine(model, n_texts)
    return TorchEngine(model, n_texts, use_cache=engine == "torch")


def drawn(model: GPT, prompts: list[list[int]], engine: str, **given) -> list[list[int]]:
    """What follows each of the prompts, drawn together."""
    numbers = given.pop("numbers", range(len(prompts)))
    sample = SampleConfig.model_validate({"top_k": None, "temperature": 1.0} | given)
    limit = model.config.context_length
    texts = [Sequence(n, prompt, limit, sample) for n, prompt in zip(numbers, prompts, strict=True)]
    together = engine_of(model, engine, len(texts))
    for text, token, logits in sample_tokens(together, texts):
        assert text.tokens[-1] == token
        assert logits.shape == (50,)
    return [text.tokens for text in texts]


@pytest.mark.parametrize(
    ("variant", "position"), [("mha", "learned"), ("gqa", "rope"), ("mqa", "none")]
)
def test_with_and_without_the_cache_the_same_tokens_ten_contexts_long(variant, position):
    model = model_of(variant, position)
    given = {"max_new_tokens": 160}
    first, *others = (drawn(model, [[3, 1, 4, 1, 5]], e, **given) for e in WITH_FASTEST)
    assert all(other == first for other in others)
    assert len(first[0]) == 160
    assert len(set(first[0])) > 5


@pytest.mark.parametrize("attention", [{"window": 5}, {"window": 5, "full_every": 2}], ids=str)
def test_windows_slide_the_same_with_and_without_the_cache(attention):
    model = model_of(extra=attention)
    first, *others = (drawn(model, [[3, 1, 4]], e, max_new_tokens=160) for e in ENGINES)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("position", "attention"), [("rope", {}), ("alibi", {"window": 5, "full_every": 2})], ids=str
)
@pytest.mark.parametrize("engine", WITH_FASTEST)
def test_a_text_in_a_batch_is_the_same_as_alone(engine, position, attention):
    """Any length, past the context, with its own random numbers, beside texts that end sooner."""
    model = model_of(position=position, extra=attention)
    prompts = [[7], list(range(12)), [3, 1, 4, 1], list(range(40)), [7]]
    together = drawn(model, prompts, engine, max_new_tokens=50)
    for number, prompt in enumerate(prompts):
        (alone,) = drawn(model, [prompt], engine, max_new_tokens=50, numbers=[number])
        assert together[number] == alone
    assert together[0] != together[4]  # the same prompt, other random numbers


@pytest.mark.parametrize("engine", ENGINES)
def test_a_text_that_ends_does_not_change_the_others(engine):
    model = model_of()
    sample = SampleConfig(max_new_tokens=30, temperature=1.0)
    texts = [Sequence(n, [n], LIMIT, sample) for n in range(3)]
    expected = drawn(model, [[0], [1], [2]], engine, max_new_tokens=30, top_k=50)
    for text, _, _ in sample_tokens(engine_of(model, engine, 3), texts):
        if text is texts[1] and len(text.tokens) == 7:
            text.finish_reason = "mine"
    assert [text.tokens for text in texts] == [expected[0], expected[1][:7], expected[2]]
    assert [text.finish_reason for text in texts] == ["length", "mine", "length"]


def test_prefill_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model, prompt = model_of(extra={"window": 5, "full_every": 2}), list(range(15))
    whole = drawn(model, [prompt], "torch", temperature=0, max_new_tokens=20)
    monkeypatch.setattr(torch_engine, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(torch_engine, "SPARE_POSITIONS", 2)
    for engine in ENGINES:
        assert drawn(model, [prompt], engine, temperature=0, max_new_tokens=20) == whole


def test_sampling_loads_no_model_no_run_and_no_extras():
    check = (
        "import sys, gptmini.generate.sampler as _; "
        "others = ('model', 'extras', 'runs', 'data', 'generate.engine'); "
        "sys.exit(any(f'gptmini.{name}' in sys.modules for name in others))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_text_that_can_have_no_token_ends_with_its_error_and_no_other_does():
    texts = [Sequence(n, [n], LIMIT) for n in range(3)]
    engine = TorchEngine(model_of(), 3)
    logits = [rows[-1] for rows in engine(texts)]
    texts[1].bias = torch.full((50,), -torch.inf)
    tokens = engine.draw(logits, texts)
    assert list(tokens) == [texts[0], texts[2]]
    assert [text.finish_reason for text in texts] == [None, "error", None]
    with pytest.raises(ConfigError, match="no token is left"):
        raise texts[1].error
    again = Sequence(0, [1], LIMIT, bias=texts[1].bias)
    with pytest.raises(ConfigError, match="no token is left"):
        list(sample_tokens(engine, [again]))


def test_stop_and_error_past_the_context():
    model = model_of()
    base = {"max_new_tokens": 50, "temperature": 0}
    (slide,) = drawn(model, [[3, 1]], "torch", **base)
    (stop,) = drawn(model, [[3, 1]], "torch", **base, overflow="stop")
    assert stop == slide[: 16 - 2 + 1]  # the last token needs no place of its own
    with pytest.raises(ConfigError, match="2 prompt tokens and 16 new ones do not fit"):
        check_overflow(
            Sequence(0, [3, 1], LIMIT, SampleConfig(max_new_tokens=16, overflow="error"))
        )
    check_overflow(Sequence(0, [3, 1], LIMIT, SampleConfig(max_new_tokens=15, overflow="error")))
    assert len(drawn(model, [[3, 1]], "torch", max_new_tokens=15, overflow="error")[0]) == 15


def test_penalties_and_bias_move_the_draw_but_not_the_logits_that_are_given():
    """Against a loop over the whole model: penalties see the prompt and the text, slid or not."""
    model, prompt = model_of(), [3, 1, 4, 1, 5]
    given = {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.9}
    sample = SampleConfig.model_validate({"max_new_tokens": 30, "temperature": 0, **given})
    bias = torch.randn(50)
    text = Sequence(0, prompt, LIMIT, sample, bias)
    drawn: list[int] = []
    for _, token, logits in sample_tokens(TorchEngine(model), [text]):
        context = prompt + drawn
        # A context that is full keeps its newer half, 8 tokens, and grows again to 16.
        start = 0 if len(context) <= LIMIT else (len(context) - LIMIT - 1) // 9 * 9 + 9
        with torch.no_grad():
            own = model(torch.tensor([context[start:]]))[0, -1]
        torch.testing.assert_close(logits, own, atol=1e-4, rtol=1e-4)
        scores = own + bias
        for seen in set(context):
            scores[seen] *= 1.7 if scores[seen] < 0 else 1 / 1.7
        for seen in set(drawn):
            scores[seen] -= 0.9 + 0.5 * drawn.count(seen)
        assert token == int(scores.argmax())
        drawn.append(token)
        assert text.context == (prompt + drawn)[text.context_start :]
    assert len(drawn) == 30


def test_the_first_token_may_be_limited_and_no_other():
    model, first_bias = model_of(), torch.full((50,), -torch.inf)
    first_bias[7] = 0
    sample = SampleConfig(max_new_tokens=20, temperature=1.0)
    text = Sequence(0, [3, 1, 4], LIMIT, sample, first_bias=first_bias)
    for _ in sample_tokens(TorchEngine(model), [text]):
        pass
    assert text.tokens[0] == 7
    assert len(set(text.tokens)) > 3


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_is_the_argmax_of_the_whole_model(engine):
    model = model_of()
    tokens = [3, 1, 4]
    for token in drawn(model, [tokens], engine, temperature=0, max_new_tokens=10)[0]:
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)


def test_the_cost_of_a_token_stays_bounded(monkeypatch: pytest.MonkeyPatch):
    model, seen = model_of(), []
    hidden = model.forward_hidden
    monkeypatch.setattr(
        model, "forward_hidden", lambda t, *r: seen.append(t.shape[1]) or hidden(t, *r)
    )
    drawn(model, [[1] * 100], "torch", max_new_tokens=160)
    assert seen[0] == 16  # the last context of the prompt
    assert sum(seen) <= 3 * 160
    assert max(seen) == 16
