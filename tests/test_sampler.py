import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from gptmini import sampler, trainer
from gptmini.config import SampleConfig
from gptmini.errors import CheckpointError, ConfigError, DataError
from gptmini.model import GPT
from gptmini.tokenizer import BpeTokenizer, CharTokenizer


def model_of(variant: str = "gqa", position: str = "rope", extra: dict | None = None) -> GPT:
    torch.manual_seed(5)
    heads = {"variant": variant, "n_kv_head": 2 if variant == "gqa" else None} | (extra or {})
    shape = {"attention": heads, "position": position, "tie_embeddings": False}
    model = GPT(tiny(model=shape).with_tokenizer("byte", 50).model).eval()
    with torch.no_grad():  # strong weights: a text that varies, far from ties
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_and_without_the_cache_the_same_tokens_ten_contexts_long(
    variant, position, temperature
):
    model = model_of(variant, position)
    sample = SampleConfig(temperature=temperature, max_new_tokens=160, top_k=None)
    prompt = [3, 1, 4, 1, 5]
    cached = list(sampler.decode(model, prompt, sample))
    assert cached == list(sampler.decode(model, prompt, sample, use_cache=False))
    assert len(cached) == 160
    assert len(set(cached)) > 5


@pytest.mark.parametrize("attention", [{"window": 5}, {"window": 5, "full_every": 2}], ids=str)
def test_windows_slide_alike_with_and_without_the_cache(attention):
    model = model_of(extra=attention)
    sample = SampleConfig(temperature=1.0, max_new_tokens=160, top_k=None)
    cached = list(sampler.decode(model, [3, 1, 4], sample))
    assert cached == list(sampler.decode(model, [3, 1, 4], sample, use_cache=False))


def test_prefill_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model, prompt = model_of(extra={"window": 5, "full_every": 2}), list(range(15))
    sample = SampleConfig(temperature=0, max_new_tokens=20)
    whole = list(sampler.decode(model, prompt, sample))
    monkeypatch.setattr(sampler, "PREFILL", 4)
    assert list(sampler.decode(model, prompt, sample)) == whole


def test_stop_and_error_past_the_context():
    model = model_of()
    base = {"max_new_tokens": 50, "temperature": 0}
    slide, stop = (
        list(sampler.decode(model, [3, 1], SampleConfig.model_validate({**base, "overflow": o})))
        for o in ("slide", "stop")
    )
    assert stop == slide[: 16 - 2 + 1]  # the last token needs no place of its own
    with pytest.raises(ConfigError, match="2 tokens of prompt and 50 new ones do not fit"):
        list(sampler.decode(model, [3, 1], SampleConfig(max_new_tokens=50, overflow="error")))
    fitting = SampleConfig(max_new_tokens=15, overflow="error")
    assert len(list(sampler.decode(model, [3, 1], fitting))) == 15


def test_greedy_is_the_argmax_of_the_whole_model():
    model = model_of()
    tokens = [3, 1, 4]
    for token in sampler.decode(model, tokens, SampleConfig(temperature=0, max_new_tokens=10)):
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)


def test_the_cost_of_a_token_stays_bounded(monkeypatch: pytest.MonkeyPatch):
    model, seen = model_of(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda t, c: seen.append(t.shape[1]) or hidden(t, c))
    list(sampler.decode(model, [1] * 100, SampleConfig(max_new_tokens=160)))
    assert seen[0] == 16  # the last context of the prompt
    assert sum(seen) <= 3 * 160
    assert max(seen) == 16


