"""PyTorch's engine: rows, slots, and the memory that logits take."""

import pytest
import torch
from torch.nn import functional

from gptmini.generate.engine import PREFILL_CHUNK, TorchEngine, round_up_rows
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT
from tests.core.generate.test_sampler import model_of

LONG = 512


def check(engine: TorchEngine, model: GPT, texts: list[Sequence]) -> None:
    """Call the engine; compare its logits with a fresh pass of the model over each text."""
    for text, logits in zip(texts, engine(texts), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([text.context]))[0, -text.n_logits :]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert text.n_cached == len(text.context)
        text.context.append(len(text.context) % 50)


def make_texts(n: int, length: int = 5) -> list[Sequence]:
    tokens = [position * position % 50 for position in range(length)]
    return [Sequence(number, [number, *tokens], LONG) for number in range(n)]


def test_texts_that_stay_read_nothing_again_when_others_come_end_and_slide(monkeypatch):
    model = model_of(length=LONG)
    engine = TorchEngine(model, 8)
    n_tokens: list[int] = []
    hidden = model.forward_hidden
    monkeypatch.setattr(
        model, "forward_hidden", lambda t, *r: n_tokens.append(t.numel()) or hidden(t, *r)
    )
    texts = make_texts(4, 100)
    engine(texts[:2])
    for text in texts[:2]:
        text.context.append(1)
    n_tokens.clear()
    engine(texts[:3])  # a new one
    assert sorted(n_tokens) == [2, 101]
    texts[0].context = texts[0].context[50:]
    texts[0].n_cached = 0
    for text in texts[1:3]:
        text.context.append(1)
    n_tokens.clear()
    engine(texts[:3])  # one slides
    assert sorted(n_tokens) == [4, 52]  # three rows are padded to four


def test_samples_of_one_prompt_read_it_once(monkeypatch):
    """Also a long one, beside another text of the same length; then each goes its own way."""
    model = model_of(length=LONG)
    engine = TorchEngine(model, 8)
    n_tokens: list[int] = []
    hidden = model.forward_hidden
    monkeypatch.setattr(
        model, "forward_hidden", lambda t, *r: n_tokens.append(t.numel()) or hidden(t, *r)
    )
    other, *texts = make_texts(4, 2 * PREFILL_CHUNK)
    for text in texts:
        text.context = [49, *other.context]
    alone = TorchEngine(model)([Sequence(9, texts[0].context, LONG)])[0]
    n_tokens.clear()
    logits = engine([other, *texts])
    assert sum(n_tokens) == len(other.context) + len(texts[0].context)
    assert all(torch.equal(each, alone) for each in logits[1:])
    monkeypatch.undo()
    for number, text in enumerate(texts):
        text.context.append(number)
    other.context.append(1)
    check(engine, model, [other, *texts])


def test_texts_move_down_when_those_below_them_have_ended():
    model = model_of(length=LONG)
    engine = TorchEngine(model, 8)
    texts = make_texts(8)
    check(engine, model, texts)
    for text in texts[:6]:
        text.finish_reason = "length"
    shapes: list[int] = []
    step = engine._compute_step
    engine._compute_step = lambda inputs, n: shapes.append(inputs.shape[1]) or step(inputs, n)
    for _ in range(3):
        check(engine, model, texts[6:])
    assert shapes == [2, 2, 2]
    check(engine, model, [*texts[6:], *make_texts(5)])  # newcomers take what is free


def test_more_texts_than_slots_take_them_from_each_other():
    model = model_of(length=LONG)
    engine = TorchEngine(model, 2)
    texts = make_texts(5)
    for first in (0, 2, 3, 1, 0):
        check(engine, model, texts[first : first + 2])
    assert len(engine._slots) == 2
    check(engine, model, texts)  # a call with more makes room for all
    check(engine, model, texts)


@pytest.mark.parametrize("attention", [{}, {"window": 30, "full_every": 2}], ids=str)
def test_scored_prompts_have_logits_for_every_token_and_others_for_one(attention):
    model = model_of(extra=attention, length=LONG)
    engine = TorchEngine(model, 4)
    n_logits: list[int] = []
    compute = model.compute_logits
    model.compute_logits = lambda x: n_logits.append(x.shape[0]) or compute(x)
    scored, *others = make_texts(4, 2 * PREFILL_CHUNK + 7)
    scored.n_logits = len(scored.context)
    check(engine, model, [others[0], scored, *others[1:]])
    n_fresh_passes = 4
    assert sum(n_logits) == scored.n_logits + len(others) + n_fresh_passes


def test_cudnn_plans_for_steps_but_not_for_each_length_of_a_prompt(monkeypatch):
    model = model_of(length=LONG)
    engine = TorchEngine(model, 1)
    engine._on_cpu = False
    allowed: list[bool] = []
    attend = functional.scaled_dot_product_attention

    def noted(q, *inputs, **options):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(q, *inputs, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    texts = make_texts(1, 9)
    engine(texts)
    assert set(allowed) == {False}
    allowed.clear()
    texts[0].context.append(3)
    engine(texts)
    assert set(allowed) == {True}


def test_rows_come_in_few_numbers():
    found = [round_up_rows(n) for n in (1, 2, 3, 5, 9, 17, 32, 33, 48, 49)]
    assert found == [1, 2, 4, 8, 16, 32, 32, 48, 48, 64]
