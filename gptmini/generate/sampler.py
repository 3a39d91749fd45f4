"""Texts from a model: rows of tokens are drawn together, each as if it were alone.

Past the context there are three policies. `slide`: when the context is full, its newer half is
prefilled again, at positions from 0 on, and decoding goes on from there. That holds for learned and
rotary positions and for windowed layers alike, and costs about one prefilled token for each drawn
one. `stop` ends the text, `error` refuses before it begins. With and without the cache the model
sees the same tokens at the same positions.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError
from gptmini.generate.engine import Engine, Row
from gptmini.generate.filters import Adjustment, choose, uniform
from gptmini.generate.guess import Guesser

GUESSES = 3  # at a time: the compiled step takes 1.4 times as long for four tokens as for one


@dataclass
class Speed:
    """What a generation took: seconds to its first token and in all, and how guesses went."""

    seconds: float = 0.0
    first_token: float | None = None
    tokens: int = 0
    guessed: int = 0
    right: int = 0


def begin(number: int, prompt: list[int], sample: SampleConfig, limit: int) -> Row:
    """A row that starts from a prompt of at least one token, its last `limit` at most.

    ConfigError if the tokens do not fit the context and may not overflow it.
    """
    if sample.overflow == "error" and len(prompt) + sample.max_new_tokens - 1 > limit:
        raise ConfigError(
            f"sample.overflow: {len(prompt)} tokens of prompt and {sample.max_new_tokens} new ones "
            f"do not fit the context of {limit}; lower max_new_tokens, or take slide"
        )
    return Row(number, prompt, prompt[-limit:], max(0, len(prompt) - limit))


@torch.inference_mode()
def decode(
    decoder: Engine,
    rows: Sequence[Row],
    sample: SampleConfig,
    limit: int,
    bias: Tensor | None = None,
    allowed: dict[Row, Tensor] | None = None,
    guesser: Guesser | None = None,
    speed: Speed | None = None,
) -> Iterator[tuple[Row, int, Tensor]]:
    """Draws the rows' next tokens in turn: the row, the token, the logits (V,) it is from.

    A row goes on until it has a `finish`: whoever reads may set it, "length" and "context" are set
    here. `bias` (V,) is added to all logits; `allowed`, bool (V,), says of a row which tokens may
    be its first.
    """
    speed = speed or Speed()
    adjust = Adjustment(sample, bias)
    started = time.perf_counter()
    while live := [row for row in rows if row.finish is None]:
        guesses = _guess(guesser, decoder, live, sample, limit)
        for row, guessed in zip(live, guesses, strict=True):
            row.tokens += guessed
            row.wanted = 1 + len(guessed)
        for row, logits, guessed in zip(live, decoder(live), guesses, strict=True):
            del row.tokens[len(row.tokens) - len(guessed) :]
            speed.guessed += len(guessed)
            for place in range(len(logits)):
                scores = adjust(logits[place], row.prompt, row.drawn)
                if allowed and not row.drawn and row in allowed:
                    scores = scores.masked_fill(~allowed[row], -torch.inf)
                token = choose(scores, sample, uniform(sample.seed, row.number, len(row.drawn)))
                _add(row, token, sample, limit)
                speed.tokens += 1
                speed.seconds = time.perf_counter() - started
                speed.first_token = speed.first_token or speed.seconds
                yield row, token, logits[place]
                if row.finish or guessed[place : place + 1] != [token]:
                    break
                speed.right += 1
            row.cached = min(row.cached, len(row.tokens) - 1)


def _guess(
    guesser: Guesser | None, decoder: Engine, rows: list[Row], sample: SampleConfig, limit: int
) -> list[list[int]]:
    if guesser is None or not (decoder.ragged or len(rows) == 1):
        return [[] for _ in rows]
    limits = []
    for row in rows:
        left = min(sample.max_new_tokens - len(row.drawn) - 1, limit - len(row.tokens))
        prefilled = row.cached == len(row.tokens) - 1  # and a prompt is, without guesses behind it
        limits.append(min(GUESSES, left) if prefilled else 0)
    return guesser(rows, limits)


def _add(row: Row, token: int, sample: SampleConfig, limit: int) -> None:
    """Let a row have one more token, and slide or end where it is full."""
    row.drawn.append(token)
    row.tokens.append(token)
    if len(row.drawn) == sample.max_new_tokens:
        row.finish = "length"
    elif len(row.tokens) > limit:
        if sample.overflow == "stop":
            row.finish = "context"
        kept = max(1, limit // 2)
        row.start += len(row.tokens) - kept
        row.tokens, row.cached = row.tokens[-kept:], 0
