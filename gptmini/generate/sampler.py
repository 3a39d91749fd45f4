"""The sampling loop: several texts are drawn together, each as if it were alone.

Each pass of the model gives every unfinished text its next token, or several where tokens were
guessed ahead. When a text fills the model's context, `sample.overflow` decides: `error` refuses
before it begins, `stop` ends the text, and `slide` keeps the newer half of the context and
prefills it again from position 0. That works for learned and rotary positions and for windowed
layers alike, costs about one prefilled token per token drawn, and shows the model the same tokens
at the same positions with and without the cache.

V is the vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError
from gptmini.generate.engine import Engine
from gptmini.generate.filters import LogitsProcessor, draw_uniform, sample_token
from gptmini.generate.texts import Text

MAX_DRAFT_TOKENS = 3  # the compiled step takes 1.4 times as long for four tokens as for one


class Drafter(Protocol):
    """Guesses the next tokens of texts, cheaply; the model checks them (guess.py)."""

    def __call__(self, texts: list[Text], limits: list[int]) -> list[list[int]]:
        """Tokens that may follow each text, at most its limit."""


def check_overflow(n_prompt: int, sample: SampleConfig, context_length: int) -> None:
    """Under `overflow: error`, refuse a prompt whose text would not fit the context of `context_length`."""
    # The last token is never fed to the model, so it needs no room.
    if sample.overflow == "error" and n_prompt + sample.max_new_tokens - 1 > context_length:
        raise ConfigError(
            f"sample.overflow: {n_prompt} prompt tokens and {sample.max_new_tokens} new ones do "
            f"not fit the context of {context_length}; lower max_new_tokens or set overflow to slide"
        )


@torch.inference_mode()
def decode(
    engine: Engine,
    texts: Sequence[Text],
    sample: SampleConfig,
    context_length: int,
    bias: Tensor | None = None,
    drafter: Drafter | None = None,
) -> Iterator[tuple[Text, int, Tensor]]:
    """Draw tokens until every text has a `finish_reason`.

    Yields each text with its new token and the model's logits (V,) for it. "length" and "context"
    are set here; the caller may end a text by setting another reason. `context_length` is the context
    length, `bias` (V,) is added to all logits.
    """
    logits_processor = LogitsProcessor(sample, bias)
    while live := [text for text in texts if text.finish_reason is None]:
        # Guessed tokens go through the model behind the known ones, so that one pass gives the
        # logits after the last known token and after each guess.
        drafts = _draft_tokens(drafter, engine, live, sample, context_length)
        for text, draft in zip(live, drafts, strict=True):
            text.context += draft
            text.n_logits = 1 + len(draft)
        for text, logits, draft in zip(live, engine(live), drafts, strict=True):
            # logits: (1 + guesses, V). Take the guesses back; every token is drawn in any case,
            # so a guess saves a pass or costs a little time, but never changes the text.
            del text.context[len(text.context) - len(draft) :]
            text.drafted += len(draft)
            for position in range(len(logits)):
                token = draw_token(text, logits[position], logits_processor, sample, context_length)
                yield text, token, logits[position]
                # The next logits hold only if this token is the one that was guessed.
                if text.finish_reason or draft[position : position + 1] != [token]:
                    break
                text.accepted += 1
            # The model has not seen the last token; wrong guesses in its cache do not count.
            text.n_cached = min(text.n_cached, len(text.context) - 1)


def _draft_tokens(
    drafter: Drafter | None,
    engine: Engine,
    texts: list[Text],
    sample: SampleConfig,
    context_length: int,
) -> list[list[int]]:
    """Guesses for each text, none where they could not be checked cheaply."""
    if drafter is None or not (engine.ragged or len(texts) == 1):
        return [[] for _ in texts]
    limits = []
    for text in texts:
        room = min(sample.max_new_tokens - len(text.tokens) - 1, context_length - len(text.context))
        # A single step waits for memory, so guesses are nearly free; a prefill would pay for them.
        stepping = text.n_cached == len(text.context) - 1
        limits.append(min(MAX_DRAFT_TOKENS, room) if stepping else 0)
    return drafter(texts, limits)


def draw_token(
    text: Text,
    logits: Tensor,
    logits_processor: LogitsProcessor,
    sample: SampleConfig,
    context_length: int,
) -> int:
    """Draw the next token of a text from the model's logits (V,), and add it to the text."""
    scores = logits_processor(logits, text.prompt_tokens, text.tokens)  # (V,)
    if text.allowed_first is not None and not text.tokens:
        scores = scores.masked_fill(~text.allowed_first, -torch.inf)
    token = sample_token(scores, sample, draw_uniform(sample.seed, text.number, len(text.tokens)))
    append_token(text, token, sample, context_length)
    return token


def append_token(text: Text, token: int, sample: SampleConfig, context_length: int) -> None:
    """Add a drawn token to a text, and end it or slide its context if that is full."""
    text.tokens.append(token)
    text.context.append(token)
    if len(text.tokens) == sample.max_new_tokens:
        text.finish_reason = "length"
    elif len(text.context) > context_length:
        if sample.overflow == "stop":
            text.finish_reason = "context"
        # Keep half: sliding by one would recompute the whole context for each token.
        kept = max(1, context_length // 2)
        text.context_start += len(text.context) - kept
        text.context, text.n_cached = text.context[-kept:], 0
