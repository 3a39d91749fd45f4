"""Compute next-token logits on a CPU with the compiled step: slots, prefill and shared prefixes.

Decoding reads every weight for every token, so it is bound by memory bandwidth, and on small models
by the overhead of torch's calls. Prompts and batches are bound by arithmetic, which decode.cpp does
with the processor's instructions for narrow numbers.

A prompt follows the same rules as the tokens behind it, so a text is the same whatever else is in
the batch. It is not always the text that torch gives: sums are in another order, and with weights
in bfloat16 or int8 the inputs of products (product.h), keys and values are rounded too, on AMX more
of attention (attention.h).

Two ideas make it faster still:

- Prefix cache: the slots remember which whole chunks of tokens were prefilled at their beginning.
  A prompt that begins with the same chunks copies their keys and values from that slot.
- Rings: a windowed layer caches little more than its window. Position p lies at index p % size, so
  a new key overwrites one that nobody sees any more. What was prefilled can be shared only while
  the ring has not overwritten its beginning.
"""

import ctypes

import torch
from torch import Tensor

from gptmini.extras.engine.fingerprint import Fingerprint
from gptmini.extras.engine.packing import CACHE_ALIGNMENT, PackedMatrices, create_cache
from gptmini.extras.engine.step import MAX_CALL_TOKENS, NativeStep
from gptmini.generate.engine import PREFILL_CHUNK, SPARE_POSITIONS, Engine
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT

# One token of a call: its number, slot and position, and whether it needs logits.
BatchEntry = tuple[int, int, int, bool]


