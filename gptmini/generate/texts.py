"""A text from its prompt to its last character, and several drawn together.

A `Text` is shared by everyone who works on it: the engine reads `context` and updates `cached`,
the sampler adds tokens, and `read` turns them into characters.
"""

import codecs
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError
from gptmini.generate.filters import log_probability
from gptmini.text.tokenizer import Tokenizer


def opening(tokenizer: Tokenizer, sample: SampleConfig) -> list[int]:
    """The tokens that stand in for an empty prompt."""
    return tokenizer.encode(sample.start).tolist() if sample.start else [tokenizer.document_token]


def token_bias(tokenizer: Tokenizer, sample: SampleConfig) -> Tensor | None:
    """`bias` and `ban` as one tensor (V,); ConfigError for a text that is not one token."""
    entries = [("bias", *item) for item in sample.bias.items()]
    entries += [("ban", text, float("-inf")) for text in sample.ban]
    if not entries:
        return None
    bias = torch.zeros(tokenizer.vocab_size)
    for key, text, value in entries:
        tokens = tokenizer.encode(text).tolist()
        if len(tokens) != 1:
            parts = ", ".join(repr(tokenizer.decode([token])) for token in tokens)
            raise ConfigError(
                f"sample.{key}: {text!r} is not one token but {parts}; name a single token"
            )
        bias[tokens[0]] += value
    return bias


class Text:
    """A text that continues a prompt.

    `finish_reason` is None while it grows, then "length", "stop" (a stop text), "document" (the
    model ended it) or "context" (full). `logprobs` (nats) are filled in only on request.
    """

    def __init__(
        self,
        number: int,
        prompt_tokens: list[int],
        limit: int,
        prompt: str = "",
        tokenizer: Tokenizer | None = None,
        stops: Sequence[str] = (),
        allowed_first: Tensor | None = None,
    ) -> None:
        """`limit` is the model's context length; only `read` needs a tokenizer and stops."""
        self.number = number  # selects the random numbers of its draws
        self.prompt, self.text = prompt, ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        # For the sampler and the guessers.
        self.prompt_tokens = prompt_tokens
        self.allowed_first = allowed_first  # (V,), bool: which tokens may be the first
        self.guessed = self.guessed_right = 0
        # For the engine.
        self.context = prompt_tokens[-limit:]  # what the model sees, from position 0 on
        self.start = len(prompt_tokens) - len(self.context)  # tokens that have left the context
        self.cached = 0  # the first `cached` tokens of `context` are in the KV cache
        self.wanted = 1  # how many of the last tokens need logits
        self.reused = 0  # how many tokens of the prompt came from the cache of another text
        # For `read`.
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecided = ""  # could be the beginning of a stop text
        self._drop_space = allowed_first is not None  # the prompt already ends with that space

    def read(self, token: int) -> str:
        """The characters that the last token made certain; sets `finish_reason` at the end.

        Characters that may turn out to be the beginning of a stop text are held back.
        """
        assert self._tokenizer is not None
        spelling = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.end_tokens:
            self.finish_reason = "document"
            spelling = b""
        # The decoder holds back an incomplete character, until the end makes it U+FFFD.
        characters = self._decoder.decode(spelling, final=self.finish_reason is not None)
        if characters and self._drop_space:
            characters, self._drop_space = characters.removeprefix(" "), False
        pending = self._undecided + characters
        stops_at = [place for stop in self._stops if (place := pending.find(stop)) >= 0]
        if stops_at:
            self.finish_reason = "stop"
            end = min(stops_at)
        elif self.finish_reason:
            end = len(pending)
        else:
            end = len(pending) - self._possible_stop(pending)
        self._undecided = pending[end:]
        self.text += pending[:end]
        return pending[:end]

    def _possible_stop(self, pending: str) -> int:
        """How many characters at the end could be the beginning of a stop text."""
        lengths = (
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if pending.endswith(stop[:length])
        )
        return max(lengths, default=0)

    def to_dict(self) -> dict[str, Any]:
        """The public fields, as JSON data."""
        names = ("number", "prompt", "text", "tokens", "logprobs", "finish_reason")
        return {name: getattr(self, name) for name in names}


class Generation:
    """Texts being drawn together; iterating yields (number, new characters) as they grow.

    `seconds` and `first_token` count from the first call of the iterator.
    """

    def __init__(
        self,
        drawn: Iterator[tuple[Text, int, Tensor]],
        samples: list[Text],
        logprobs: bool,
        engine: str,
    ) -> None:
        """`drawn` is what `sampler.decode` yields for the samples; `engine` is its name."""
        self.samples, self.engine = samples, engine
        self._drawn, self._logprobs = drawn, logprobs
        self._started: float | None = None
        self.seconds, self.first_token = 0.0, 0.0

    @property
    def n_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def guessed(self) -> int:
        return sum(sample.guessed for sample in self.samples)

    @property
    def guessed_right(self) -> int:
        return sum(sample.guessed_right for sample in self.samples)

    def finish(self) -> list[Text]:
        """Draw everything, then return the samples."""
        for _ in self:
            pass
        return self.samples

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self._started = self._started or time.perf_counter()
        for text, token, logits in self._drawn:
            self.seconds = time.perf_counter() - self._started
            self.first_token = self.first_token or self.seconds
            if self._logprobs:
                text.logprobs.append(log_probability(logits, token))
            if characters := text.read(token):
                yield text.number, characters
