"""A text from its prompt to its last character.

A `Sequence` is the state that the parts of generation share: the engine reads `context` and updates
`n_cached`, the sampler appends tokens, and `decode_token` turns them into characters.
"""

import codecs
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
    # A tokenizer may drop white space.
    return tokenizer.add_bos(tokenizer.encode(sample.start).tolist()) or [tokenizer.eos_token_id]


def ban_end_tokens(tokenizer: Tokenizer) -> Tensor:
    """Make the bias (V,) of a first token that does not end its text at once.

    After a token that ends texts, a tied head expects the same again: few windows of training begin
    with one, to teach it otherwise.
    """
    bias = torch.zeros(tokenizer.vocab_size)
    bias[tokenizer.end_tokens] = -torch.inf
    return bias


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


def _count_matched(text: str, stop: str) -> int:
    """Count the characters at the end of a text that are the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    lengths = (n for n in range(longest, 0, -1) if text.endswith(stop[:n]))
    return next(lengths, 0)


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
        first_bias: Tensor | None = None,
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
        self.first_bias = first_bias  # (V,), added to those of the first token as well
        self.prompt_tokens = prompt_tokens
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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_back = ""  # may be the beginning of a stop text
        # The prompt already shows the space that the first token brings along.
        repeats_space = first_bias is not None and prompt.endswith(" ")
        drops_space = tokenizer is not None and tokenizer.drops_first_space and not prompt
        self._drop_space = repeats_space or drops_space

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
        stops = self.sample.stop
        # The first stop text to be complete ends the text, the longest if there are several.
        # Whatever the tokens are: each may complete many characters.
        places = [(pending.index(stop), stop) for stop in stops if stop in pending]
        if places:
            self.finish_reason = "stop"
            _, end = min((start + len(stop), start) for start, stop in places)
        elif self.finish_reason:
            end = len(pending)
        else:
            end = len(pending) - max((_count_matched(pending, stop) for stop in stops), default=0)
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