class NativeEngine(Engine):
    """Runs texts of any lengths together; each has a row of the KV cache, its slot."""

    name = "compiled"

    def __init__(
        self,
        library: ctypes.CDLL,
        model: GPT,
        weights: str,
        n_slots: int,
        shares: "NativeEngine | None" = None,
    ) -> None:
        """`shares` is another engine of the same model, whose weights this one reads, too."""
        super().__init__(n_slots)
        self._add_slots(n_slots)
        self._library = library
        self._model = model
        self._weights = weights
        self._fingerprint: Fingerprint = shares._fingerprint if shares else Fingerprint(model)
        self._packed: PackedMatrices = shares._packed if shares else {}
        self._embed: Tensor = shares._embed if shares else model.embed.weight.detach()
        if weights == "bfloat16":  # as a model that was rounded when loaded has it
            self._embed = self._embed.to(torch.bfloat16)
        # A call caches all its keys before its queries look at them. The first queries must still
        # find the keys of their window, so the rings of windowed layers have room for a whole call,
        # and for the block of positions that its last token begins.
        spare_positions = MAX_CALL_TOKENS + CACHE_ALIGNMENT
        self._cache = create_cache(model.config, weights, n_slots, spare_positions)
        self._step = NativeStep(library, model, weights, self._cache, self._packed, self._embed)
        # For each slot: the tokens at its beginning that were prefilled in whole chunks and whose
        # keys are still there, whichever text has the slot now. This is the prefix cache.
        self._prefilled: list[list[int]] = [[] for _ in range(n_slots)]
        self._ring_size = min(layer.keys.shape[2] for layer in self._cache)

    def __call__(self, texts: list[Sequence]) -> list[Tensor]:
        slots = [self._assign_slot(text, texts) for text in texts]
        logits: dict[int, Tensor] = {}
        # Texts with few unseen tokens share a batch, which reads the weights once for all of them.
        # Longer prompts are prefilled alone, so that texts behind them in this call can reuse their
        # prefix.
        batch_slots: list[int] = []
        batch_n_logits: list[int] = []
        entries: list[BatchEntry] = []
        for slot, text in zip(slots, texts, strict=True):
            if text.n_cached == 0 and text.n_logits == 1:
                self._reuse_prefix(slot, text)
            self._forget(slot, text, len(text.context))
            unseen = len(text.context) - text.n_cached
            if unseen > PREFILL_CHUNK:
                logits[slot] = self._run_batch(self._build_entries(slot, text, len(text.context)))
                self._record_prefilled(slot, text, len(text.context))
            else:
                batch_slots.append(slot)
                batch_n_logits.append(text.n_logits)
                entries += self._build_entries(slot, text, len(text.context))
            text.n_cached = len(text.context)
        if batch_slots:
            batch_logits = self._run_batch(entries).split(batch_n_logits)
            logits |= dict(zip(batch_slots, batch_logits, strict=True))
        return [logits[slot] for slot in slots]

    def _build_entries(self, slot: int, text: Sequence, end: int) -> list[BatchEntry]:
        """List the tokens of a text up to `end` that its slot does not hold yet."""
        first_with_logits = len(text.context) - text.n_logits
        return [
            (text.context[position], slot, position, position >= first_with_logits)
            for position in range(text.n_cached, end)
        ]

    def _run_batch(self, entries: list[BatchEntry]) -> Tensor:
        """Compute the logits (N, V) that the entries need, MAX_CALL_TOKENS entries at a time."""
        outputs = []
        for start in range(0, len(entries), MAX_CALL_TOKENS):
            call = entries[start : start + MAX_CALL_TOKENS]
            tokens, slots, positions, needs_logits = zip(*call, strict=True)
            logit_indices = [index for index, needed in enumerate(needs_logits) if needed]
            output = self._step(tokens, slots, positions, logit_indices)
            # The caller may use this engine for other texts before it has read all of these.
            outputs.append(output.clone() if len(entries) > 1 else output)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def prefill_chunk(self, text: Sequence, max_tokens: int = PREFILL_CHUNK) -> bool:
        slot = self._assign_slot(text, [])
        if text.n_cached == 0:
            self._reuse_prefix(slot, text)
        end = text.n_cached + min(max_tokens, PREFILL_CHUNK)
        if len(text.context) - end <= SPARE_POSITIONS:
            return False
        self._forget(slot, text, end)
        self._run_batch(self._build_entries(slot, text, end))
        self._record_prefilled(slot, text, end)
        text.n_cached = end
        return True

    def is_current(self, model: GPT) -> bool:
        return self._fingerprint.matches(model)

    def open_another(self, n_slots: int) -> "NativeEngine":
        return NativeEngine(self._library, self._model, self._weights, n_slots, shares=self)

    def _reuse_prefix(self, slot: int, text: Sequence) -> None:
        """Start a text from the longest prefix that any slot holds of it.

        The keys have the bits that this text would compute. At least one token is left to compute.
        """
        donor = max(range(self.n_slots), key=lambda n: self._count_common_prefix(n, text))
        length = self._count_common_prefix(donor, text)
        if donor != slot:
            for layer in self._cache:
                layer.keys[slot, :, :length] = layer.keys[donor, :, :length]
                layer.values[slot, :, :length] = layer.values[donor, :, :length]
        self._prefilled[slot] = text.context[:length]
        text.n_cached = length
        if not text.tokens:  # do not count what a text reuses when it slides later
            text.n_reused = length

    def _count_common_prefix(self, slot: int, text: Sequence) -> int:
        """Count the tokens, in whole chunks, that a slot holds of a text's beginning."""
        prefilled = self._prefilled[slot]
        longest = min(len(prefilled), len(text.context) - 1)
        length = 0
        for end in range(PREFILL_CHUNK, longest + 1, PREFILL_CHUNK):
            if prefilled[length:end] != text.context[length:end]:
                break
            length = end
        return length

    def _forget(self, slot: int, text: Sequence, end: int) -> None:
        """Stop sharing the keys that the next tokens of a text, up to `end`, overwrite."""
        whole_chunks = text.n_cached // PREFILL_CHUNK * PREFILL_CHUNK
        # Beyond its size, the smallest ring wraps around and overwrites the first keys.
        kept = whole_chunks if end <= self._ring_size else 0
        del self._prefilled[slot][kept:]

    def _record_prefilled(self, slot: int, text: Sequence, end: int) -> None:
        """Record the whole chunks of a text that is now prefilled up to `end`."""
        if end <= self._ring_size:
            self._prefilled[slot] = text.context[: end // PREFILL_CHUNK * PREFILL_CHUNK]
