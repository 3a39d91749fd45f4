"""Compute next-token logits in plain torch: prefill, then decode over a KV cache.

This works on any device. Each text has a row of the cache, its slot, and a length of its own. The
next token of all texts is one pass of a fixed shape. `open_engine` opens faster engines, which are
in `gptmini/extras/engine/`.

A pass is padded to one of few numbers of rows and keys. The last bits of a row's logits depend on
these numbers, so they may depend on what else is in the pass.

Letters: B rows of a pass, T tokens, N positions that need logits, D width, V vocabulary.
"""

from abc import ABC, abstractmethod
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptmini.errors import is_missing_part
from gptmini.generate.filters import draw_tokens
from gptmini.generate.precision import widen_weights
from gptmini.generate.sequence import Sequence
from gptmini.machine import Compute
from gptmini.model.cache import Rows, StaticCache
from gptmini.model.gpt import GPT

# Prompt tokens of a text per forward pass. This bounds the memory of their attention scores.
PREFILL_CHUNK = 128
# A text with at most this many unseen tokens needs no prefill. Caches of windowed layers store at
# least this many positions beyond the window, so rejected drafts overwrite no key that is needed.
SPARE_POSITIONS = 16
# Tokens of all texts in a pass. A CPU gains nothing by taking several prompts at once.
PASS_TOKENS_ON_CPU = PREFILL_CHUNK
PASS_TOKENS = 32 * PREFILL_CHUNK
# Numbers of keys in a pass: multiples on a CPU; elsewhere doubled from the least, as each number
# has a graph of its own.
KEYS_MULTIPLE_ON_CPU = 64
MIN_KEYS = 256
# Not cuDNN's attention, which plans for every new length of a prompt: 60 ms or more, where the
# prefill takes 7 (scripts/LOG.md: What does an H100 say?).
PREFILL_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Engine(ABC):
    """Computes next-token logits of up to `n_slots` texts, of any lengths."""

    name: str

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._slots: list[Sequence | None] = []  # the text in each row of the cache
        self._assigned_at: list[int] = []

    @abstractmethod
    def __call__(self, texts: list[Sequence]) -> list[Tensor]:
        """Compute logits (n_logits, V) for the last tokens of each text, in float32.

        They are on the device of the model, and may lie in a buffer that the next call overwrites.
        Afterwards the cache holds the whole context of each text.
        """

    @abstractmethod
    def prefill_chunk(self, text: Sequence, max_tokens: int = PREFILL_CHUNK) -> bool:
        """Prefill a chunk of a long prompt; return False if the next call can do the rest.

        A caller that serves other texts calls this between their tokens.
        """

    def draw(self, logits: list[Tensor], texts: list[Sequence]) -> dict[Sequence, int]:
        """Draw the next token of each text from its logits (V,), as `filters.draw_tokens` does."""
        return draw_tokens(copy_to_host(logits), texts)

    def _add_slots(self, count: int) -> None:
        """Add empty slots."""
        self._slots += [None] * count
        self._assigned_at += [0] * count

    def _assign_slot(self, text: Sequence, texts: list[Sequence]) -> int:
        """Return the slot of a text; a new text takes one that no text of this call has.

        Empty slots go first, then those of ended texts, then the one assigned longest ago. A text
        that has lost its slot finds itself in none, and starts again.
        """
        if text in self._slots:
            return self._slots.index(text)

        def rank(slot: int) -> tuple[bool, bool, int]:
            other = self._slots[slot]
            is_live = other is not None and other.finish_reason is None
            return other is not None, is_live, self._assigned_at[slot]

        others = [slot for slot, other in enumerate(self._slots) if other not in texts]
        slot = min(others, key=rank)
        self._assigned_at[slot] = max(self._assigned_at) + 1
        self._slots[slot] = text
        text.n_cached = 0
        return slot

    @abstractmethod
    def is_current(self, model: GPT) -> bool:
        """Check that this engine computes the model, as it is now."""

    @abstractmethod
    def open_another(self, n_slots: int) -> "Engine":
        """Open an engine of the same model, which shares its weights."""


