"""A text from its prompt to its last character, and a batch of texts generated together.

A `Text` is the state that the parts of generation share: the engine reads `context` and updates
`n_cached`, the sampler appends tokens, and `decode_token` turns them into characters.
"""

import codecs
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError, shorten
from gptmini.generate.filters import compute_logprob
from gptmini.tokenizer.spelling import label_tokens
from gptmini.tokenizer.tokenizers import Tokenizer


def encode_start(tokenizer: Tokenizer, sample: SampleConfig) -> list[int]:
    """Return the tokens that stand in for an empty prompt."""
    if not sample.start:
        return [tokenizer.eos_token_id]
    return tokenizer.add_bos(tokenizer.encode(sample.start).tolist())


def allow_any_but_end(tokenizer: Tokenizer) -> Tensor:
    """Mark the tokens that may begin a text, (V,): all but those that would end it at once.

    After the start of a text, a tied head expects that token again, as windows that begin with it
    are rare in training.
    """
    allowed = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
    allowed[[*tokenizer.end_tokens]] = False
    return allowed


def build_token_bias(tokenizer: Tokenizer, sample: SampleConfig) -> Tensor | None:
    """Combine `bias` and `ban` into one tensor (V,), or None without any.

    Raises ConfigError for a text that is not a single token.
    """
    entries = [("bias", text, value) for text, value in sample.bias.items()]
    entries += [("ban", text, float("-inf")) for text in sample.ban]
    if not entries:
        return None
    bias = torch.zeros(tokenizer.vocab_size)
    for key, text, value in entries:
        tokens = tokenizer.encode(text).tolist()
        if len(tokens) != 1:
            labels = label_tokens(tokenizer, tokens[:20])
            typed = [label.replace("␣", " ") for label in labels]  # as it is written in a setting
            parts = ", ".join(map(repr, typed))
            raise ConfigError(
                f"sample.{key}: {shorten(text)!r} is not one token but {shorten(parts, 100)}; "
                "name a single token"
            )
        bias[tokens[0]] += value
    return bias


class StopMatcher:
    """Find a stop text in a text that arrives in pieces (Knuth, Morris and Pratt 1977).

    A character costs the same however long the stop text is. The last `n_matched` characters of the
    text so far are the beginning of the stop text.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.n_matched = 0
        self._borders = _compute_borders(stop)

    def read(self, characters: str) -> int | None:
        """Read more of the text; return how many characters it took to complete the stop text."""
        for count, character in enumerate(characters, 1):
            self.n_matched = _extend_match(self.stop, self._borders, self.n_matched, character)
            if self.n_matched == len(self.stop):
                return count
        return None


def _extend_match(stop: str, borders: Sequence[int], n_matched: int, character: str) -> int:
    """Return how many characters of `stop` match the end of the text after one more character."""
    while n_matched and stop[n_matched] != character:
        n_matched = borders[n_matched - 1]
    return n_matched + 1 if stop[n_matched] == character else 0


@lru_cache(maxsize=256)
def _compute_borders(stop: str) -> Sequence[int]:
    """Compute, for each beginning of `stop`, the longest shorter one that it also ends with."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_extend_match(stop, borders, borders[-1], character))
    return borders


