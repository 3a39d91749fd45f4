"""Faster decoding on a CPU that has g++: a compiled step, which gives the same texts as torch.

Decoding reads every weight for every token, so memory bandwidth sets the pace. On small models
the overhead of torch's calls costs more than that, and torch cannot multiply float32 inputs by
narrower weights. decode.cpp has neither limit; it compiles once, in a second, into the cache.

Letters: B rows of the cache, M tokens of one call, D width, F width of the MLP, H query heads,
K head size, V vocabulary.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.generate.engine import SPARE, Engine, TorchEngine, prefill
from gptmini.generate.texts import Text
from gptmini.model.attention import KVCache, LayerCache
from gptmini.model.gpt import GPT, Block

SOURCE = Path(__file__).with_name("decode.cpp")
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]
COLUMNS, LANES = 64, 16  # as in decode.cpp
CALL = 64  # most tokens in one call, which sizes the buffers
ACTIVATIONS = {"gelu": 0, "relu2": 1, "swiglu": 2}
PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
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


@lru_cache
def build(cache: Path) -> ctypes.CDLL | None:
    """The compiled step, from the cache or compiled now; None if that fails or is not possible."""
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        return None
    words = " ".join([compiler, *FLAGS, _processor()])
    name = hashlib.sha256(SOURCE.read_bytes() + words.encode()).hexdigest()[:16]
    library = cache / "native" / f"{name}.so"
    try:
        if not library.exists():
            _compile(compiler, library)
        if library.stat().st_uid != os.getuid() or library.stat().st_mode & 0o022:
            return None  # never load code that another user could have written
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """The processor's instructions: -march=native, and machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()} {features}"


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(partial)]
    try:  # share torch's OpenMP threads; Macs mostly lack the library, so fall back to one thread
        subprocess.run([*command, "-fopenmp"], capture_output=True, check=True)  # noqa: S603
    except subprocess.CalledProcessError:
        subprocess.run(command, capture_output=True, check=True)  # noqa: S603
    partial.chmod(0o700)
    os.replace(partial, library)


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (N, K) as int8 with one scale per row (N,), so that each row's largest is 127."""
    scales = weights.abs().amax(dim=1).clamp(min=1e-30) / 127  # (N,)
    return (weights / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def round_weights(model: GPT, precision: str) -> None:
    """Round every matrix in place to that precision, stored as float32: torch computes the same."""
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.embed:
            if precision == "bfloat16":
                module.weight.copy_(module.weight.bfloat16())
            elif precision == "int8":
                integers, scales = quantize(module.weight)
                module.weight.copy_(integers * scales[:, None])


# The first module of each matrix: its words, scales and bias, and how many rows and columns.
Packed = dict[nn.Module, tuple[list[Tensor | None], int, int]]


def _pack(
    modules: Sequence[nn.Linear | nn.Embedding], precision: str
) -> tuple[list[Tensor | None], int, int]:
    parts = [dict(module.named_parameters()) for module in modules]
    matrices = [part["weight"].detach() for part in parts]
    weights = torch.cat(matrices) if len(matrices) > 1 else matrices[0]  # (rows, columns)
    bias = torch.cat([part["bias"].detach() for part in parts]) if "bias" in parts[0] else None
    if missing := -weights.shape[1] % COLUMNS:
        weights = functional.pad(weights, (0, missing))
    rows, columns = weights.shape
    scales = None
    if precision == "bfloat16":
        weights = weights.bfloat16()
    elif precision == "int8":
        weights, scales = quantize(weights)
    # Interleave: a 32-bit word holds columns i, i + 16 (, i + 32, i + 48) of its block, so that
    # one shift of a vector of words widens 16 neighboring columns.
    per_word = 4 // weights.element_size()
    words = weights.view(rows, -1, per_word, LANES).transpose(2, 3).contiguous()
    return [words, scales, bias], rows, columns


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
        packed: "Packed | None" = None,
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
            self._packed[modules[0]] = _pack(modules, self._precision)
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

    def __call__(self, texts: list[Text]) -> list[Tensor]:
        slots = [self._slot(text, texts) for text in texts]
        wanted = {slot: text.wanted for slot, text in zip(slots, texts, strict=True)}
        logits: dict[int, Tensor] = {}
        calls: list[list[tuple[int, int, int]]] = [[]]  # (token, slot, position) of each call
        for slot, text in zip(slots, texts, strict=True):
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
        for call in filter(None, calls):
            tokens, rows, positions = (list(column) for column in zip(*call, strict=True))
            output = self._step(tokens, rows, positions)  # (M, V)
            # The caller may use this engine for other texts before it has read all of these.
            output = output.clone() if len(output) > 1 else output
            ends = {slot: place + 1 for place, slot in enumerate(rows)}
            logits |= {slot: output[end - wanted[slot] : end] for slot, end in ends.items()}
        return [logits[slot] for slot in slots]

    def _slot(self, text: Text, texts: list[Text]) -> int:
        """The slot of a text; a new one takes the place of any text that is not in this call."""
        if text in self._slots:
            return self._slots.index(text)
        slot = next(n for n, other in enumerate(self._slots) if other not in texts)
        self._slots[slot], text.cached = text, 0  # whoever lost the slot is prefilled again
        return slot

    def _prefill(self, slot: int, text: Text) -> Tensor:
        cache = self._cache.row(slot)
        cache.truncate(text.cached)
        return prefill(self._model, [text.context[text.cached :]], cache, text.wanted)[0]


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
