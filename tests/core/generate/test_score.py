"""Scoring a text token by token."""

import math
from pathlib import Path

import pytest
import torch

from gptmini.errors import CheckpointError, DataError
from gptmini.generate.run import Run
from gptmini.generate.score import Score, score_text
from gptmini.model.gpt import GPT
from gptmini.tokenizer.spelling import label_pieces
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import tiny


@pytest.fixture
def run() -> Run:
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    config = tiny().with_tokenizer("byte", tokenizer.vocab_size)
    return Run(Path("run"), config, tokenizer, GPT(config.model).eval())


def by_hand(run: Run, tokens: list[int], place: int, start: int) -> tuple[float, int]:
    """Log-probability and rank of a token, read from position `start` of the text."""
    before = run.config.sample.start
    document = [ord(before) if before else run.tokenizer.eos_token_id, *tokens]
    with torch.no_grad():
        logits = run.model(torch.tensor([document[start : place + 1]]))[0, -1]
    ranking = logits.sort(descending=True).indices.tolist()
    return logits.log_softmax(0)[tokens[place]].item(), 1 + ranking.index(tokens[place])


@pytest.mark.parametrize("start", [None, "\n"])
def test_scores_of_a_short_text_are_the_models_own(run: Run, start: str | None):
    run.config = tiny(sample={"start": start})
    text = "é quick one"
    found = score_text(run, text)
    tokens = list(text.encode())
    assert found.tokens == tokens
    for place in range(len(tokens)):
        logprob, rank = by_hand(run, tokens, place, 0)
        assert found.logprobs[place] == pytest.approx(logprob, abs=1e-5)
        assert found.token_ranks[place] == rank
    assert found.loss == pytest.approx(-sum(found.logprobs) / 12)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a token is a byte


@pytest.mark.parametrize("length", [17, 25, 50])
def test_a_long_text_is_read_in_windows_half_a_context_apart(run: Run, length: int):
    text = "".join(chr(97 + n * 7 % 26) for n in range(length))
    found = score_text(run, text)
    assert len(found.logprobs) == length
    tokens = list(text.encode())
    for place in range(length):
        start = 0 if place < 16 else (place - 16) // 8 * 8 + 8
        logprob, _ = by_hand(run, tokens, place, start)
        assert found.logprobs[place] == pytest.approx(logprob, abs=1e-5), place


def test_a_character_across_the_end_of_a_window_is_still_named(run: Run):
    found = score_text(run, "a" * 15 + "中!")  # the first window ends after a byte of it
    assert label_pieces(found.spellings)[14:] == ["a", "中1/3", "中2/3", "中3/3", "!"]


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ("a\udc80", "character 1 is no")])
def test_text_that_cannot_be_scored_is_refused(run: Run, text: str, message: str):
    with pytest.raises(DataError, match=message):
        score_text(run, text)


def test_non_finite_weights_are_reported(run: Run):
    torch.nn.init.constant_(run.model.final_norm.weight, torch.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        score_text(run, "text")


def test_a_loss_whose_perplexity_would_overflow_is_shown():
    found = Score([b"a"], [97], [-1e4], [257], 1)
    assert found.loss == 1e4
    assert found.perplexity == pytest.approx(1.014e304, rel=1e-3)
