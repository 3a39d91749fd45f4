"""The loss on held-out text: against formulas, and the same however it is computed."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import gpt2, new_cache, tiny, train
from hypothesis import given
from hypothesis import strategies as st

from gptmini.errors import DataError
from gptmini.evidence.evaluate import evaluate_run, held_out, whole_text
from gptmini.generate.run import Run, load
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.text.corpus import prepare_corpus
from gptmini.text.tokenizer import Tokenizer, create
from gptmini.text.tokens import Span
from gptmini.train import batches
from gptmini.train.evaluate import Evaluation, evaluate

TEXT = "héllo wörld, 東京! \n" * 60


EXACT = Compute(torch.device("cpu"), torch.float32)


def says(logits: torch.Tensor) -> GPT:
    """A model that gives these logits (V,) everywhere: its last norm gives a unit vector."""
    settings = {"bias": True, "tie_embeddings": False, "context_length": 16, "norm": "layernorm"}
    config = tiny(model=settings).with_tokenizer("byte", len(logits)).model
    model = GPT(config)
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.zero_()[0] = 1
        model.head.weight.zero_()[:, 0] = logits
    return model


def run_of(model: GPT, tokenizer: Tokenizer) -> Run:
    config = tiny(model={"context_length": 16})
    return Run(Path("none"), config, tokenizer, model)


def tokenizers() -> dict[str, Tokenizer]:
    sizes = {"byte": None, "char": None, "bpe": 400}
    return {kind: create(kind, size, iter([TEXT])) for kind, size in sizes.items()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_model_that_knows_nothing_costs_log_of_the_vocabulary(kind, text, tmp_path):
    tokenizer = tokenizers()[kind]
    run = run_of(says(torch.zeros(tokenizer.vocab_size)), tokenizer)
    found = evaluate_run(run, whole_text(run, [str(text)], tmp_path / "cache"))
    tokens = len(tokenizer.encode(TEXT))
    assert found.tokens.sum() == tokens  # the document token in front is no target
    assert found.bytes.sum() == len(TEXT.encode())
    assert found.loss == pytest.approx(math.log(tokenizer.vocab_size), rel=1e-6)
    assert found.perplexity == pytest.approx(tokenizer.vocab_size, rel=1e-5)
    bits = tokens * math.log2(tokenizer.vocab_size) / len(TEXT.encode())
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-6)
    assert found.loss_error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "gpt2"])
def test_bits_per_byte_of_one_text_agree_across_tokenizers(kind, text, tmp_path):
    """A model to which all bytes are alike, spelt in tokens of n bytes at 256^-n, costs 8 bits.

    The many spellings of one text add up to more than 1, so Z takes its own small share.
    """
    tokenizer = gpt2() if kind == "gpt2" else tokenizers()[kind]
    logits = torch.tensor(tokenizer.byte_lengths() * -math.log(256))
    logits[tokenizer.document_token] = -100
    run = run_of(says(logits.float()), tokenizer)
    found = evaluate_run(run, whole_text(run, [str(text)], tmp_path / "cache"))
    waste = logits.logsumexp(0).item() / math.log(2) * found.tokens.sum() / found.bytes.sum()
    assert 0 <= waste < 0.2
    assert found.bits_per_byte == pytest.approx(8 + waste, rel=1e-5)


def test_accuracy_counts_the_likeliest(text, tmp_path):
    tokenizer = create("byte", None, ())
    logits = torch.zeros(257)
    logits[ord("l")] = 1
    run = run_of(says(logits), tokenizer)
    found = evaluate_run(run, whole_text(run, [str(text)], tmp_path / "cache"))
    assert found.accuracy == pytest.approx(TEXT.count("l") / len(TEXT.encode()))


@pytest.mark.parametrize("stride", [None, 16, 5, 1])
def test_the_number_does_not_depend_on_the_batch_size_or_on_dropout(stride, text, tmp_path):
    torch.manual_seed(0)
    settings = tiny(model={"dropout": 0.5}, data={"path": str(text)})
    corpus = prepare_corpus(settings, tmp_path / "cache")
    model = GPT(settings.with_tokenizer("byte", 257).model).train()
    state = torch.get_rng_state()
    found = []
    for size in (1, 3, 8, 1000):
        windows = batches.validation_batches(corpus.validation, 16, size, stride)
        found.append(evaluate(model, windows, corpus.tokenizer.byte_lengths(), EXACT))
    for one in found:
        assert one.tokens.sum() == sum(len(span) - 1 for span in corpus.validation)
        assert one.loss == pytest.approx(found[0].loss, rel=1e-7)
        assert one.accuracy == found[0].accuracy
        assert one.bytes.tolist() == found[0].bytes.tolist()
        assert one.loss_error == pytest.approx(found[0].loss_error, rel=1e-6)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("stride", [16, 7, 1])
def test_each_token_is_read_behind_what_its_window_has_of_it(stride, text, tmp_path):
    """Against one token at a time, each with the context that the stride gives it."""
    torch.manual_seed(1)
    settings = tiny(data={"path": str(text)})
    corpus = prepare_corpus(settings, tmp_path / "cache")
    model = GPT(settings.with_tokenizer("byte", 257).model).eval()
    (span,) = corpus.validation
    tokens = torch.from_numpy(span.tokens.read(span.first, len(span)).astype(np.int64))
    nats, start = 0.0, 0
    for place in range(1, len(tokens)):
        if place - start > 16:
            start += stride
        scores = model(tokens[None, start:place])[0, -1].log_softmax(-1)
        nats -= scores[tokens[place]].item()
    windows = batches.validation_batches(corpus.validation, 16, 4, stride)
    found = evaluate(model, windows, corpus.tokenizer.byte_lengths(), EXACT)
    assert found.nats.sum() == pytest.approx(nats, rel=1e-5)


@given(st.integers(2, 300), st.integers(0, 2**32))
def test_the_standard_error_is_that_of_the_mean_of_blocks(count, seed):
    """With windows of one size it is that of statistics, of the means of at most 100 blocks."""
    chance = np.random.default_rng(seed)
    nats = chance.gamma(2.0, 10.0, count)
    found = Evaluation(nats, np.full(count, 8.0), np.full(count, 16.0), 0)
    if count <= 100:
        expected = statistics.stdev(nats / 8) / count**0.5
        assert found.loss_error == pytest.approx(expected)
        assert found.bits_per_byte_error == pytest.approx(expected / math.log(2) / 2)
    elif count % 100 == 0:
        blocks = nats.reshape(100, -1).mean(axis=1) / 8
        assert found.loss_error == pytest.approx(statistics.stdev(blocks) / 10)


def test_neighbours_that_go_together_widen_the_error():
    """Ten windows in a row that share their luck count as one, not as ten."""
    luck = np.random.default_rng(0).normal(3, 1, 100)
    apart = Evaluation(np.tile(luck, 10), np.ones(1000), np.ones(1000), 0)
    together = Evaluation(np.repeat(luck, 10), np.ones(1000), np.ones(1000), 0)
    assert together.loss == pytest.approx(apart.loss)
    assert together.loss_error == pytest.approx(luck.std(ddof=1) / 10)
    assert together.loss_error > 2 * apart.loss_error


def test_one_window_has_no_standard_error():
    found = Evaluation(np.array([4.0]), np.array([2.0]), np.array([2.0]), 0)
    assert found.loss_error is None
    assert found.facts()["bits_per_byte_error"] is None


def test_a_run_is_measured_on_what_it_did_not_see(text_file, tmp_path):
    cache = new_cache(tmp_path)
    train(tiny(data={"path": str(text_file)}), tmp_path / "run", cache)
    run = load(tmp_path / "run", "cpu", "float32", cache)
    (span,) = held_out(run, cache)
    whole = span.tokens
    assert (span.first, span.last) == (len(whole) - round(len(whole) / 10), len(whole))
    best = run.state["best"]
    found = evaluate_run(run, [span])
    assert found.loss == pytest.approx(best["val_loss"], abs=2e-3)  # that one is in bfloat16
    assert evaluate_run(run, [Span(whole, 0, span.first)]).tokens.sum() == span.first - 1
    text_file.write_text(text_file.read_text() + "more")
    with pytest.raises(DataError, match="not the text"):
        held_out(run, cache)


def test_windows_are_as_long_as_in_training(text, tmp_path):
    """Positions that were never trained on say nothing of a model."""
    run = run_of(says(torch.zeros(257)), create("byte", None, ()))
    run.config = run.config.with_train(seq_len=5)
    spans = whole_text(run, [str(text)], tmp_path / "cache")
    assert len(evaluate_run(run, spans).nats) == math.ceil(len(TEXT.encode()) / 5)


def test_what_was_trained_on_standard_input_is_not_waited_for(tmp_path):
    run = run_of(says(torch.zeros(257)), create("byte", None, ()))
    run.config = tiny(data={"path": "-"})
    with pytest.raises(DataError, match="was trained on standard input; name its text"):
        held_out(run, tmp_path)
