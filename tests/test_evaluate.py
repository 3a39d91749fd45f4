import math
from pathlib import Path

import pytest
import torch
from conftest import tiny

from gptmini import batches, prepare
from gptmini.evaluate import Evaluation, evaluate
from gptmini.model import GPT
from gptmini.prepare import Stretch


def uniform(vocab_size: int, context_length: int = 16) -> GPT:
    """A model that knows nothing: every token is equally likely."""
    config = tiny(model={"context_length": context_length}).with_tokenizer("byte", vocab_size)
    model = GPT(config.model)
    torch.nn.init.zeros_(model.embed.weight)
    return model


def exact() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_a_model_that_knows_nothing_costs_log_of_the_vocabulary(kind, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("héllo wörld, " * 50)
    config = tiny(data={"path": str(path)}, tokenizer={"kind": kind})
    corpus = prepare.prepare_corpus(config, tmp_path / "cache")
    (held_in,) = corpus.training
    tokens = held_in.tokens
    first = 90  # between two characters, with every tokenizer
    found = evaluate(
        uniform(corpus.tokenizer.vocab_size),
        batches.validation_batches([Stretch(tokens, first, len(tokens))], 16, 4),
        corpus.tokenizer.byte_lengths(),
        exact,
    )
    held_out = tokens.read(first + 1, len(tokens) - first - 1)
    text = corpus.tokenizer.decode(held_out)
    assert found.tokens == len(held_out)
    assert found.bytes == len(text.encode())
    assert found.loss == pytest.approx(math.log(corpus.tokenizer.vocab_size), rel=1e-5)
    bits = len(held_out) * math.log2(corpus.tokenizer.vocab_size) / len(text.encode())
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_the_number_does_not_depend_on_the_batch_size_or_on_dropout(text_file, tmp_path):
    corpus = prepare.prepare_corpus(tiny(data={"path": str(text_file)}), tmp_path / "cache")
    torch.manual_seed(0)
    model = GPT(tiny(model={"dropout": 0.5}).with_tokenizer("byte", 257).model).train()
    state = torch.get_rng_state()
    losses = [
        evaluate(
            model,
            batches.validation_batches(corpus.validation, 16, size),
            corpus.tokenizer.byte_lengths(),
            exact,
        ).loss
        for size in (1, 3, 8)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_bits_per_byte_of_one_text_agree_across_tokenizers(tmp_path: Path):
    """A uniform guess over the bytes, spelt by each tokenizer, costs 8 bits a byte."""
    path = tmp_path / "a.txt"
    path.write_text("héllo wörld, 東京! " * 200)
    for kind in ("byte", "char", "bpe"):
        config = tiny(data={"path": str(path)}, tokenizer={"kind": kind})
        corpus = prepare.prepare_corpus(config, tmp_path / "cache")
        lengths = corpus.tokenizer.byte_lengths()
        nats = bits = 0.0
        for _, targets in batches.validation_batches(corpus.validation, 16, 4):
            size = int(lengths[targets.numpy()].sum())
            nats += size * math.log(256)
            bits += size
        found = Evaluation(nats, 1, int(bits))
        assert found.bits_per_byte == pytest.approx(8)
