"""Drafted tokens change no text."""

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmini.config.settings import SampleConfig
from gptmini.extras.engine.speculative import DraftModel, PromptLookup, sample_speculatively
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT
from tests.core.generate.samples import run_of
from tests.core.generate.test_sampler import (
    ENGINES,
    LIMIT,
    WITH_FASTEST,
    drawn,
    engine_of,
    model_of,
)


def draft(
    model: GPT, prompts: list[list[int]], engine: str, drafter: Any, **given
) -> list[list[int]]:
    """What follows each of the prompts, drawn together with drafts."""
    sample = SampleConfig.model_validate({"top_k": None, "temperature": 1.0} | given)
    texts = [Sequence(n, prompt, LIMIT, sample) for n, prompt in enumerate(prompts)]
    for text, token, logits in sample_speculatively(
        engine_of(model, engine, len(texts)), drafter, texts
    ):
        assert text.tokens[-1] == token
        assert logits.shape == (50,)
    return [text.tokens for text in texts]


class Oracle:
    """Drafts the tokens that will be drawn, except at the places in `wrong`."""

    def __init__(self, texts: list[list[int]], wrong: set[int]) -> None:
        self._texts, self._wrong = texts, wrong

    def __call__(self, texts: list[Sequence], limits: list[int]) -> list[list[int]]:
        drafts = []
        for text, limit in zip(texts, limits, strict=True):
            start = len(text.tokens)
            ahead = self._texts[text.number][start : start + limit]
            drafts.append([(t + (start + n in self._wrong)) % 50 for n, t in enumerate(ahead)])
        return drafts


PROMPTS = [[3, 1, 4, 1], [5], list(range(20))]


@functools.cache
def drawn_without_drafts(engine: str, window: int | None, temperature: float) -> list[list[int]]:
    return drawn(
        model_of(extra={"window": window}),
        PROMPTS,
        engine,
        max_new_tokens=40,
        temperature=temperature,
    )


@settings(max_examples=5, deadline=None)
@given(wrong=st.sets(st.integers(0, 39)), temperature=st.sampled_from([0, 1.0]))
@pytest.mark.parametrize("engine", WITH_FASTEST)
@pytest.mark.parametrize("window", [None, 5])
def test_drafts_right_or_wrong_change_no_token(engine, window, wrong, temperature):
    model = model_of(extra={"window": window})
    given = {"max_new_tokens": 40, "temperature": temperature}
    plain = drawn_without_drafts(engine, window, temperature)
    oracle = Oracle(plain, wrong)
    assert draft(model, PROMPTS, engine, oracle, **given) == plain
    (alone,) = draft(model, PROMPTS[:1], engine, oracle, **given)
    assert alone == plain[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_lookup_and_draft_draw_what_the_model_draws(engine):
    model, other = model_of(), model_of("mqa", "learned", seed=6)
    given = {"max_new_tokens": 60, "temperature": 0.3}
    plain = drawn(model, [[3, 1, 4]], engine, **given)
    sample = SampleConfig.model_validate({"top_k": None, **given})
    for drafting, right in ((model, True), (other, False)):
        text = Sequence(0, [3, 1, 4], LIMIT, sample)
        drafter = DraftModel(LIMIT, engine_of(drafting, "torch"))
        for _ in sample_speculatively(engine_of(model, engine), drafter, [text]):
            pass
        assert [text.tokens] == plain
        assert (text.accepted == text.drafted > 30) == right
    assert draft(model, [[3, 1, 4]], engine, PromptLookup(), **given) == plain


def test_a_prefill_carries_no_drafts():
    class Everywhere:
        def __call__(self, texts: list[Sequence], limits: list[int]) -> list[list[int]]:
            limits_seen.append(limits[0])
            return [[1] * limit for limit in limits]

    limits_seen: list[int] = []
    draft(model_of(), [[3, 1, 4]], "torch", Everywhere(), max_new_tokens=30, temperature=0)
    assert limits_seen[0] == 0
    assert max(limits_seen) == 3
    assert limits_seen.count(0) > 1  # also after each slide


def test_lookup_drafts_what_followed_last_time():
    text = Sequence(0, [1, 2, 3, 4, 1, 2], LIMIT)
    lookup = PromptLookup()
    assert lookup([text], [2]) == [[3, 4]]
    text.tokens += [9]
    assert lookup([text], [4]) == [[]]
    text.tokens += [1, 2]
    assert lookup([text], [4]) == [[9, 1, 2]]  # the latest place
    assert lookup([Sequence(1, [5], LIMIT)], [4]) == [[]]


def test_a_run_writes_the_same_texts_and_says_how_many_drafts_were_right():
    run = run_of()
    settings = {"max_new_tokens": 40, "temperature": 1.5}
    plain = run.generate("the ", **settings)
    one, other = (run.start(["the "], draft=draft, **settings) for draft in ("lookup", run))
    for _ in itertools.zip_longest(one, other):  # they take turns
        pass
    assert one.samples[0].text == other.samples[0].text == plain
    assert other.drafted == other.accepted > 0


def test_the_command_writes_the_same_texts(gptmini, run):
    words = ["generate", run, "--prompt", "the ", "--max-new-tokens", "20", "--json"]
    found = [json.loads(gptmini(*words, *more)[1]) for more in ([], ["--lookup"], ["--draft", run])]
    plain, by_lookup, by_draft = ([text["tokens"] for text in each["samples"]] for each in found)
    assert plain == by_lookup == by_draft
    assert found[2]["drafted"] == found[2]["accepted"] > 0