def open_engine(model: GPT, n_slots: int, weights: str = "float32") -> Engine:
    """Open the fastest engine on this machine for up to `n_slots` texts at a time.

    `weights` is the precision to compute in. Without extras/engine, or where it has nothing faster,
    that is PyTorch, for which weights become float32.
    """
    try:
        from gptmini.extras.engine import door  # noqa: PLC0415 - the core runs without it
    except ModuleNotFoundError as error:
        if not is_missing_part(error):
            raise
        engine = None
    else:
        engine = door.open_engine(model, n_slots, weights)
    if engine is None:
        widen_weights(model)
        engine = TorchEngine(model, n_slots)
    return engine


def copy_to_host(logits: list[Tensor]) -> list[Tensor]:
    """Copy logits, (..., V) each, to the host, all at once; there, return them as they are."""
    if not logits or logits[0].device.type == "cpu":
        return logits
    rows = [each.reshape(-1, each.shape[-1]) for each in logits]
    on_host = torch.cat(rows).cpu().split([len(each) for each in rows])
    return [copy.view(each.shape) for copy, each in zip(on_host, logits, strict=True)]


class TorchEngine(Engine):
    """Runs texts of any lengths together, on any device, with or without a KV cache."""

    name = "torch"

    def __init__(self, model: GPT, n_slots: int = 1, use_cache: bool = True) -> None:
        super().__init__(n_slots)
        self._model = model
        self._use_cache = use_cache and model.uses_cache
        self._on_cpu = model.device.type == "cpu"
        self._max_pass_tokens = PASS_TOKENS_ON_CPU if self._on_cpu else PASS_TOKENS
        self._cache = self._create_cache(0)
        self._compute = Compute(model.device, model.embed.weight.dtype)

    @torch.inference_mode()
    def __call__(self, texts: list[Sequence]) -> list[Tensor]:
        if not self._use_cache:
            return [self._compute_alone(text) for text in texts]
        self._grow_for(texts)
        for text in texts:
            self._assign_slot(text, texts)
        pieces: dict[Sequence, list[Tensor]] = {text: [] for text in texts}
        twins = _find_twins(texts)
        while unready := [each for each in texts if each not in twins and _count_unseen(each) > 1]:
            batch = self._choose_batch(unready)
            for text, logits in zip(batch, self._prefill(batch), strict=True):
                pieces[text].append(logits)
        for text, read in twins.items():
            self._cache.copy_row(self._slots.index(read), self._slots.index(text))
            text.n_cached = read.n_cached
            pieces[text] = [piece.clone() for piece in pieces[read]]  # filters may change theirs
        ready = [text for text in texts if _count_unseen(text) == 1]
        if ready:
            for text, logits in zip(ready, self._step(ready), strict=True):
                pieces[text].append(logits)
        return [_join(pieces[text]) for text in texts]

    @torch.inference_mode()
    def prefill_chunk(self, text: Sequence, max_tokens: int = PREFILL_CHUNK) -> bool:
        if not self._use_cache:
            return False
        self._grow_for([text])
        self._assign_slot(text, [])
        # The last bits depend on the length of a chunk, so it is whole whatever `max_tokens` says.
        if _count_unseen(text) <= PREFILL_CHUNK:
            return False
        self._prefill([text])
        return True

    def is_current(self, model: GPT) -> bool:
        # The weights are read anew for each token; the cache has their type and device.
        compute = Compute(model.device, model.embed.weight.dtype)
        return model is self._model and compute == self._compute

    def open_another(self, n_slots: int) -> Engine:
        return type(self)(self._model, n_slots)

    def _compute_alone(self, text: Sequence) -> Tensor:
        """Pass the whole context through the model; logits (n_logits, V)."""
        tokens = torch.tensor([text.context], device=self._model.device)  # (1, T)
        hidden = self._model.forward_hidden(tokens)[0, -text.n_logits :]  # (n_logits, D)
        text.n_cached = len(text.context)
        return self._model.compute_logits(hidden).float()

    # -- passes ------------------------------------------------------------------------------------

    def _choose_batch(self, texts: list[Sequence]) -> list[Sequence]:
        """Choose texts whose next chunks fit one pass; the first is always among them."""
        batch = texts[:1]
        longest = min(_count_unseen(texts[0]), PREFILL_CHUNK)
        for text in texts[1:]:
            longest = max(longest, min(_count_unseen(text), PREFILL_CHUNK))
            if longest * (len(batch) + 1) > self._max_pass_tokens:
                break
            batch.append(text)
        return batch

    def _prefill(self, texts: list[Sequence]) -> list[Tensor]:
        """Pass the next chunks of B texts through the model; their logits, (N, V) for each."""
        rows = self._find_rows(texts)
        ends = [min(text.n_cached + PREFILL_CHUNK, len(text.context)) for text in texts]
        T = max(end - text.n_cached for text, end in zip(texts, ends, strict=True))
        tokens = []
        positions = []
        is_token = []
        needs_logits: list[tuple[int, int]] = []  # rows and columns of the pass
        n_logits = []
        for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
            start = text.n_cached
            n_padding = T - (end - start)
            tokens.append(text.context[start:end] + [0] * n_padding)
            # The last column must be the newest position.
            positions.append([*range(start, end), *[end - 1] * n_padding])
            is_token.append([1] * (end - start) + [0] * n_padding)
            first = max(start, len(text.context) - text.n_logits)
            needs_logits += [(row, position - start) for position in range(first, end)]
            n_logits.append(max(0, end - first))
            text.n_cached = end
        inputs = self._upload([tokens, positions, is_token])  # (3, B, T)
        cache = self._cache.select(rows, inputs[1], inputs[2] > 0, self._count_keys(max(ends)))
        with nullcontext() if self._on_cpu else sdpa_kernel(PREFILL_KERNELS):
            hidden = self._model.forward_hidden(inputs[0], cache)  # (B, T, D)
        if not needs_logits:
            empty = hidden.new_empty(0, self._model.embed.num_embeddings, dtype=torch.float32)
            return [empty for _ in texts]
        wanted = self._upload(needs_logits).unbind(dim=1)  # (N,) and (N,)
        logits = self._model.compute_logits(hidden[wanted]).float()  # (N, V)
        return list(logits.split(n_logits))

    def _step(self, texts: list[Sequence]) -> list[Tensor]:
        """Pass the last token of each text through the model; its logits (1, V)."""
        self._move_down(texts)
        slots = [self._slots.index(text) for text in texts]
        n_rows = round_up_rows(max(slots) + 1)
        tokens = [[0] for _ in range(n_rows)]
        positions = [[0] for _ in range(n_rows)]
        is_token = [[0] for _ in range(n_rows)]  # the other rows are idle
        for slot, text in zip(slots, texts, strict=True):
            tokens[slot] = text.context[-1:]
            positions[slot] = [len(text.context) - 1]
            is_token[slot] = [1]
            text.n_cached = len(text.context)
        n_keys = self._count_keys(max(text.n_cached for text in texts))
        inputs = self._upload([tokens, positions, is_token])  # (3, B, 1)
        logits = self._compute_step(inputs, n_keys)  # (B, V)
        return [logits[slot : slot + 1] for slot in slots]

    def _compute_step(self, inputs: Tensor, n_keys: int) -> Tensor:
        """Compute the logits (B, V) of one token in each of the first B rows.

        `inputs` (3, B, 1) are tokens, positions and whether the row has a token at all. Nothing
        here may wait for the device, and shapes depend on those of the arguments alone.
        """
        tokens, positions, is_token = inputs.unbind()
        rows = slice(0, len(tokens))
        cache = self._cache.select(rows, positions, is_token > 0, n_keys)
        hidden = self._model.forward_hidden(tokens, cache)  # (B, 1, D)
        return self._model.compute_logits(hidden[:, 0]).float()  # (B, V)

    def _count_keys(self, longest: int) -> int:
        """Round the number of keys of the longest text up, to few different ones."""
        if self._on_cpu:
            n_keys = -(-longest // KEYS_MULTIPLE_ON_CPU) * KEYS_MULTIPLE_ON_CPU
        else:
            n_keys = max(MIN_KEYS, 1 << (longest - 1).bit_length())
        return min(n_keys, self._model.config.context_length)

    def _find_rows(self, texts: list[Sequence]) -> Rows:
        """Say which rows of the cache hold the texts; rows side by side are read in place."""
        slots = [self._slots.index(text) for text in texts]
        if slots == [*range(slots[0], slots[0] + len(slots))]:
            return slice(slots[0], slots[0] + len(slots))
        return self._upload(slots)

    def _upload(self, values: object) -> Tensor:
        return self._compute.copy(torch.tensor(values))

    # -- slots -------------------------------------------------------------------------------------

    def _find_free_slots(self, texts: list[Sequence]) -> list[int]:
        """List the slots without a text that may come again."""
        return [
            slot
            for slot, text in enumerate(self._slots)
            if text is None or (text.finish_reason is not None and text not in texts)
        ]

    def _grow_for(self, texts: list[Sequence]) -> None:
        """Grow the cache at once for all new texts that have no free slot."""
        n_new = sum(text not in self._slots for text in texts)
        wanted = len(self._slots) + n_new - len(self._find_free_slots(texts))
        n_rows = round_up_rows(min(wanted, max(self.n_slots, len(texts))))
        if n_rows > len(self._slots):
            self._grow(n_rows)

    def _grow(self, n_rows: int) -> None:
        """Replace the cache by one of more rows."""
        old = self._cache
        self._cache = self._create_cache(n_rows)
        for row in range(old.n_rows):
            self._cache.copy_row(row, row, old)
        self._add_slots(n_rows - len(self._slots))

    def _create_cache(self, n_rows: int) -> StaticCache:
        weight = self._model.embed.weight
        config = self._model.config
        return StaticCache(config, n_rows, weight.device, weight.dtype, PREFILL_CHUNK)

    def _move_down(self, texts: list[Sequence]) -> None:
        """Move texts from high slots to free low ones while that makes the next step smaller."""
        while True:
            highest = max(self._slots.index(text) for text in texts)
            free = self._find_free_slots(texts)
            is_small = round_up_rows(highest + 1) == round_up_rows(len(texts))
            if is_small or not free or free[0] > highest:
                return
            self._cache.copy_row(highest, free[0])
            self._slots[free[0]] = self._slots[highest]
            self._assigned_at[free[0]] = self._assigned_at[highest]
            self._slots[highest] = None


def round_up_rows(n_rows: int) -> int:
    """Round a number of rows up: 1, 2, 4, 8, 16, 32, then in steps of 16."""
    if n_rows > 32:
        return -(-n_rows // 16) * 16
    return 1 << (n_rows - 1).bit_length()


def _count_unseen(text: Sequence) -> int:
    return len(text.context) - text.n_cached


def _find_twins(texts: list[Sequence]) -> dict[Sequence, Sequence]:
    """Find new texts that begin as an earlier one does, such as samples of one prompt; with it."""
    firsts: dict[tuple[int, ...], Sequence] = {}
    twins = {}
    for text in texts:
        if text.n_cached == 0 and len(text.context) > 1:
            first = firsts.setdefault((text.n_logits, *text.context), text)
            if first is not text:
                twins[text] = first
    return twins


def _join(pieces: list[Tensor]) -> Tensor:
    pieces = [piece for piece in pieces if len(piece)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
