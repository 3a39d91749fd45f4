"""Guesses of the tokens that come next, to be checked in one pass of the model.

A guess costs nothing but the pass: what the model would have drawn by itself is drawn, a guess is
only right or wrong. So the text is the same with and without, sampled or greedy.
"""

from typing import Protocol

from gptmini.config.settings import SampleConfig
from gptmini.generate.engine import Engine, Row
from gptmini.generate.filters import Adjustment, choose, uniform
from gptmini.model.gpt import GPT


class Guesser(Protocol):
    """What guesses."""

    def __call__(self, rows: list[Row], limits: list[int]) -> list[list[int]]:
        """Tokens that may follow each row, at most so many."""


class Lookup:
    """What followed the last two tokens where they stood before (Saxena 2023)."""

    GRAM = 2

    def __init__(self) -> None:
        self._places: dict[Row, dict[tuple[int, ...], int]] = {}
        self._known: dict[Row, int] = {}

    def __call__(self, rows: list[Row], limits: list[int]) -> list[list[int]]:
        return [self._guess(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _guess(self, row: Row, limit: int) -> list[int]:
        text = row.prompt + row.drawn
        places = self._places.setdefault(row, {})
        for end in range(self._known.get(row, self.GRAM), len(text)):
            places[tuple(text[end - self.GRAM : end])] = end
        self._known[row] = max(self.GRAM, len(text))
        place = places.get(tuple(text[-self.GRAM :]))
        return [] if place is None else text[place : place + limit]


class Draft:
    """What a smaller model with the same tokenizer draws by the same noise."""

    def __init__(self, model: GPT, decoder: Engine, sample: SampleConfig) -> None:
        self._limit, self._decoder, self._sample = model.config.context_length, decoder, sample
        self._own: dict[Row, Row] = {}

    def __call__(self, rows: list[Row], limits: list[int]) -> list[list[int]]:
        """As many guesses for each row as its limit says, if the draft's context has the room."""
        guesses: list[list[int]] = [[] for _ in rows]
        own = [self._follow(row) for row in rows]
        adjust = Adjustment(self._sample, None)
        for place in range(max(limits)):
            room = [len(row.tokens) <= self._limit for row in own]
            live = [n for n, limit in enumerate(limits) if place < limit and room[n]]
            if not live:
                break
            for n, logits in zip(live, self._decoder([own[n] for n in live]), strict=True):
                row, guessed = rows[n], guesses[n]
                scores = adjust(logits[-1], row.prompt, row.drawn + guessed)
                number = uniform(self._sample.seed, row.number, len(row.drawn) + place)
                guessed.append(choose(scores, self._sample, number))
                own[n].tokens.append(guessed[-1])
        return guesses

    def _follow(self, row: Row) -> Row:
        """The draft's own row, brought to the tokens of a row; its cache is kept where it can."""
        own = self._own.setdefault(row, Row(row.number, row.prompt, []))
        same = own.start == row.start
        own.start, own.tokens = row.start, list(row.tokens)
        own.cached = min(own.cached, len(own.tokens) - 1) if same else 0
        return own
