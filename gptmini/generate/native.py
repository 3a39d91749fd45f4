"""The model's forward pass for a few tokens at a time, compiled from decode.cpp where g++ is.

Decoding reads every weight for every token, so memory sets its pace. Calls of torch cost more than
that on small models, and torch has no product of float32 inputs with narrower weights; 300 lines
of C++ have neither limit. They are compiled once, in a second, and kept in the cache.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptmini.model.attention import KVCache, LayerCache
from gptmini.model.gpt import GPT, Block

SOURCE = Path(__file__).with_name("decode.cpp")
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]
COLUMNS, LANES = 64, 16  # as in decode.cpp
CALL = 64  # tokens at most in one call
ACTIVATIONS = {"gelu": 0, "relu2": 1, "swiglu": 2}
PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}


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
        *[(name, c_int) for name in ("n_layer", "n_head", "n_kv_head", "head_dim")],
        *[(name, c_int) for name in ("d_model", "d_ff", "context_length")],
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
    """The compiled library, from the cache or made now; None where no compiler makes it."""
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
            return None  # somebody else could have written it
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """What the code is made for: homes are shared by machines that know other instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        known = platform.processor()
    return f"{platform.machine()} {known}"


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(partial)]
    try:  # with torch's own threads; on a Mac they take a library that is seldom there
        subprocess.run([*command, "-fopenmp"], capture_output=True, check=True)  # noqa: S603
    except subprocess.CalledProcessError:
        subprocess.run(command, capture_output=True, check=True)  # noqa: S603
    partial.chmod(0o700)
    os.replace(partial, library)


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of weights (N, K) as int8 and a scale each (N): the largest of a row is 127."""
    scales = weights.abs().amax(dim=1).clamp(min=1e-30) / 127
    return (weights / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def round_weights(model: GPT, precision: str) -> None:
    """Give every matrix the values that its weights have in that precision, still as float32."""
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.embed:
            if precision == "bfloat16":
                module.weight.copy_(module.weight.bfloat16())
            elif precision == "int8":
                whole, scales = quantize(module.weight)
                module.weight.copy_(whole * scales[:, None])


class NativeStep:
    """A model and its caches (B rows), as a function of the next tokens.

    The weights are stored in a precision of their own, the arithmetic is in float32. The logits of
    a token are the same to the last bit whatever else is in the call. The model and the caches
    are to stay where they are, as this has pointers to them.
    """

    def __init__(self, library: ctypes.CDLL, model: GPT, precision: str, cache: KVCache) -> None:
        self._function = library.gptmini_step
        self._function.restype = None
        self._precision = precision
        self._kept: list[Tensor] = []  # what C has pointers to
        self._model = self._describe(model, cache)
        words = torch.zeros(3, CALL, dtype=torch.int32)
        self._words = words.numpy()
        self._logits = torch.zeros(CALL, self._model.head.rows)
        self._arguments = [c_void_p(row.data_ptr()) for row in [*words, self._logits]]

    def __call__(self, tokens: list[int], rows: list[int], positions: list[int]) -> Tensor:
        """Logits (M, V) of M tokens, CALL at most, each of a row and at a position in it.

        Those of one row come in order and follow what its cache holds. The next call writes over
        the logits.
        """
        M = len(tokens)
        self._words[:, :M] = tokens, rows, positions
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
        described = _Model(
            n_layer=config.n_layer,
            n_head=H,
            n_kv_head=config.n_kv_head,
            head_dim=K,
            d_model=D,
            d_ff=F,
            context_length=config.context_length,
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
        """The rows of the modules as one matrix, its columns padded and laid out for C."""
        parts = [dict(module.named_parameters()) for module in modules]
        each = [part["weight"].detach() for part in parts]
        weights = torch.cat(each) if len(each) > 1 else each[0]
        bias = torch.cat([part["bias"] for part in parts]) if "bias" in parts[0] else None
        if missing := -weights.shape[1] % COLUMNS:
            weights = functional.pad(weights, (0, missing))
        rows, columns = weights.shape
        scales = None
        if self._precision == "bfloat16":
            weights = weights.bfloat16()
        elif self._precision == "int8":
            weights, scales = quantize(weights)
        in_word = 4 // weights.element_size()
        words = weights.view(rows, -1, in_word, LANES).transpose(2, 3)
        pointers = [self._pointer(tensor) for tensor in (words, scales, bias)]
        return _Matrix(*pointers, rows, columns)

    def _buffer(self, rows: int, width: int) -> int:
        return self._pointer(torch.zeros(rows, -(-width // COLUMNS) * COLUMNS)) or 0

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()
