"""The loss on held-out text: against formulas, and the same however it is computed."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gptmini.data.corpus import prepare_corpus
from gptmini.data.token_file import Corpus
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.train import batches
from gptmini.train.evaluate import Evaluation, evaluate
from tests.support import tiny

TEXT = "héllo wörld, 東京! \n" * 60


EXACT = Compute(torch.device("cpu"), torch.float32)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


def windows_of_one(corpus: Corpus) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return batches.iter_validation_batches(corpus.validation, 16, 1)


@pytest.mark.parametrize("stride", [None, 16, 5, 1])
def test_the_number_does_not_depend_on_the_batch_size_or_on_dropout(stride, text, tmp_path):
    torch.manual_seed(0)
    settings = tiny(model={"dropout": 0.5}, data={"path": str(text)})
    corpus = prepare_corpus(settings, tmp_path / "cache")
    model = GPT(settings.with_tokenizer("byte", 257).model).train()
    state = torch.get_rng_state()
    found = []
    for size in (1, 3, 8, 1000):
        windows = batches.iter_validation_batches(corpus.validation, 16, size, stride)
        found.append(evaluate(model, windows, corpus.tokenizer.compute_byte_lengths(), EXACT))
    for one in found:
        assert one.tokens.sum() == sum(len(text) - 1 for text in corpus.validation)
        assert one.loss == pytest.approx(found[0].loss, rel=1e-7)
        assert one.accuracy == found[0].accuracy
        assert one.bytes.tolist() == found[0].bytes.tolist() == one.tokens.tolist()
        assert one.loss_error is None or one.loss_error == pytest.approx(found[0].loss_error)
    assert model.training
    evaluate(model.eval(), windows_of_one(corpus), corpus.tokenizer.compute_byte_lengths(), EXACT)
    assert not model.training
    assert torch.equal(state, torch.get_rng_state())


def test_targets_that_do_not_count_are_never_correct(text, tmp_path):
    """A model that always expects token 0, on overlapping windows of a text that has none."""
    shape = {"norm": "layernorm", "bias": True, "tie_embeddings": False}
    settings = tiny(model=shape, data={"path": str(text)}).with_tokenizer("byte", 257)
    corpus, model = prepare_corpus(settings, tmp_path / "cache"), GPT(settings.model)
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(1)
        model.head.weight.zero_()[0] = 1
    windows = batches.iter_validation_batches(corpus.validation, 16, 4, 5)
    assert evaluate(model, windows, corpus.tokenizer.compute_byte_lengths(), EXACT).correct == 0


@pytest.mark.parametrize("stride", [16, 7, 1])
def test_each_token_is_read_behind_what_its_window_has_of_it(stride, text, tmp_path):
    """Against one token at a time, each with the context that the stride gives it."""
    torch.manual_seed(1)
    settings = tiny(data={"path": str(text)})
    corpus = prepare_corpus(settings, tmp_path / "cache")
    model = GPT(settings.with_tokenizer("byte", 257).model).eval()
    (held_out,) = corpus.validation
    tokens = torch.from_numpy(held_out.read(0, len(held_out)).astype(np.int64))
    nats, start = 0.0, 0
    for place in range(1, len(tokens)):
        if place - start > 16:
            start += stride
        scores = model(tokens[None, start:place])[0, -1].log_softmax(-1)
        nats -= scores[tokens[place]].item()
    windows = batches.iter_validation_batches(corpus.validation, 16, 4, stride)
    found = evaluate(model, windows, corpus.tokenizer.compute_byte_lengths(), EXACT)
    assert found.nats.sum() == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize("n_windows", [20, 60, 126, 357])
@pytest.mark.parametrize("correlation", [0.0, 0.2, 0.45])
def test_the_interval_covers_the_truth_where_neighboring_windows_correlate(n_windows, correlation):
    """On losses whose mean is known: each follows the one before it, as in an AR(1) process."""
    chance = np.random.default_rng(n_windows)
    noise = chance.normal(size=(1000, n_windows))
    losses = np.empty_like(noise)
    losses[:, 0] = noise[:, 0]
    for place in range(1, n_windows):
        fresh = (1 - correlation**2) ** 0.5 * noise[:, place]
        losses[:, place] = correlation * losses[:, place - 1] + fresh
    covered = 0
    for windows in losses:
        found = Evaluation(8 * windows, np.full(n_windows, 8.0), np.full(n_windows, 16.0), 0)
        covered += abs(found.loss) <= found.loss_error
    assert 0.90 <= covered / 1000 <= 0.97


def test_the_error_of_independent_windows_is_that_of_student():
    chance = np.random.default_rng(0)
    nats = chance.gamma(2.0, 10.0, 400)
    found = Evaluation(nats, np.full(400, 8.0), np.full(400, 16.0), 0)
    blocks = nats.reshape(20, 20).mean(axis=1) / 8
    expected = 2.093 * statistics.stdev(blocks) / 20**0.5  # t(19) at 97.5 %
    assert found.loss_error == pytest.approx(expected)
    assert found.bits_per_byte_error == pytest.approx(expected / math.log(2) / 2)


def test_the_error_of_windows_of_unequal_sizes_is_that_of_resampling():
    """Long windows that cost more in all must not count as spread: the loss is a ratio of sums."""
    chance = np.random.default_rng(0)
    sizes = chance.integers(1, 50, 2000).astype(float)
    nats = sizes * chance.normal(3, 0.2, 2000)
    found = Evaluation(nats, sizes, sizes, 0)
    drawn = chance.integers(0, 2000, (2000, 2000))
    losses = nats[drawn].sum(1) / sizes[drawn].sum(1)
    assert found.loss_error == pytest.approx(2.093 * losses.std(), rel=0.35)


def test_a_short_text_has_no_error():
    losses = np.arange(1.0, 21.0)
    assert Evaluation(losses, np.ones(20), np.ones(20), 0).loss_error is not None
    found = Evaluation(losses[:19], np.ones(19), np.ones(19), 0)
    assert found.loss_error is None
    assert found.to_dict()["bits_per_byte_error"] is None
