"""Evaluating runs on their held-out text or on another."""

import math
from pathlib import Path

import pytest
import torch

from gptmini.errors import CheckpointError, DataError
from gptmini.files import get_cache_folder
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.evaluate_run import evaluate_run, load_corpus, load_text
from tests.support import gpt2, tiny, train

TEXT = "héllo wörld, 東京! \n" * 60


def constant_model(logits: torch.Tensor) -> GPT:
    """A model with these logits (V,) everywhere: its last norm gives a unit vector."""
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
    return {kind: create_tokenizer(kind, size, iter([TEXT])) for kind, size in sizes.items()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_uniform_model_has_the_loss_log_of_the_vocabulary(kind, text, tmp_path):
    tokenizer = tokenizers()[kind]
    run = run_of(constant_model(torch.zeros(tokenizer.vocab_size)), tokenizer)
    found = evaluate_run(run, load_text(run, [str(text)]))
    tokens = len(tokenizer.encode(TEXT))
    assert found.tokens.sum() == tokens  # the end-of-text token in front is not a target
    assert found.bytes.sum() == len(TEXT.encode())
    assert found.loss == pytest.approx(math.log(tokenizer.vocab_size), rel=1e-6)
    assert found.perplexity == pytest.approx(tokenizer.vocab_size, rel=1e-5)
    bits = tokens * math.log2(tokenizer.vocab_size) / len(TEXT.encode())
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-6)
    assert found.loss_half_width == pytest.approx(0, abs=1e-6)


def test_logits_that_are_not_finite_are_not_an_accuracy_of_100_percent(text, tmp_path):
    run = run_of(constant_model(torch.full((257,), math.nan)), tokenizers()["byte"])
    with pytest.raises(CheckpointError, match="not finite"):
        evaluate_run(run, load_text(run, [str(text)]))


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "gpt2"])
def test_bits_per_byte_of_one_text_agree_across_tokenizers(kind, text, tmp_path):
    """A model that gives each token of n bytes probability 256^-n / Z costs 8 bits and log2 Z.

    Z is above 1 because one text has many spellings in tokens.
    """
    tokenizer = gpt2() if kind == "gpt2" else tokenizers()[kind]
    logits = torch.tensor(tokenizer.compute_byte_lengths() * -math.log(256))
    logits[tokenizer.eos_token_id] = -100
    run = run_of(constant_model(logits.float()), tokenizer)
    found = evaluate_run(run, load_text(run, [str(text)]))
    waste = logits.logsumexp(0).item() / math.log(2) * found.tokens.sum() / found.bytes.sum()
    assert 0 <= waste < 0.2
    assert found.bits_per_byte == pytest.approx(8 + waste, rel=1e-5)


def test_accuracy_is_top_1(text, tmp_path):
    tokenizer = create_tokenizer("byte", None, ())
    logits = torch.zeros(257)
    logits[ord("l")] = 1
    run = run_of(constant_model(logits), tokenizer)
    found = evaluate_run(run, load_text(run, [str(text)]))
    assert found.accuracy == pytest.approx(TEXT.count("l") / len(TEXT.encode()))


def test_a_run_is_evaluated_on_its_held_out_text(text_file, tmp_path):
    exact = tiny(data={"path": str(text_file)}, train={"dtype": "float32"})
    train(exact, tmp_path / "run")
    run = load_run(tmp_path / "run", "cpu", "float32")
    (text,) = load_corpus(run).validation
    whole = text_file.read_text()
    tail = run.tokenizer.decode(text.read(0, len(text)).tolist())
    assert whole.endswith(tail)
    assert len(tail) == pytest.approx(len(whole) / 10, abs=10)
    best = run.state["best"]
    found = evaluate_run(run, [text])
    assert found.loss == pytest.approx(best["val_loss"], rel=1e-6)
    assert found.tokens.sum() == len(text) - 1
    text_file.write_text(text_file.read_text() + "more")
    with pytest.raises(DataError, match="text has changed"):
        load_corpus(run)


def test_the_test_part_is_evaluated_on_request_only(text_file, tmp_path):
    train(tiny(data={"path": str(text_file), "test": 0.2}), tmp_path / "run")
    files = set(get_cache_folder().glob("*.bin"))
    assert len(files) == 2
    run = load_run(tmp_path / "run", "cpu", "float32")
    (text,) = load_corpus(run, "test").test
    assert text.path not in files
    whole = text_file.read_text()
    (tail,) = load_corpus(run).validation
    parts = [run.tokenizer.decode(part.read(0, len(part)).tolist()) for part in (text, tail)]
    assert whole.endswith("".join(parts))
    assert len(parts[0]) == pytest.approx(len(whole) / 5, abs=10)
    train(tiny(data={"path": str(text_file)}), tmp_path / "other")
    other = load_run(tmp_path / "other", "cpu", "float32")
    with pytest.raises(DataError, match=r"other: has no test part; .*data.test"):
        load_corpus(other, "test")


def test_windows_are_as_long_as_in_training(text, tmp_path):
    run = run_of(constant_model(torch.zeros(257)), create_tokenizer("byte", None, ()))
    run.config = run.config.with_train(seq_len=5)
    texts = load_text(run, [str(text)])
    assert len(evaluate_run(run, texts).nats) == math.ceil(len(TEXT.encode()) / 5)


def test_a_run_trained_on_standard_input_has_no_held_out_text(tmp_path):
    run = run_of(constant_model(torch.zeros(257)), create_tokenizer("byte", None, ()))
    run.config = tiny(data={"path": "-"})
    with pytest.raises(DataError, match="was trained on standard input"):
        load_corpus(run)
