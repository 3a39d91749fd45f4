"""Logits of what comes next in some rows of tokens: prefill, then decoding over a KV cache.

A prompt is prefilled by torch, row by row. What follows, a few tokens at a time, goes through the
compiled step of native.py on a CPU with a compiler, and through torch elsewhere, where rows of
different lengths are padded on the left.
"""

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gptmini.generate import native
from gptmini.model.attention import KVCache, left_padding
from gptmini.model.gpt import GPT

PREFILL = 512  # prompt tokens per forward pass, which bounds the memory of their scores
SPARE = 16  # tokens a row may take back, and tokens that are few


@dataclass(eq=False)
class Row:
    """One text: what the model is to see of it, and what has been drawn.

    `tokens` start at position 0 of the context, the first `cached` of them are in the cache.
    `number` stands for the row in the noise of its draws, `finish` says why it has ended.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    start: int = 0  # of `tokens` in the whole text
    cached: int = 0
    wanted: int = 1  # logits, of the last tokens
    drawn: list[int] = field(default_factory=list)
    finish: str | None = None


class Engine(Protocol):
    """What gives logits; `ragged` if rows may want several at once, and not as many each."""

    name: str
    ragged: bool

    def __call__(self, rows: list[Row]) -> list[Tensor]:
        """Logits (wanted, V) in float32 on the CPU after each row's last tokens, now cached.

        Those of a single row that wants one are to be used before the next call.
        """


class NativeEngine:
    """Rows of any lengths, each with a cache of its own."""

    name, ragged = "compiled", True

    def __init__(self, library: ctypes.CDLL, model: GPT, weights: str, n_rows: int) -> None:
        self._model, self.n_rows = model, n_rows
        self._cache = KVCache(model.config, n_rows, torch.device("cpu"), torch.float32, SPARE)
        self._step = native.NativeStep(library, model, weights, self._cache)
        self._slots: list[Row | None] = [None] * n_rows

    def __call__(self, rows: list[Row]) -> list[Tensor]:
        slots = [self._slot(row, rows) for row in rows]
        logits: dict[int, Tensor] = {}
        few: list[tuple[int, int, int]] = []  # tokens, slots, positions
        calls = [few]
        for slot, row in zip(slots, rows, strict=True):
            unseen = range(row.cached, len(row.tokens))
            if len(unseen) > SPARE:
                logits[slot] = self._prefill(slot, row)
            else:
                if len(calls[-1]) + len(unseen) > native.CALL:
                    calls.append([])
                calls[-1] += [(row.tokens[place], slot, place) for place in unseen]
            row.cached = len(row.tokens)
        for call in filter(None, calls):
            tokens, where, positions = (list(column) for column in zip(*call, strict=True))
            found = self._step(tokens, where, positions)
            found = found.clone() if len(found) > 1 else found  # others may step before all is read
            ends = {slot: place + 1 for place, slot in enumerate(where)}
            wanted = {slot: row.wanted for slot, row in zip(slots, rows, strict=True)}
            logits |= {slot: found[end - wanted[slot] : end] for slot, end in ends.items()}
        return [logits[slot] for slot in slots]

    def _slot(self, row: Row, rows: list[Row]) -> int:
        """Where a row has its cache; a new one takes the place of one that has ended."""
        if row in self._slots:
            return self._slots.index(row)
        slot = next(n for n, held in enumerate(self._slots) if held not in rows)
        self._slots[slot], row.cached = row, 0
        return slot

    def _prefill(self, slot: int, row: Row) -> Tensor:
        cache = self._cache.row(slot)
        cache.truncate(row.cached)
        return _prefill(self._model, [row.tokens[row.cached :]], cache, row.wanted)[0]


class TorchEngine:
    """Rows that are padded on the left to one length, on any device, with or without a cache."""

    name, ragged = "torch", False

    def __init__(self, model: GPT, use_cache: bool = True) -> None:
        self._model, self._use_cache = model, use_cache
        self._rows: list[Row] = []
        self._cache: KVCache | None = None
        self._padding: Tensor | None = None

    def __call__(self, rows: list[Row]) -> list[Tensor]:
        logits = self._go_on(rows) if self._can_go_on(rows) else self._begin(rows)
        for row in rows:
            row.cached = len(row.tokens)
        return logits

    def _can_go_on(self, rows: list[Row]) -> bool:
        """Whether the cache holds all but as many tokens of every row."""
        if self._cache is None or not all(row in self._rows and row.cached for row in rows):
            return False
        unseen = {len(row.tokens) - row.cached for row in rows}
        room = self._model.config.context_length - self._cache.length
        return len(self._rows) == 1 or (unseen == {1} and room > 0)

    def _go_on(self, rows: list[Row]) -> list[Tensor]:
        assert self._cache is not None
        if len(self._rows) == 1:  # it may have taken tokens back
            self._cache.truncate(rows[0].cached)
        tokens = [row.tokens[row.cached :] if row in rows else [0] for row in self._rows]
        found = _prefill(self._model, tokens, self._cache, rows[0].wanted, self._padding)
        return [found[self._rows.index(row)] for row in rows]

    def _begin(self, rows: list[Row]) -> list[Tensor]:
        device = self._model.device
        lengths = [len(row.tokens) for row in rows]
        self._rows = list(rows)
        padding = left_padding(lengths).to(device)
        self._padding = padding if padding.any() else None
        if self._use_cache:
            self._cache = KVCache(self._model.config, len(rows), device, torch.float32, SPARE)
        tokens = [[0] * (max(lengths) - len(row.tokens)) + row.tokens for row in rows]
        wanted = max(row.wanted for row in rows)
        found = _prefill(self._model, tokens, self._cache, wanted, self._padding)
        return list(found)


def _prefill(
    model: GPT,
    tokens: list[list[int]],
    cache: KVCache | None,
    wanted: int,
    padding: Tensor | None = None,
) -> Tensor:
    """Logits (B, wanted, V) of the last of tokens (B, T), in chunks where there is a cache."""
    batch = torch.tensor(tokens, device=model.device)
    chunks = batch.split(PREFILL, dim=1) if cache else [batch]
    hidden = torch.cat([model.hidden(chunk, cache, padding)[:, -wanted:] for chunk in chunks], 1)
    return model.logits(hidden[:, -wanted:]).float().cpu()


def open_engine(
    model: GPT, weights: str, n_rows: int, cache: Path, use_cache: bool = True
) -> Engine:
    """The fastest decoder that there is here for so many rows."""
    if use_cache and model.device.type == "cpu":
        library = native.build(cache)
        if library is not None:
            return NativeEngine(library, model, weights, n_rows)
    return TorchEngine(model, use_cache)
