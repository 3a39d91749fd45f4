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

TEXT = "héllo wörld, 東京! \n" * 200


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
    corpus = prepare_corpus(settings)
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
        assert one.loss_half_width == pytest.approx(found[0].loss_half_width, rel=1e-5)
    assert model.training
    evaluate(model.eval(), windows_of_one(corpus), corpus.tokenizer.compute_byte_lengths(), EXACT)
    assert not model.training
    assert torch.equal(state, torch.get_rng_state())


def test_targets_that_do_not_count_are_never_correct(text, tmp_path):
    """A model that always expects token 0, on overlapping windows of a text that has none."""
    shape = {"norm": "layernorm", "bias": True, "tie_embeddings": False}
    settings = tiny(model=shape, data={"path": str(text)}).with_tokenizer("byte", 257)
    corpus, model = prepare_corpus(settings), GPT(settings.model)
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
    corpus = prepare_corpus(settings)
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


def draw_losses(windows: int, correlation: float, trials: int) -> np.ndarray:
    """Losses of windows, (trials, N), each of mean 0 and correlated with the one before it."""
    chance = np.random.default_rng([windows, round(100 * correlation)])
    losses = chance.normal(size=(trials, windows))
    for window in range(1, windows):
        losses[:, window] *= (1 - correlation**2) ** 0.5
        losses[:, window] += correlation * losses[:, window - 1]
    return losses


@pytest.mark.parametrize("windows", [20, 60, 126, 357])
@pytest.mark.parametrize("correlation", [0, 0.2, 0.45])
def test_the_interval_covers_the_true_loss_though_neighbors_go_together(windows, correlation):
    """In 90 to 97 % of texts. A standard error is 0.8 %, and chance is the same each time."""
    ones = np.ones(windows)
    covered = []
    for nats in draw_losses(windows, correlation, 1000):
        found = Evaluation(nats, ones, ones, 0)
        assert found.loss_half_width is not None
        covered.append(abs(found.loss) <= found.loss_half_width)
    assert 0.90 < np.mean(covered) < 0.97


def test_the_interval_of_equal_blocks_is_that_of_their_mean():
    nats = np.random.default_rng(0).gamma(2.0, 10.0, 160)
    found = Evaluation(nats, np.full(160, 8.0), np.full(160, 16.0), 0)
    blocks = nats.reshape(16, 10).mean(axis=1) / 8
    expected = 2.1314 * statistics.stdev(blocks) / 4  # Student's t with 15 degrees of freedom
    assert found.loss_half_width == pytest.approx(expected, rel=1e-3)
    in_bits = expected / math.log(2) / 2
    assert found.bits_per_byte_half_width == pytest.approx(in_bits, rel=1e-3)


def test_blocks_of_unequal_sizes_make_no_spread_of_their_own():
    """Blocks that cost more because they are longer: the loss is a ratio of sums."""
    sizes = np.random.default_rng(0).integers(1, 50, 200).astype(float)
    found = Evaluation(3 * sizes, sizes, sizes, 0)
    assert found.loss_half_width == pytest.approx(0, abs=1e-9)


def test_neighbors_that_go_together_widen_the_interval():
    """Ten windows in a row that share their luck count as one, not as ten."""
    luck = np.random.default_rng(0).normal(3, 1, 100)
    apart = Evaluation(np.tile(luck, 10), np.ones(1000), np.ones(1000), 0)
    together = Evaluation(np.repeat(luck, 10), np.ones(1000), np.ones(1000), 0)
    assert together.loss == pytest.approx(apart.loss)
    assert apart.loss_half_width is not None
    assert together.loss_half_width is not None
    assert together.loss_half_width > 2 * apart.loss_half_width


def test_a_text_of_few_windows_has_no_interval_however_they_overlap():
    nats = np.arange(20.0)
    assert Evaluation(nats[:19], np.ones(19), np.ones(19), 0).loss_half_width is None
    assert Evaluation(nats, np.ones(20), np.ones(20), 0).loss_half_width is not None
    # The first window of 100 tokens, and 300 that have one token more each.
    sizes = np.array([100.0] + [1.0] * 300)
    overlapping = Evaluation(3 * sizes, sizes, sizes, 0)
    assert overlapping.windows == 4
    assert overlapping.to_dict()["bits_per_byte_half_width"] is None
