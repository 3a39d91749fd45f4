"""How well a model expects a text, token by token."""

import math
from dataclasses import dataclass

import torch

from gptmini.errors import CheckpointError, DataError
from gptmini.generate.run import Run

ROWS = 64  # positions whose logits are held at a time


@dataclass(frozen=True)
class Score:
    """A text under a model: its tokens, the log-probability (nats) and the rank of each, from 1."""

    texts: list[str]
    tokens: list[int]
    logprobs: list[float]
    ranks: list[int]
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -sum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many tokens the model is as unsure as it was."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8: comparable across tokenizers."""
        return -sum(self.logprobs) / math.log(2) / self.bytes


@torch.inference_mode()
def score(run: Run, text: str) -> Score:
    """Score a text, as the beginning of a document.

    DataError for an empty one, CheckpointError if the weights are not finite. A text longer than
    the context is read in windows of one context that move by half of it, so that each token has
    half a context before it or all there is.
    """
    tokens = run.encode(text, "text")
    if not tokens:
        raise DataError("text: is empty; there is nothing to score")
    whole = torch.tensor([run.tokenizer.document_token, *tokens])
    limit = run.config.model.context_length
    logprobs: list[float] = []
    ranks: list[int] = []
    device = run.model.device
    while (done := len(logprobs)) < len(tokens):
        start = max(0, done - limit // 2) if done else 0
        window = whole[start : start + limit]
        hidden = run.model.hidden(window[None].to(device))[0, done - start :]
        targets = whole[done + 1 : start + limit + 1].to(device)
        for part, goals in zip(hidden.split(ROWS), targets.split(ROWS), strict=False):
            logits = run.model.logits(part[: len(goals)]).float()
            own = logits.gather(1, goals[:, None])
            logprobs += (own - logits.logsumexp(1, keepdim=True))[:, 0].tolist()
            ranks += (1 + (logits > own).sum(1)).tolist()
    if not math.isfinite(sum(logprobs)):
        raise CheckpointError("the model gives non-finite logits; its weights are damaged")
    texts = [run.tokenizer.decode([token]) for token in tokens]
    return Score(texts, tokens, logprobs, ranks, len(text.encode()))
