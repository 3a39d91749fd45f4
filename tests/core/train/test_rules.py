"""What a model has learnt of the stories is measured place by place, for every tokenizer."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from gptmini.data.stories import RULES, iter_stories
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import ByteTokenizer, Tokenizer
from gptmini.train import rules
from gptmini.train.rules import format_rules, measure_rules
from tests.support import tiny

TEXTS = [story.text for story in islice(iter_stories(), 200)]


def iter_unseen():
    return islice(iter_stories(rules.UNSEEN_SEED), rules.N_STORIES)


class Reader(nn.Module):
    """Knows the unseen stories by heart, but for what `forget` makes of them."""

    def __init__(self, tokenizer: Tokenizer, forget: Callable[[str], str], length: int) -> None:
        super().__init__()
        self.config = tiny(model={"context_length": length}).model
        self.device = torch.device("cpu")
        self.tokenizer = tokenizer
        self.known = {}
        for story in iter_unseen():
            tokens = tokenizer.encode(story.text)[:length].tolist()
            self.known[tuple(tokens[:-1])] = tokenizer.encode(forget(story.text))[:length]

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.tokenizer.vocab_size)  # (B, T, V)
        eos = self.tokenizer.eos_token_id
        for scores, row in zip(logits, tokens.tolist(), strict=True):
            read = tuple(token for token in row if token != eos)
            for position, token in enumerate(self.known[read]):
                scores[position, token] = 1
        return logits


@pytest.fixture(autouse=True)
def _few_stories(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "N_STORIES", 40)


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), create_tokenizer("bpe", 400, TEXTS)], ids=["byte", "bpe"]
)
def test_who_knows_the_stories_is_right_everywhere(tokenizer: Tokenizer):
    measured = measure_rules(Reader(tokenizer, str, 512), tokenizer)
    assert [each.rule for each in measured] == list(RULES)
    assert {each.right for each in measured} == {1.0}
    assert all(0 < each.half_width < 0.4 for each in measured)
    assert all("100 %" in line for line in format_rules(measured)[1:-2])


def test_one_wrong_letter_makes_a_place_wrong_and_no_other_rule():
    tokenizer = ByteTokenizer()

    def forget_pronouns(text: str) -> str:
        return text.replace(" she ", " shy ").replace(" he ", " hi ")

    measured = measure_rules(Reader(tokenizer, forget_pronouns, 512), tokenizer)
    rights = {each.rule: each.right for each in measured}
    assert rights.pop("pronoun") < 0.7
    assert set(rights.values()) == {1.0}


def test_places_beyond_the_context_are_left_out():
    tokenizer = ByteTokenizer()
    whole = measure_rules(Reader(tokenizer, str, 512), tokenizer)
    cut = measure_rules(Reader(tokenizer, str, 100), tokenizer)
    assert sum(each.places for each in cut) < sum(each.places for each in whole)
    assert {each.right for each in cut} == {1.0}


def test_no_unseen_story_is_in_the_text(monkeypatch):
    monkeypatch.undo()
    told = {story.text for story in islice(iter_stories(), 3000)}
    assert not told & {story.text for story in iter_unseen()}