class Text:
    """A text that continues a prompt.

    `finish_reason` is None while the text grows, then "length" (it has `max_new_tokens`), "stop"
    (a stop text), "document" (the model ended it) or "context" (the context is full). `logprobs`
    (nats) are recorded only on request.
    """

    def __init__(
        self,
        number: int,
        prompt_tokens: list[int],
        context_length: int,
        prompt: str = "",
        tokenizer: Tokenizer | None = None,
        stops: Sequence[str] = (),
        allowed_first: Tensor | None = None,
    ) -> None:
        """`number` selects the random numbers of this text.

        `context_length` is that of the model. Only `decode_token` needs `tokenizer` and `stops`.
        """
        self.number = number
        self.prompt = prompt
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        # For the sampler and the drafters.
        self.prompt_tokens = prompt_tokens
        self.allowed_first = allowed_first  # (V,), bool: tokens that may come first; None: all
        self.drafted = 0
        self.accepted = 0
        # For the engine. `context` is what the model sees, from position 0 on.
        self.context = prompt_tokens[-context_length:]
        self.context_start = len(prompt_tokens) - len(self.context)  # tokens that have slid out
        self.n_cached = 0  # the KV cache holds this many tokens at the start of `context`
        self.n_logits = 1  # logits are needed for this many tokens at the end of `context`
        self.n_reused = 0  # prompt tokens whose keys were copied from another text
        # For `decode_token`.
        self._tokenizer = tokenizer
        self._stops = [StopMatcher(stop) for stop in stops]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_back = ""  # may be the beginning of a stop text
        # The prompt already shows the space that the first token brings along.
        self.repeats_space = allowed_first is not None and prompt.endswith(" ")
        drops_space = tokenizer is not None and tokenizer.drops_first_space and not prompt
        self._drop_space = self.repeats_space or drops_space

    def decode_token(self, token: int) -> str:
        """Return the characters that a new token completes; set `finish_reason` at an end.

        Characters that may turn out to be the beginning of a stop text are held back.
        """
        assert self._tokenizer is not None
        spelling = self._tokenizer.decode_token(token)
        if token in self._tokenizer.end_tokens:
            self.finish_reason = "document"
            spelling = b""
        # The decoder holds back an incomplete character, which becomes U+FFFD if the text ends.
        characters = self._decoder.decode(spelling, final=self.finish_reason is not None)
        if characters and self._drop_space:
            characters = characters.removeprefix(" ")
            self._drop_space = False
        pending = self._held_back + characters
        stop_positions: list[int] = []
        for matcher in self._stops:
            count = matcher.read(characters)
            if count is not None:
                stop_positions.append(len(self._held_back) + count - len(matcher.stop))
        if stop_positions:
            self.finish_reason = "stop"
            end = min(stop_positions)
        elif self.finish_reason:
            end = len(pending)
        else:
            longest_match = max((matcher.n_matched for matcher in self._stops), default=0)
            end = len(pending) - longest_match
        self._held_back = pending[end:]
        self.text += pending[:end]
        return pending[:end]

    def to_dict(self) -> dict[str, Any]:
        """Return the public fields as JSON data."""
        return {
            "number": self.number,
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
        }


class Generation:
    """Texts that are generated together; iterate for (number, new characters) as they grow.

    Nothing is computed before the first step of the iterator. `seconds` and `time_to_first_token`
    count from there.
    """

    def __init__(
        self,
        tokens: Iterator[tuple[Text, int, Tensor]],
        samples: list[Text],
        logprobs: bool,
        engine: str,
    ) -> None:
        """`tokens` comes from `sampler.sample_tokens`; `engine` names the engine."""
        self.samples = samples
        self.engine = engine
        self.seconds = 0.0
        self.time_to_first_token = 0.0
        self._tokens = tokens
        self._logprobs = logprobs
        self._started: float | None = None

    @property
    def n_tokens(self) -> int:
        """Count the tokens generated so far."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def drafted(self) -> int:
        """Count the tokens drafted so far."""
        return sum(sample.drafted for sample in self.samples)

    @property
    def accepted(self) -> int:
        """Count the drafted tokens that the model accepted."""
        return sum(sample.accepted for sample in self.samples)

    def finish(self) -> list[Text]:
        """Generate to the end, then return the samples."""
        for _ in self:
            pass
        return self.samples

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self._started = self._started or time.perf_counter()
        for text, token, logits in self._tokens:
            self.seconds = time.perf_counter() - self._started
            self.time_to_first_token = self.time_to_first_token or self.seconds
            if self._logprobs:
                text.logprobs.append(compute_logprob(logits, token))
            if characters := text.decode_token(token):
                yield text.number, characters
