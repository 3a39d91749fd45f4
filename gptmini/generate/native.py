"""Faster decoding on a CPU that has g++: a compiled step.

Decoding reads every weight for every token, so memory bandwidth sets the pace, and on small models
the overhead of torch's calls. Prompts and batches are bound by arithmetic, which decode.cpp does
with the processor's instructions for narrow numbers. build.py compiles it, step.py calls it.

With weights in bfloat16 or int8, inputs (product.h), keys and values are rounded too, by the same
rules in prompts and behind them: a text is the same in any company, but not always that of torch.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from gptmini.generate.build import build
from gptmini.generate.check import computes
from gptmini.generate.engine import PREFILL, SPARE, Engine, TorchEngine, prefill
from gptmini.generate.precision import Packed, cache_of
from gptmini.generate.step import CALL, NativeStep
from gptmini.generate.texts import Text
from gptmini.model.attention import KVCache
from gptmini.model.gpt import GPT

# A token, its slot and position, and whether its logits are wanted.
Step = tuple[int, int, int, bool]


class NativeEngine:
    """Texts of any lengths, each with a row of the cache (a slot) of its own."""

    name, ragged = "compiled", True

    def __init__(
        self,
        library: ctypes.CDLL,
        model: GPT,
        weights: str,
        n_slots: int,
        packed: Packed | None = None,
    ) -> None:
        self._model, self.n_slots = model, n_slots
        # float32 prompts go through torch, whose products in float32 are as fast.
        self._torch_prefill = weights == "float32"
        # A call's first queries must still find the keys of their window when its last ones have
        # been cached, so the rings of windowed layers have room for a whole call.
        spare = SPARE if self._torch_prefill else CALL
        self._cache = cache_of(model.config, weights, n_slots, spare)
        self._step = NativeStep(library, model, weights, self._cache, packed)
        self._slots: list[Text | None] = [None] * n_slots
        # Of each slot: when it was last taken, and the tokens at its beginning that were prefilled
        # in whole chunks and still are there, whichever text has the slot now. A prompt that begins
        # with them starts from them.
        self._taken = [0] * n_slots
        self._prefilled: list[list[int]] = [[] for _ in range(n_slots)]
        self._ring = min(layer.size for layer in self._cache.layers)

    def __call__(self, texts: list[Text]) -> list[Tensor]:
        slots = [self._slot(text, texts) for text in texts]
        logits: dict[int, Tensor] = {}
        together: list[int] = []  # the slots of one or a few calls, and their tokens
        steps: list[Step] = []
        for slot, text in zip(slots, texts, strict=True):
            if text.cached == 0 and text.wanted == 1:
                self._share(slot, text)
            self._forget(slot, text, len(text.context))
            unseen = len(text.context) - text.cached
            # With torch, a few tokens wait for the weights to come from memory, which the compiled
            # step reads once; and above SPARE tokens a windowed ring would lose keys that the first
            # one sees. Without, it is the texts behind that may share a long prompt.
            if unseen > (SPARE if self._torch_prefill else PREFILL):
                logits[slot] = self._prefill(slot, text)
            else:
                together.append(slot)
                steps += self._steps(slot, text, len(text.context))
            text.cached = len(text.context)
        if together:
            wanted = [
                text.wanted for slot, text in zip(slots, texts, strict=True) if slot in together
            ]
            logits |= dict(zip(together, self._run(steps).split(wanted), strict=True))
        return [logits[slot] for slot in slots]

    def _steps(self, slot: int, text: Text, end: int) -> list[Step]:
        """The tokens of a text up to `end` that its slot does not hold yet."""
        wanted = len(text.context) - text.wanted
        return [(text.context[n], slot, n, n >= wanted) for n in range(text.cached, end)]

    def _run(self, steps: list[Step]) -> Tensor:
        """Logits of the wanted tokens, (N, V), by calls of at most CALL tokens."""
        outputs = []
        for start in range(0, len(steps), CALL):
            tokens, rows, positions, flags = zip(*steps[start : start + CALL], strict=True)
            wanted = [place for place, flag in enumerate(flags) if flag]
            output = self._step(tokens, rows, positions, wanted)
            # The caller may use this engine for other texts before it has read all of these.
            outputs.append(output.clone() if len(steps) > 1 else output)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def prefill_chunk(self, text: Text, most: int = PREFILL) -> bool:
        slot = self._slot(text, [])
        if text.cached == 0:
            self._share(slot, text)
        # The compiled step gives the same bits by slices of any length, torch by whole chunks.
        end = text.cached + (PREFILL if self._torch_prefill else min(most, PREFILL))
        if len(text.context) - end <= SPARE:
            return False
        self._forget(slot, text, end)
        if self._torch_prefill:
            tokens = torch.tensor([text.context[text.cached : end]])
            self._model.hidden(tokens, self._row(slot, text))
        else:
            self._run(self._steps(slot, text, end))
        self._remember(slot, text, end)
        text.cached = end
        return True

    def _slot(self, text: Text, texts: list[Text]) -> int:
        """The slot of a text; a new one takes that of another which is not in this call.

        Empty ones first, then those of ended texts, the one first that was taken longest ago.
        """
        if text in self._slots:
            return self._slots.index(text)
        others = [(n, other) for n, other in enumerate(self._slots) if other not in texts]
        _, _, slot = min(
            (0 if other is None else 1 if other.finish_reason else 2, self._taken[n], n)
            for n, other in others
        )
        self._taken[slot] = max(self._taken) + 1
        self._slots[slot], text.cached = text, 0  # whoever lost the slot is prefilled again
        return slot

    def _share(self, slot: int, text: Text) -> None:
        """Start a text from the longest beginning that any slot has in common with it.

        The keys have the bits of a prefill of its own: they were made by chunks at the same places,
        and more than SPARE tokens remain, which will be prefilled too.
        """
        donor = max(range(self.n_slots), key=lambda n: self._common(n, text))
        length = self._common(donor, text)
        if donor != slot:
            for layer in self._cache.layers:
                layer.keys[slot, :, :length] = layer.keys[donor, :, :length]
                layer.values[slot, :, :length] = layer.values[donor, :, :length]
        self._prefilled[slot] = text.context[:length]
        text.cached = length
        if not text.tokens:  # a text that slid has told what its prompt reused
            text.reused = length

    def _common(self, slot: int, text: Text) -> int:
        """How many tokens, in whole chunks, a slot has in common with a text's beginning."""
        known, tokens, length = self._prefilled[slot], text.context, 0
        for end in range(PREFILL, min(len(known), len(tokens) - SPARE - 1) + 1, PREFILL):
            if known[length:end] != tokens[length:end]:
                break
            length = end
        return length

    def _prefill(self, slot: int, text: Text) -> Tensor:
        if self._torch_prefill:
            unseen = [text.context[text.cached :]]
            logits = prefill(self._model, unseen, self._row(slot, text), text.wanted)[0]
        else:
            logits = self._run(self._steps(slot, text, len(text.context)))
        self._remember(slot, text, len(text.context))
        return logits

    def _row(self, slot: int, text: Text) -> KVCache:
        """The row of a slot, which ends behind what it holds of the text."""
        cache = self._cache.row(slot)
        cache.truncate(text.cached)
        return cache

    def _forget(self, slot: int, text: Text, end: int) -> None:
        """Share no key that the next tokens of a text, up to `end`, overwrite."""
        # Past its end, a windowed ring overwrites the first keys.
        kept = text.cached // PREFILL * PREFILL if end <= self._ring else 0
        del self._prefilled[slot][kept:]

    def _remember(self, slot: int, text: Text, end: int) -> None:
        """Note the whole chunks of a text that has now been prefilled up to `end`."""
        # torch gives a chunk behind tokens of the compiled step other bits than behind a prefill.
        alike = not self._torch_prefill or len(self._prefilled[slot]) == text.cached
        if alike and end <= self._ring:
            self._prefilled[slot] = text.context[: end // PREFILL * PREFILL]


def library_for(model: GPT, cache: Path, use_cache: bool = True) -> ctypes.CDLL | None:
    """The compiled step, if there is one here and it computes this model."""
    library = build(cache) if use_cache and model.device.type == "cpu" else None
    return library if library is not None and computes(library, model) else None


def open_engine(
    model: GPT,
    weights: str,
    n_texts: int,
    cache: Path,
    use_cache: bool = True,
    packed: Packed | None = None,
) -> Engine:
    """The fastest engine on this machine for up to `n_texts` texts at a time."""
    library = library_for(model, cache, use_cache)
    if library is None:
        return TorchEngine(model, use_cache)
    return NativeEngine(library, model, weights, n_texts, packed)