def test_the_filters_keep_what_they_say():
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()

    def kept(**settings) -> list[float]:
        base = {"temperature": 1.0, "top_k": None, "top_p": None}
        sample = SampleConfig.model_validate(base | settings)
        return [round(p, 4) for p in sampler.probabilities(logits, sample).tolist()]

    assert kept() == [0.5, 0.2, 0.15, 0.1, 0.05]
    assert kept(top_k=2) == [0.7143, 0.2857, 0, 0, 0]
    assert kept(top_k=9) == kept()
    assert kept(top_p=0.7) == [0.7143, 0.2857, 0, 0, 0]
    assert kept(top_p=0.71) == [0.5882, 0.2353, 0.1765, 0, 0]
    assert kept(top_p=0.01) == [1, 0, 0, 0, 0]
    # top-p after top-k: 0.5 / 0.7 of the two that are left is enough
    assert kept(top_k=2, top_p=0.71) == [1, 0, 0, 0, 0]
    # temperature before both: at 0.5 the probabilities go with their squares
    assert kept(temperature=0.5)[0] == round(0.25 / (0.25 + 0.04 + 0.0225 + 0.01 + 0.0025), 4)


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=20),
    st.integers(1, 25),
    st.floats(0.01, 1.0),
    st.floats(0.01, 10),
)
def test_filtered_probabilities_are_probabilities(logits, top_k, top_p, temperature):
    sample = SampleConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    found = sampler.probabilities(torch.tensor(logits), sample)
    assert found.sum().item() == pytest.approx(1, abs=1e-5)
    plain = torch.tensor(logits).div(temperature).softmax(dim=0)
    assert plain[found > 0].min() >= plain[found == 0].max() if (found == 0).any() else True


def test_draws_follow_the_probabilities():
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    sample = SampleConfig(temperature=0.7, top_k=8)
    expected = sampler.probabilities(logits, sample)
    generator = torch.Generator().manual_seed(1)
    draws = 4000
    counts = torch.zeros(12)
    for _ in range(draws):
        counts[sampler.choose(logits, sample, generator)] += 1
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_squared = ((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum()
    assert chi_squared < 18.5  # 1 in 100 with 7 degrees of freedom


def test_weights_that_are_not_finite_are_said():
    with pytest.raises(CheckpointError, match="non-finite"):
        sampler.choose(torch.tensor([0.0, float("nan")]), SampleConfig(), torch.Generator())


@pytest.fixture
def run(text_file: Path, tmp_path: Path) -> sampler.Run:
    config = tiny(data={"path": str(text_file)}, train={"steps": 3})
    trainer.train(config, tmp_path / "run", tmp_path / "cache")
    return sampler.load(tmp_path / "run")


def test_a_run_streams_what_it_generates_and_repeats_itself(run: sampler.Run):
    text = run.generate("the ", max_new_tokens=30, top_k=None)
    assert text == "".join(run.stream("the ", max_new_tokens=30, top_k=None))
    assert text != run.generate("the ", max_new_tokens=30, top_k=None, seed=2)
    begins = list(sampler.decode(run.model, [256], SampleConfig(temperature=0, max_new_tokens=5)))
    assert run.generate("", max_new_tokens=5, temperature=0) == run.tokenizer.decode(begins)
    with pytest.raises(ConfigError, match=r"sample.temperature: expected greater than or equal"):
        run.generate("x", temperature=-1.0)


def test_a_document_token_ends_the_text(run: sampler.Run, monkeypatch):
    monkeypatch.setattr(sampler, "decode", lambda *_: iter([104, 105, 256, 106]))
    assert run.generate("x") == "hi"


def test_a_long_prompt_keeps_its_tail_and_says_so(run: sampler.Run, capsys):
    tail = "x" * 16
    assert run.generate("abc" + tail) == run.generate(tail)
    assert "19 tokens, the context has 16" in capsys.readouterr().err


def test_a_tokenizer_of_another_run_is_refused(run: sampler.Run):
    (run.path / "tokenizer.json").write_text(CharTokenizer("é").to_json())
    with pytest.raises(DataError, match="not the tokenizer of this run"):
        sampler.load(run.path)


def test_a_space_at_the_end_belongs_to_the_next_word(run: sampler.Run, tiny_encoding, monkeypatch):
    """The model has seen " the", and a lone space only before what is no word."""
    text_tokenizer = BpeTokenizer(tiny_encoding)
    model = GPT(tiny().with_tokenizer("bpe", text_tokenizer.vocab_size).model).eval()
    other = dataclasses.replace(run, tokenizer=text_tokenizer, model=model)
    seen: list[list[int]] = []
    hidden = model.hidden

    def note(tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return hidden(tokens, *rest)

    monkeypatch.setattr(model, "hidden", note)
    drawn = [other.generate("the ", max_new_tokens=1, seed=seed) for seed in range(40)]
    assert set(drawn) == {"", "the"}  # a lone space, or the rest of " the"
    assert seen[0] == [257]  # "the" alone
    assert other.generate(" ", max_new_tokens=1, seed=0) in ("", "the")
    assert seen[-1] == [text_tokenizer.document_token]
