"""Random use of the engines: a text gets the same logits alone and together with others.

Hypothesis draws models, numbers of slots and sequences of what callers do: texts with common
prefixes come, grow, are scored, draft ahead, take tokens back, slide, lose their slots and end;
prompts are prefilled in chunks between the calls of others. The compiled engine must give equal
bits, that of PyTorch the logits of the plain model. The suite runs the same few sequences each
time. For new ones, about ten minutes of them:

    GPTMINI_EXAMPLES=800 python -m pytest tests/stress/test_engine_machine.py
"""

import os
import random
import shutil
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gptmini.extras.engine.build import build_library
from gptmini.extras.engine.gpu_engine import GpuEngine
from gptmini.extras.engine.native_engine import NativeEngine
from gptmini.generate.engine import PREFILL_CHUNK, SPARE_POSITIONS
from gptmini.generate.precision import PRECISIONS
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT
from tests.support import tiny

EXAMPLES = int(os.environ.get("GPTMINI_EXAMPLES", "0"))
LIMIT = 512  # the context length: four chunks
VOCABULARY = 50
MOST_TEXTS = 5
SOURCES = [random.Random(seed).choices(range(VOCABULARY), k=LIMIT) for seed in range(2)]

# Lengths around whole chunks, and around what a single call takes without a prefill.
LENGTHS = [
    1,
    2,
    SPARE_POSITIONS,
    SPARE_POSITIONS + 1,
    60,
    PREFILL_CHUNK - 1,
    PREFILL_CHUNK,
    PREFILL_CHUNK + 1,
    PREFILL_CHUNK + SPARE_POSITIONS,
    PREFILL_CHUNK + SPARE_POSITIONS + 1,
    PREFILL_CHUNK + SPARE_POSITIONS + 2,
    200,
    2 * PREFILL_CHUNK,
    2 * PREFILL_CHUNK + SPARE_POSITIONS + 1,
    300,
    3 * PREFILL_CHUNK,
    400,
    LIMIT - 3,
    LIMIT,
]
BEGINNINGS = [
    1,
    PREFILL_CHUNK,
    PREFILL_CHUNK + 1,
    200,
    2 * PREFILL_CHUNK,
    300,
    3 * PREFILL_CHUNK,
    400,
]
sources = st.integers(0, len(SOURCES) - 1)
lengths = st.sampled_from(LENGTHS)
# Windows whose ring overwrites keys within the context, or never does.
attentions = st.fixed_dictionaries(
    {
        "variant": st.sampled_from(["mha", "gqa"]),
        "window": st.sampled_from([None, 20, 300]),
        "full_every": st.sampled_from([None, 2]),
    }
)


@cache
def model_of(variant: str, window: int | None, full_every: int | None) -> GPT:
    torch.manual_seed(0)
    attention = {"variant": variant, "n_kv_head": 2 if variant == "gqa" else None}
    attention["window"] = window
    attention["full_every"] = full_every if window else None
    shape = {"attention": attention, "context_length": LIMIT, "tie_embeddings": False}
    model = GPT(tiny(model=shape).with_tokenizer("byte", VOCABULARY).model).eval()
    with torch.no_grad():  # strong weights, so that a wrong key changes the logits
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


@cache
def first_engine_of(model: GPT, weights: str) -> NativeEngine:
    library = build_library()
    assert library is not None
    return NativeEngine(library, model, weights, 1)


def engine_of(model: GPT, weights: str, n_slots: int) -> NativeEngine:
    """An engine that shares its weights with the others of a model."""
    return first_engine_of(model, weights).open_another(n_slots)


class Known:
    """A text in the shared engine."""

    def __init__(self, number: int, prompt: list[int]) -> None:
        self.text = Sequence(number, prompt, LIMIT)
        self.written = 0  # positions of its slot that have held a key of it

    def __repr__(self) -> str:  # what a failing sequence shows
        text = self.text
        return f"<text {text.number}: {text.n_cached} of {len(text.context)} tokens cached>"

    def unseen(self) -> int:
        return len(self.text.context) - self.text.n_cached


