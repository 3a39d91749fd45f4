"""Next-token logits in plain torch: prefill, then decoding over a KV cache.

Works on any device. Texts of different lengths share a batch by left padding, so that their last
tokens line up. On a CPU `native.NativeEngine` does the same faster.

Letters: B batch, T tokens, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from gptmini.generate.texts import Text
from gptmini.model.attention import KVCache, compute_left_padding
from gptmini.model.gpt import GPT

PREFILL_CHUNK = 128  # prompt tokens per forward pass, which bounds the memory of their scores
SPARE_POSITIONS = 16  # extra positions in windowed caches, so that wrong guesses can be taken back


class Engine(Protocol):
    """Computes next-token logits. `ragged`: texts may ask for different numbers of positions."""

    name: str
    ragged: bool

    def __call__(self, texts: list[Text]) -> list[Tensor]:
        """Logits (wanted, V) of each text's last tokens, float32 on the CPU; caches its context.

        They may lie in a buffer that the next call overwrites.
        """

    def prefill_chunk(self, text: Text, max_tokens: int = PREFILL_CHUNK) -> bool:
        """Prefill a chunk of a long prompt; False if the next call can do what is left.

        A caller with other texts calls this between their tokens. Only a `ragged` engine does it.
        """


class TorchEngine:
    """Texts in one batch, padded on the left, on any device, with or without a cache."""

    name, ragged = "torch", False

    def __init__(self, model: GPT, use_cache: bool = True) -> None:
        self._model, self._use_cache = model, use_cache
        self._texts: list[Text] = []  # the rows of the cache
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
        """Whether the cache can be extended, rather than filled anew.

        All rows of a cache have one length, so a batch can only move by one token at a time, and
        as soon as one text slides (`cached` is 0), everything is prefilled again. A single text has
        no such limit: it may see several guesses at once and take tokens back.
        """
        if self._cache is None or not all(text in self._texts and text.n_cached for text in texts):
            return False
        unseen = {len(text.context) - text.n_cached for text in texts}
        room = self._model.config.context_length - self._cache.length
        return len(self._texts) == 1 or (unseen == {1} and room > 0)

    def _step(self, texts: list[Text]) -> list[Tensor]:
        assert self._cache is not None
        if len(self._texts) == 1:
            self._cache.truncate(texts[0].n_cached)
        # Texts that have ended keep their row until the next prefill and are fed a dummy token.
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
        tokens = [[0] * (max(lengths) - len(text.context)) + text.context for text in texts]
        wanted = max(text.n_logits for text in texts)
        return list(prefill(self._model, tokens, self._cache, wanted, self._padding))


def prefill(
    model: GPT,
    tokens: list[list[int]],
    cache: KVCache | None,
    n_logits: int,
    padding: Tensor | None = None,
) -> Tensor:
    """Logits (B, wanted, V) of the last of tokens (B, T), in chunks if there is a cache."""
    batch = torch.tensor(tokens, device=model.device)  # (B, T)
    chunks = batch.split(PREFILL_CHUNK, dim=1) if cache else [batch]
    # A chunk may be shorter than `wanted`, so the ends of all chunks are kept.
    hidden = torch.cat(
        [model.forward_hidden(chunk, cache, padding)[:, -n_logits:] for chunk in chunks], 1
    )
    return model.compute_logits(hidden[:, -n_logits:]).float().cpu()  # (B, wanted, V)
