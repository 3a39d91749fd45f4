"""The compiled forward pass: decode.cpp called with pointers into a model and its cache.

Letters: B rows of the cache, M tokens of one call, N of them that want logits, D width, F width of
the MLP, H query heads, K head size, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_void_p

import torch
from torch import Tensor, nn

from gptmini.generate.native.precision import LANES, PRECISIONS, PackedMatrices, pack, round_up
from gptmini.model.attention import KVCache, LayerCache
from gptmini.model.gpt import GPT, Block

MAX_CALL_TOKENS = 128  # most tokens in one call, which sizes the buffers
ACTIVATION_CODES = {"gelu": 0, "relu2": 1, "swiglu": 2}
SIZE_FIELDS = ("n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff", "context_length")


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
        *[(name, _Matrix) for name in ("qkv", "o", "gate", "up", "down")],
        *[(name, c_void_p) for name in ("keys", "values")],
        *[(name, c_int) for name in ("size", "window")],
    ]


class _Model(Structure):
    _fields_ = [
        *[(name, c_int) for name in SIZE_FIELDS],
        *[(name, c_int) for name in ("rms", "activation", "precision", "n_threads")],
        ("norm_eps", c_float),
        *[(name, c_void_p) for name in ("embed", "positions", "cosines", "sines")],
        ("final_norm", _Norm),
        ("head", _Matrix),
        ("layers", POINTER(_Layer)),
        *[(name, c_void_p) for name in ("x", "normed", "qkv", "mixed", "inner", "scores")],
        *[(name, c_void_p) for name in ("words", "scales")],
    ]


class NativeStep:
    """The compiled forward pass of one model over one cache of B rows.

    Weights are stored in the given precision; bfloat16 and int8 ones are multiplied with inputs of
    16 bits, keys and values rounded to bfloat16, and the rest of the arithmetic is float32. A
    token's logits have the same bits whatever else is in the call. C holds pointers into the model
    and the cache, so neither may be moved or reallocated while this lives.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: GPT,
        precision: str,
        cache: KVCache,
        packed: PackedMatrices | None = None,
    ) -> None:
        """`packed` shares the weights in C's layout between the steps of one model."""
        config = model.config
        self._function = library.gptmini_step
        self._function.restype = None
        self._precision = precision
        self._packed = {} if packed is None else packed
        self._referenced: list[Tensor] = []  # keeps alive what C has pointers to
        self._model = self._build_model(model, cache)
        # Fixed buffers, so that a call allocates nothing.
        inputs = torch.zeros(4, MAX_CALL_TOKENS, dtype=torch.int32)
        self._inputs = inputs.numpy()  # the same memory
        self._logits = torch.zeros(MAX_CALL_TOKENS, round_up(config.vocab_size or 0))
        self._vocab_size = config.vocab_size
        self._pointers = [c_void_p(row.data_ptr()) for row in [*inputs, self._logits]]

    def __call__(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        logit_indices: Sequence[int],
    ) -> Tensor:
        """Logits (N, V) of the N out of M <= CALL tokens; `logit_indices` are their places in the call.

        Each token has its row of the cache and its position; those of a row come in order, right
        behind what its cache holds. The next call overwrites the logits.
        """
        M, N = len(tokens), len(logit_indices)
        self._inputs[:3, :M] = tokens, rows, positions
        self._inputs[3, :N] = logit_indices
        *inputs, outputs, logits = self._pointers
        self._function(ctypes.byref(self._model), M, *inputs, N, outputs, logits)
        return self._logits[:N, : self._vocab_size]

    def _build_model(self, model: GPT, cache: KVCache) -> _Model:
        config, threads = model.config, torch.get_num_threads()
        D, F, H, K = config.d_model, config.d_ff, config.n_head, config.head_dim
        layers = (_Layer * config.n_layer)()
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            layers[number] = self._build_layer(block, cache.layers[number])
            layers[number].window = config.get_window(number) or 0
        described = _Model(  # pointers left out are null
            **{name: getattr(config, name) for name in SIZE_FIELDS},
            rms=config.norm == "rmsnorm",
            activation=ACTIVATION_CODES[config.activation],
            precision=PRECISIONS[self._precision],
            n_threads=threads,
            norm_eps=config.norm_eps,
            embed=self._pointer(model.embed.weight),
            final_norm=self._build_norm(model.final_norm),
            head=self._build_matrix(model.head or model.embed),
            layers=layers,
            x=self._allocate_buffer(MAX_CALL_TOKENS, D),
            normed=self._allocate_buffer(MAX_CALL_TOKENS, D),
            qkv=self._allocate_buffer(MAX_CALL_TOKENS, (H + 2 * config.n_kv_head) * K),
            mixed=self._allocate_buffer(MAX_CALL_TOKENS, H * K),
            inner=self._allocate_buffer(2 * MAX_CALL_TOKENS, F),
            scores=self._allocate_buffer(threads, 4 * (config.context_length + LANES)),
        )
        if self._precision != "float32":  # inputs of 16 bits
            described.words = self._pointer(
                torch.zeros(MAX_CALL_TOKENS, round_up(max(D, F, H * K)) // 2)
            )
            described.scales = self._allocate_buffer(1, MAX_CALL_TOKENS)
        if model.positions is not None:
            described.positions = self._pointer(model.positions.weight)
        if model.rotary is not None:
            described.cosines = self._pointer(model.rotary.cosines)
            described.sines = self._pointer(model.rotary.sines)
        return described

    def _build_layer(self, block: Block, cache: LayerCache) -> _Layer:
        attn, mlp = block.attn, block.mlp
        layer = _Layer(
            attn_norm=self._build_norm(block.attn_norm),
            mlp_norm=self._build_norm(block.mlp_norm),
            qkv=self._build_matrix(attn.q_proj, attn.k_proj, attn.v_proj),
            o=self._build_matrix(attn.o_proj),
            up=self._build_matrix(mlp.up_proj),
            down=self._build_matrix(mlp.down_proj),
            keys=self._pointer(cache.keys),
            values=self._pointer(cache.values),
            size=cache.size,
        )
        if mlp.activation == "swiglu":
            layer.gate = self._build_matrix(mlp.gate_proj)
        if attn.qk_norm:
            layer.q_norm, layer.k_norm = (
                self._build_norm(attn.q_norm),
                self._build_norm(attn.k_norm),
            )
        return layer

    def _build_norm(self, module: nn.Module) -> _Norm:
        parts = dict(module.named_parameters())
        return _Norm(self._pointer(parts["weight"]), self._pointer(parts.get("bias")))

    def _build_matrix(self, *modules: nn.Linear | nn.Embedding) -> _Matrix:
        """Modules with the same input as one matrix, in the layout that product.h reads."""
        if modules[0] not in self._packed:
            self._packed[modules[0]] = pack(modules, self._precision)
        tensors, rows, columns = self._packed[modules[0]]
        return _Matrix(*map(self._pointer, tensors), rows, columns)

    def _allocate_buffer(self, rows: int, width: int) -> int:
        return self._pointer(torch.zeros(rows, round_up(width))) or 0

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._referenced.append(tensor.detach().contiguous())
        return self._referenced[-1].data_ptr()