class Company(RuleBasedStateMachine):
    """Between the rules, each text has at least one token that its cache lacks."""

    weights = "float32"

    @initialize(attention=attentions, n_slots=st.integers(1, 4))
    def open(self, attention: dict, n_slots: int) -> None:
        self.windowed = attention["window"] is not None
        self.model = model_of(**attention)
        self.n_slots = n_slots
        self.engine = self.open_engine(n_slots)
        self.n_texts = 0
        self.live: list[Known] = []

    def open_engine(self, n_slots: int) -> NativeEngine:
        return engine_of(self.model, self.weights, n_slots)

    # -- what callers do ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MOST_TEXTS)
    @rule(beginning=sources, n_beginning=st.sampled_from(BEGINNINGS), rest=sources, n_rest=lengths)
    def come(self, beginning: int, n_beginning: int, rest: int, n_rest: int) -> None:
        self.add(SOURCES[beginning][:n_beginning] + SOURCES[rest][n_beginning:][:n_rest])

    @precondition(lambda self: len(self.live) < MOST_TEXTS and self.offered())
    @rule(data=st.data(), rest=sources, n_rest=lengths, is_called=st.booleans())
    def come_behind(self, data: st.DataObject, rest: int, n_rest: int, is_called: bool) -> None:
        """Bring a text that begins with what a slot offers; two random texts rarely do."""
        offered = data.draw(st.sampled_from(self.offered()))
        n_chunks = data.draw(st.integers(1, len(offered) // PREFILL_CHUNK))
        beginning = offered[: n_chunks * PREFILL_CHUNK]
        self.add(beginning + SOURCES[rest][len(beginning) :][:n_rest])
        if is_called:  # or else another rule may overwrite the prefix first
            known = self.live[-1]
            known.text.n_logits = 1
            self.call([known])
            self.append(known, rest)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n_drafted=st.sampled_from([0, 0, 1, 3]), source=sources)
    def step(self, data: st.DataObject, n_drafted: int, source: int) -> None:
        """Give each of several texts a token; some of the tokens drafted behind it are right."""
        members = data.draw(st.lists(st.sampled_from(self.live), min_size=1, unique=True))
        members = members[: self.n_slots]
        drafts = []
        for known in members:
            context = known.text.context
            draft = SOURCES[source][len(context) :][:n_drafted]
            drafts.append(draft)
            context += draft
            known.text.n_logits = 1 + len(draft)
        self.call(members)
        for known, draft in zip(members, drafts, strict=True):
            n_wrong = data.draw(st.integers(0, len(draft)))
            del known.text.context[len(known.text.context) - n_wrong :]
            self.append(known, data.draw(sources))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), source=sources)
    def score(self, data: st.DataObject, source: int) -> None:
        """Ask for the logits of all tokens that the cache lacks: of a new text, the prompt."""
        known = data.draw(st.sampled_from(self.live))
        known.text.n_logits = known.unseen()
        self.call([known])
        self.append(known, source)

    @precondition(lambda self: self.long())
    @rule(data=st.data(), most=st.integers(1, PREFILL_CHUNK), n_chunks=st.integers(1, 3))
    def prefill(self, data: st.DataObject, most: int, n_chunks: int) -> None:
        known = data.draw(st.sampled_from(self.long()))
        for _ in range(n_chunks):
            self.chunk(known, most)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), source=sources, length=lengths)
    def grow(self, data: st.DataObject, source: int, length: int) -> None:
        known = data.draw(st.sampled_from(self.live))
        known.text.context += SOURCES[source][len(known.text.context) :][:length]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), length=lengths, source=sources)
    def take_back(self, data: st.DataObject, length: int, source: int) -> None:
        """Replace the last tokens by another; a ring still has the keys of SPARE_POSITIONS."""
        known = data.draw(st.sampled_from(self.live))
        text = known.text
        if self.windowed:
            length = min(length, SPARE_POSITIONS - (known.written - text.n_cached))
        length = min(length, len(text.context) - 1)
        del text.context[len(text.context) - length :]
        self.append(known, source)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.live)).text
        text.context = text.context[len(text.context) // 2 :]
        text.n_cached = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from(["length", None]))
    def leave(self, data: st.DataObject, reason: str | None) -> None:
        """End a text, or never ask for it again."""
        known = data.draw(st.sampled_from(self.live))
        known.text.finish_reason = reason
        self.live.remove(known)

    def add(self, prompt: list[int]) -> None:
        self.n_texts += 1
        self.live.append(Known(self.n_texts, prompt))

    def offered(self) -> list[list[int]]:
        """Beginnings of texts that a slot holds for others."""
        return [tokens for tokens in self.engine._prefilled if tokens]

    def long(self) -> list[Known]:
        """Texts of which a chunk can be prefilled."""
        return [known for known in self.live if known.unseen() > PREFILL_CHUNK + SPARE_POSITIONS]

    # -- what they must get ------------------------------------------------------------------------

    def append(self, known: Known, source: int) -> None:
        """Add a token, as the sampler does: that of a source at this place, so that texts meet."""
        text = known.text
        if len(text.context) == LIMIT:
            text.context = text.context[LIMIT // 2 :]
            text.n_cached = 0
        text.context.append(SOURCES[source][len(text.context)])
        text.n_cached = min(text.n_cached, len(text.context) - 1)

    def call(self, members: list[Known]) -> None:
        """Call the engine with some texts and compare their logits with those of each alone."""
        expected = [self.expected(known) for known in members]
        found = self.engine([known.text for known in members])
        for known, logits, logits_alone in zip(members, found, expected, strict=True):
            text = known.text
            assert text.n_cached == len(text.context)
            assert logits.shape == (text.n_logits, VOCABULARY)
            self.compare(logits, logits_alone)
            known.written = max(known.written, text.n_cached)

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(found, expected)

    def chunk(self, known: Known, most: int) -> None:
        self.follow(known)
        known.text.n_logits = 1
        self.engine.prefill_chunk(known.text, most)
        known.written = max(known.written, known.text.n_cached)

    def follow(self, known: Known) -> None:
        """Notice a text that has lost its slot and begins again."""
        if known.text not in self.engine._slots or known.text.n_cached == 0:
            known.text.n_cached = known.written = 0

    def expected(self, known: Known) -> torch.Tensor:
        """The logits of the text alone, in one pass of the whole."""
        self.follow(known)
        text = known.text
        fresh = Sequence(0, text.context, LIMIT)
        fresh.n_logits = text.n_logits
        (logits,) = engine_of(self.model, self.weights, 1)([fresh])
        if self.weights == "float32":
            plain = self.model(torch.tensor([text.context]))[0, -text.n_logits :]
            torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)
        return logits


