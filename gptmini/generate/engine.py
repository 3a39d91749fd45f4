"""Compute next-token logits in plain torch: prefill, then decode over a KV cache.

This works on any device. Texts of different lengths share a batch through left padding, which lines
up their last tokens. On a CPU, `native.engine.NativeEngine` does the same faster.

Letters: B batch, T tokens, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from gptmini.generate.texts import Text
from gptmini.model.attention import KVCache, compute_left_padding
from gptmini.model.gpt import GPT

# Prompt tokens per forward pass. This bounds the memory that their attention scores take.
PREFILL_CHUNK = 128
# Positions that windowed caches store beyond their window. Rejected drafts have overwritten no key
# that the window still needs.
SPARE_POSITIONS = 16


class Engine(Protocol):
    """Computes next-token logits.

    A `ragged` engine takes texts that need logits of different numbers of tokens in one call.
    """

    name: str
    ragged: bool

    def __call__(self, texts: list[Text]) -> list[Tensor]:
        """Compute logits (n_logits, V) for the last tokens of each text, float32 on the CPU.

        Afterwards the cache holds the whole context of each text. The logits may lie in a buffer
        that the next call overwrites.
        """

    def prefill_chunk(self, text: Text, max_tokens: int = PREFILL_CHUNK) -> bool:
        """Prefill a chunk of a long prompt; return False if the next call can do the rest.

        A caller that serves other texts calls this between their tokens. Only a `ragged` engine
        has chunks to prefill.
        """


class TorchEngine:
    """Runs texts as one left-padded batch, on any device, with or without a KV cache."""

    name = "torch"
    ragged = False

    def __init__(self, model: GPT, use_cache: bool = True) -> None:
        self._model = model
        self._use_cache = use_cache
        self._texts: list[Text] = []  # the text in each row of the cache
        self._cache: KVCache | None = None
        self._padding: Tensor | None = None  # (B,)

    def __call__(self, texts: list[Text]) -> list[Tensor]:
        logits = self._step(texts) if self._can_step(texts) else self._prefill_all(texts)
        for text in texts:
            text.n_cached = len(text.context)
        return logits

    def prefill_chunk(self, text: Text, max_tokens: int = PREFILL_CHUNK) -> bool:
        return False

    def _can_step(self, texts: list[Text]) -> bool:
        """Check whether to extend the cache rather than to fill it anew.

        All rows of the cache have the same length, so a batch can only advance by one token at a
        time, and as soon as one text slides (`n_cached` is 0), all are prefilled again. A single
        text has no such limit: it may see several drafted tokens at once and take some back.
        """
        if self._cache is None:
            return False
        if not all(text in self._texts and text.n_cached for text in texts):
            return False
        if len(self._texts) == 1:
            return True
        unseen = {len(text.context) - text.n_cached for text in texts}
        room = self._model.config.context_length - self._cache.length
        return unseen == {1} and room > 0

    def _step(self, texts: list[Text]) -> list[Tensor]:
        assert self._cache is not None
        if len(self._texts) == 1:
            self._cache.truncate(texts[0].n_cached)
        # Texts that have ended keep their row until the next prefill. They get a dummy token.
        tokens = [text.context[text.n_cached :] if text in texts else [0] for text in self._texts]
        logits = prefill(self._model, tokens, self._cache, texts[0].n_logits, self._padding)
        return [logits[self._texts.index(text)] for text in texts]

    def _prefill_all(self, texts: list[Text]) -> list[Tensor]:
        device = self._model.device
        lengths = [len(text.context) for text in texts]
        self._texts = list(texts)
        padding = compute_left_padding(lengths).to(device)  # (B,)
        self._padding = padding if padding.any() else None
        if self._use_cache:
            self._cache = KVCache(
                self._model.config, len(texts), device, torch.float32, SPARE_POSITIONS
            )
        longest = max(lengths)
        tokens = [[0] * (longest - len(text.context)) + text.context for text in texts]
        n_logits = max(text.n_logits for text in texts)
        return list(prefill(self._model, tokens, self._cache, n_logits, self._padding))


def prefill(
    model: GPT,
    tokens: list[list[int]],
    cache: KVCache | None,
    n_logits: int,
    padding: Tensor | None = None,
) -> Tensor:
    """Compute logits (B, n_logits, V) for the last of `tokens` (B, T).

    With a cache, the tokens pass through the model in chunks.
    """
    batch = torch.tensor(tokens, device=model.device)  # (B, T)
    chunks = batch.split(PREFILL_CHUNK, dim=1) if cache else [batch]
    # The last chunk may be shorter than `n_logits`, so keep the end of every chunk.
    ends = [model.forward_hidden(chunk, cache, padding)[:, -n_logits:] for chunk in chunks]
    hidden = torch.cat(ends, dim=1)[:, -n_logits:]  # (B, n_logits, D)
    return model.compute_logits(hidden).float().cpu()  # (B, n_logits, V)
