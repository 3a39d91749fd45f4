"""Scores a text token by token: how likely a trained model finds each token."""

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gptmini.errors import CheckpointError, DataError
from gptmini.generate.run import Run
from gptmini.generate.sequence import encode_start
from gptmini.model.losses import compute_token_losses


@dataclass(frozen=True)
class Score:
    """The tokens of a text, with the log-probability (nats) and the rank (1 is top) of each.

    `spellings` are their bytes, which may be part of a character.
    """

    spellings: list[bytes]
    tokens: list[int]
    logprobs: list[float]
    token_ranks: list[int]
    n_bytes: int

    @property
    def texts(self) -> list[str]:
        """The text of each token; U+FFFD where it is part of a character."""
        return [spelling.decode("utf-8", "replace") for spelling in self.spellings]

    def iter_characters(self) -> Iterator[tuple[range, str]]:
        """Yield the text in whole characters, each time with the numbers of the tokens it takes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = 0
        text = ""
        for number, spelling in enumerate(self.spellings):
            is_last = number == len(self.spellings) - 1
            text += decoder.decode(spelling, final=is_last)
            pending_bytes, _ = decoder.getstate()
            if not pending_bytes:
                yield range(first, number + 1), text
                first = number + 1
                text = ""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -sum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))  # exp(710) overflows

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8: comparable across tokenizers."""
        return -sum(self.logprobs) / math.log(2) / self.n_bytes


@torch.inference_mode()
def score_text(run: Run, text: str) -> Score:
    """Score each token of a text, as if the model had generated it from an empty prompt.

    A text longer than the context is read in windows of one context, half a context apart. So
    every token has at least half a context before it, or everything there is. Raises DataError if
    the text is empty, CheckpointError if the weights are not finite.
    """
    read_tokens = run.encode(text, "text")
    if not run.tokenizer.adds_bos:
        read_tokens = encode_start(run.tokenizer, run.config.sample)[-1:] + read_tokens
    document = torch.tensor(read_tokens)
    tokens = read_tokens[1:]
    if not tokens:
        raise DataError("text: empty; give at least one character")
    context_length = run.config.model.context_length
    logprobs: list[float] = []
    token_ranks: list[int] = []
    while len(logprobs) < len(tokens):
        n_scored = len(logprobs)
        window_start = max(0, n_scored - context_length // 2) if n_scored else 0
        window = document[window_start : window_start + context_length + 1]
        inputs = window[None, :-1]  # (1, T)
        targets = window[None, 1:]  # (1, T)
        losses, ranks = compute_token_losses(run.model, inputs, targets)  # (1, T), (1, T)
        # The first half of a later window was scored with more context by the window before.
        first_new = n_scored - window_start
        logprobs += (-losses[0, first_new:]).tolist()
        token_ranks += ranks[0, first_new:].tolist()
    if not math.isfinite(sum(logprobs)):
        raise CheckpointError(f"{run.path}: the logits are not finite; train it again")
    spellings = [run.tokenizer.decode_token(token) for token in tokens]
    return Score(spellings, tokens, logprobs, token_ranks, len(text.encode()))