class TorchCompany(Company):
    """The same on PyTorch's engine."""

    max_pass_tokens = PREFILL_CHUNK

    def open_engine(self, n_slots: int) -> GpuEngine:
        engine = GpuEngine(self.model, n_slots, "float32")
        engine._max_pass_tokens = self.max_pass_tokens
        engine._on_cpu = self.max_pass_tokens == PREFILL_CHUNK
        return engine

    def offered(self) -> list[list[int]]:
        return []

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    def chunk(self, known: Known, most: int) -> None:
        self.follow(known)
        end = known.text.n_cached + PREFILL_CHUNK
        known.text.n_logits = 1
        is_long = end < len(known.text.context)
        assert self.engine.prefill_chunk(known.text, most) == is_long
        if is_long:
            assert known.text.n_cached == end
        known.written = max(known.written, known.text.n_cached)

    def expected(self, known: Known) -> torch.Tensor:
        self.follow(known)
        text = known.text
        return self.model(torch.tensor([text.context]))[0, -text.n_logits :]


@pytest.mark.parametrize("max_pass_tokens", [PREFILL_CHUNK, 4 * PREFILL_CHUNK])
@torch.inference_mode()
def test_a_text_has_the_model_s_logits_on_the_torch_engine(max_pass_tokens: int):
    machine = type("TorchCompany", (TorchCompany,), {"max_pass_tokens": max_pass_tokens})
    run_machine(machine)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@pytest.mark.parametrize("weights", PRECISIONS)
@torch.inference_mode()
def test_a_text_has_the_same_logits_alone_and_with_others(weights: str):
    run_machine(type("Company", (Company,), {"weights": weights}))


def run_machine(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or 15,
            stateful_step_count=50,
            derandomize=not EXAMPLES,
            suppress_health_check=list(HealthCheck),
        ),
    )
