"""Faster decoding on a CPU that has g++: a compiled step, which gives the same texts as torch.

Decoding reads every weight for every token, so memory bandwidth sets the pace. On small models
the overhead of torch's calls costs more than that, and torch cannot multiply float32 inputs by
narrower weights. decode.cpp has neither limit; build.py compiles it.

Letters: B rows of the cache, M tokens of one call, D width, F width of the MLP, H query heads,
K head size, V vocabulary.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor, nn

from gptmini.generate.build import build
from gptmini.generate.engine import PREFILL, SPARE, Engine, TorchEngine, prefill
from gptmini.generate.precision import COLUMNS, PRECISIONS, Packed, pack
from gptmini.generate.texts import Text
from gptmini.model.attention import KVCache, LayerCache
from gptmini.model.gpt import GPT, Block

CALL = 64  # most tokens in one call, which sizes the buffers
ACTIVATIONS = {"gelu": 0, "relu2": 1, "swiglu": 2}
SIZES = ("n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff", "context_length")


# The structs of decode.cpp, field by field.


class _Matrix(Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("data", "scale", "bias")],
        *[(name, c_int) for name in ("rows", "columns")],
    ]


class _Norm(Structure):
    _fields_ = [(name, c_void_p) for name in ("weight", "bias")]


class _Layer(Structure):
    _fields_ = [
        *[(name, _Norm) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, _Matrix) for name in ("qkv", "o", "up", "down")],
        *[(name, c_void_p) for name in ("keys", "values")],
        *[(name, c_int) for name in ("size", "window")],
    ]


class _Model(Structure):
    _fields_ = [
        *[(name, c_int) for name in SIZES],
        *[(name, c_int) for name in ("rms", "activation", "precision", "n_threads")],
        ("norm_eps", c_float),
        *[(name, c_void_p) for name in ("embed", "positions", "cosines", "sines")],
        ("final_norm", _Norm),
        ("head", _Matrix),
        ("layers", POINTER(_Layer)),
        *[(name, c_void_p) for name in ("x", "normed", "qkv", "mixed", "inner", "scores")],
    ]


class NativeStep:
    """The compiled forward pass of one model over one cache of B rows.

    Weights are stored in the given precision; arithmetic is float32. A token's logits have the same
    bits whatever else is in the call. C holds pointers into the model and the cache, so neither may
    be moved or reallocated while this lives.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: GPT,
        precision: str,
        cache: KVCache,
        packed: Packed | None = None,
    ) -> None:
        """`packed` shares the weights in C's layout between the steps of one model."""
        self._function = library.gptmini_step
        self._function.restype = None
        self._precision = precision
        self._packed = {} if packed is None else packed
        self._kept: list[Tensor] = []  # keeps alive what C has pointers to
        self._model = self._describe(model, cache)
        # Fixed buffers, so that a call allocates nothing.
        inputs = torch.zeros(3, CALL, dtype=torch.int32)
        self._inputs = inputs.numpy()  # the same memory
        self._logits = torch.zeros(CALL, self._model.head.rows)
        self._arguments = [c_void_p(row.data_ptr()) for row in [*inputs, self._logits]]

    def __call__(self, tokens: list[int], rows: list[int], positions: list[int]) -> Tensor:
        """Logits (M, V) of M <= CALL tokens, each with its row of the cache and its position.

        The tokens of a row come in order, right behind what its cache holds. The next call
        overwrites the logits.
        """
        M = len(tokens)
        self._inputs[:, :M] = tokens, rows, positions
        self._function(ctypes.byref(self._model), M, *self._arguments)
        return self._logits[:M]

    def _describe(self, model: GPT, cache: KVCache) -> _Model:
        config, threads = model.config, torch.get_num_threads()
        D, F, H, K = config.d_model, config.d_ff, config.n_head, config.head_dim
        layers = (_Layer * config.n_layer)()
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            layers[number] = self._layer(block, cache.layers[number])
            layers[number].window = config.window(number) or 0
        described = _Model(  # pointers left out are null
            **{name: getattr(config, name) for name in SIZES},
            rms=config.norm == "rmsnorm",
            activation=ACTIVATIONS[config.activation],
            precision=PRECISIONS[self._precision],
            n_threads=threads,
            norm_eps=config.norm_eps,
            embed=self._pointer(model.embed.weight),
            final_norm=self._norm(model.final_norm),
            head=self._matrix(model.head or model.embed),
            layers=layers,
            x=self._buffer(CALL, D),
            normed=self._buffer(CALL, D),
            qkv=self._buffer(CALL, (H + 2 * config.n_kv_head) * K),
            mixed=self._buffer(CALL, H * K),
            inner=self._buffer(2 * CALL, F),
            scores=self._buffer(threads, config.context_length),
        )
        if model.positions is not None:
            described.positions = self._pointer(model.positions.weight)
        if model.rotary is not None:
            described.cosines = self._pointer(model.rotary.cosines)
            described.sines = self._pointer(model.rotary.sines)
        return described

    def _layer(self, block: Block, cache: LayerCache) -> _Layer:
        attn, mlp = block.attn, block.mlp
        gate = [mlp.gate_proj] if mlp.activation == "swiglu" else []
        layer = _Layer(
            attn_norm=self._norm(block.attn_norm),
            mlp_norm=self._norm(block.mlp_norm),
            qkv=self._matrix(attn.q_proj, attn.k_proj, attn.v_proj),
            o=self._matrix(attn.o_proj),
            up=self._matrix(*gate, mlp.up_proj),
            down=self._matrix(mlp.down_proj),
            keys=self._pointer(cache.keys),
            values=self._pointer(cache.values),
            size=cache.size,
        )
        if attn.qk_norm:
            layer.q_norm, layer.k_norm = self._norm(attn.q_norm), self._norm(attn.k_norm)
        return layer

    def _norm(self, module: nn.Module) -> _Norm:
        parts = dict(module.named_parameters())
        return _Norm(self._pointer(parts["weight"]), self._pointer(parts.get("bias")))

    def _matrix(self, *modules: nn.Linear | nn.Embedding) -> _Matrix:
        """Modules with the same input as one matrix, in the layout that decode.cpp reads."""
        if modules[0] not in self._packed:
            self._packed[modules[0]] = pack(modules, self._precision)
        tensors, rows, columns = self._packed[modules[0]]
        return _Matrix(*map(self._pointer, tensors), rows, columns)

    def _buffer(self, rows: int, width: int) -> int:
        return self._pointer(torch.zeros(rows, -(-width // COLUMNS) * COLUMNS)) or 0

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


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
        self._cache = KVCache(model.config, n_slots, torch.device("cpu"), torch.float32, SPARE)
        self._step = NativeStep(library, model, weights, self._cache, packed)
        self._slots: list[Text | None] = [None] * n_slots
        # Of each slot: when it was last taken, and the tokens at its beginning that were prefilled
        # in whole chunks and still are there. A prompt that begins with them starts from them.
        self._taken = [0] * n_slots
        self._prefilled: list[list[int]] = [[] for _ in range(n_slots)]
        self._ring = min(layer.size for layer in self._cache.layers)

    def __call__(self, texts: list[Text]) -> list[Tensor]:
        slots = [self._slot(text, texts) for text in texts]
        wanted = {slot: text.wanted for slot, text in zip(slots, texts, strict=True)}
        logits: dict[int, Tensor] = {}
        calls: list[list[tuple[int, int, int]]] = [[]]  # (token, slot, position) of each call
        for slot, text in zip(slots, texts, strict=True):
            if text.cached == 0:
                self._share(slot, text)
            unseen = range(text.cached, len(text.context))
            # A few tokens wait for the weights to come from memory, which the compiled step reads
            # once. A prompt is bound by arithmetic, and torch's matrix products are best at that.
            # Above SPARE tokens, a windowed ring would also lose keys that the first one sees.
            if len(unseen) > SPARE:
                logits[slot] = self._prefill(slot, text)
            else:
                if len(calls[-1]) + len(unseen) > CALL:
                    calls.append([])
                calls[-1] += [(text.context[place], slot, place) for place in unseen]
            text.cached = len(text.context)
            if text.cached > self._ring:  # the first keys of a window are overwritten
                self._prefilled[slot] = []
        for call in filter(None, calls):
            tokens, rows, positions = (list(column) for column in zip(*call, strict=True))
            output = self._step(tokens, rows, positions)  # (M, V)
            # The caller may use this engine for other texts before it has read all of these.
            output = output.clone() if len(output) > 1 else output
            ends = {slot: place + 1 for place, slot in enumerate(rows)}
            logits |= {slot: output[end - wanted[slot] : end] for slot, end in ends.items()}
        return [logits[slot] for slot in slots]

    def prefill_chunk(self, text: Text) -> bool:
        slot = self._slot(text, [])
        if text.cached == 0:
            self._share(slot, text)
        end = text.cached + PREFILL
        if len(text.context) - end <= SPARE:
            return False
        self._model.hidden(torch.tensor([text.context[text.cached : end]]), self._row(slot, text))
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
        text.cached = text.reused = length

    def _common(self, slot: int, text: Text) -> int:
        """How many tokens, in whole chunks, a slot has in common with a text's beginning."""
        known, tokens, length = self._prefilled[slot], text.context, 0
        for end in range(PREFILL, min(len(known), len(tokens) - SPARE - 1) + 1, PREFILL):
            if known[length:end] != tokens[length:end]:
                break
            length = end
        return length

    def _prefill(self, slot: int, text: Text) -> Tensor:
        unseen = [text.context[text.cached :]]
        logits = prefill(self._model, unseen, self._row(slot, text), text.wanted)[0]
        self._remember(slot, text, len(text.context))
        return logits

    def _row(self, slot: int, text: Text) -> KVCache:
        """The row of a slot, which ends behind what it holds of the text."""
        cache = self._cache.row(slot)
        cache.truncate(text.cached)
        return cache

    def _remember(self, slot: int, text: Text, end: int) -> None:
        """Note the whole chunks of a text that has now been prefilled up to `end`."""
        if len(self._prefilled[slot]) == text.cached:  # nothing came by the compiled step
            self._prefilled[slot] = text.context[: end // PREFILL * PREFILL]


def library_for(model: GPT, cache: Path, use_cache: bool = True) -> ctypes.CDLL | None:
    """The compiled step, if it can compute this model."""
    return build(cache) if use_cache and model.device.type == "cpu" else None


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
