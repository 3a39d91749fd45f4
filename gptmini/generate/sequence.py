"""A text from its prompt to its last character.

A `Sequence` is the state that the parts of generation share: the engine reads `context` and updates
`n_cached`, the sampler appends tokens, and `decode_token` turns them into characters.
"""

import codecs
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError, GptminiError, shorten
from gptmini.tokenizer.spelling import label_tokens
from gptmini.tokenizer.tokenizers import Tokenizer

DEFAULT_SAMPLE = SampleConfig()


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


def _extend_match(stop: str, borders: list[int], n_matched: int, character: str) -> int:
    """Return how many characters of `stop` match the end of the text after one more character."""
    while n_matched and stop[n_matched] != character:
        n_matched = borders[n_matched - 1]
    return n_matched + 1 if stop[n_matched] == character else 0


@lru_cache(maxsize=256)
def _compute_borders(stop: str) -> list[int]:
    """Compute, for each beginning of `stop`, the longest shorter one that it also ends with."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_extend_match(stop, borders, borders[-1], character))
    return borders


class Sequence:
    """A text that continues a prompt.

    `finish_reason` is None while the text grows, then "length" (it has `max_new_tokens`), "stop"
    (a stop text), "document" (the model ended it), "context" (the context is full) or "error" (no
    token can be drawn: see `error`). `logprobs` (nats) are recorded only on request.
    """

    def __init__(
        self,
        number: int,
        prompt_tokens: list[int],
        context_length: int,
        sample: SampleConfig = DEFAULT_SAMPLE,
        bias: Tensor | None = None,
        prompt: str = "",
        tokenizer: Tokenizer | None = None,
        allowed_first: Tensor | None = None,
    ) -> None:
        """`number` selects the random numbers of this text.

        `context_length` is that of the model. Only `decode_token` needs `tokenizer`.
        """
        self.number = number
        self.prompt = prompt
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.error: GptminiError | None = None
        # For the sampler and the drafters.
        self.sample = sample
        self.bias = bias  # (V,), added to all logits; -inf bans a token
        self.prompt_tokens = prompt_tokens
        self.allowed_first = allowed_first  # (V,), bool: tokens that may come first; None: all
        self.drafted = 0
        self.accepted = 0
        # For the engine. `context` is what the model sees, from position 0 on.
        self.context_length = context_length
        self.context = prompt_tokens[-context_length:]
        self.context_start = len(prompt_tokens) - len(self.context)  # tokens that have slid out
        self.n_cached = 0  # the KV cache holds this many tokens at the start of `context`
        self.n_logits = 1  # logits are needed for this many tokens at the end of `context`
        self.n_reused = 0  # prompt tokens whose keys were copied from another text
        # For `decode_token`.
        self._tokenizer = tokenizer
        self._stops = [StopMatcher(stop) for stop in sample.stop]
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
        # The first stop text to be complete ends the text, the longest if there are several.
        # Whatever the tokens are: each may complete many characters.
        completed: list[tuple[int, int]] = []
        for matcher in self._stops:
            count = matcher.read(characters)
            if count is not None:
                completed.append((count, -len(matcher.stop)))
        if completed:
            self.finish_reason = "stop"
            end = len(self._held_back) + sum(min(completed))
        elif self.finish_reason:
            end = len(pending)
        else:
            longest_match = max((matcher.n_matched for matcher in self._stops), default=0)
            end = len(pending) - longest_match
        self._held_back = pending[end:]
        self.text += pending[:end]
        return pending[:end]

    def fail(self, error: GptminiError) -> None:
        """End the text by an error."""
        self.finish_reason = "error"
        self.error = error

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
