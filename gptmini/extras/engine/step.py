"""Call the compiled forward pass with pointers into a model and its KV cache.

The structs repeat those of decode.cpp and product.h, field by field. C sees plain addresses, which
keep nothing alive: `NativeStep` holds every tensor that they point to.

Letters: B rows of the cache, M tokens of one call, N of them that need logits, D width, F width of
the MLP, H query heads, K head size, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_void_p

import torch
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.extras.engine.packing import CACHE_ALIGNMENT, PackedMatrices, pack, round_up
from gptmini.model.cache import LayerCache
from gptmini.model.gpt import GPT, Block

MAX_CALL_TOKENS = 256  # sizes the buffers
MAX_QUERIES = 16  # as in attention.h
PRECISION_CODES = {"float32": 0, "bfloat16": 1, "int8": 2}
ACTIVATION_CODES = {"gelu": 0, "relu2": 1, "swiglu": 2}


class UnexpectedModelError(Exception):
    """The model is not what its configuration says, or has parts that C does not know."""


class _Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int),
        ("columns", c_int),
    ]


class _Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class _Layer(Structure):
    _fields_ = [
        ("attn_norm", _Norm),
        ("mlp_norm", _Norm),
        ("q_norm", _Norm),
        ("k_norm", _Norm),
        ("qkv", _Matrix),
        ("o", _Matrix),
        ("gate", _Matrix),
        ("up", _Matrix),
        ("down", _Matrix),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("alibi_slopes", c_void_p),
        ("size", c_int),
        ("window", c_int),
    ]


class _Model(Structure):
    _fields_ = [
        ("n_layer", c_int),
        ("n_head", c_int),
        ("n_kv_head", c_int),
        ("head_dim", c_int),
        ("d_model", c_int),
        ("d_ff", c_int),
        ("context_length", c_int),
        ("rms", c_int),
        ("activation", c_int),
        ("precision", c_int),
        ("embed_precision", c_int),
        ("n_threads", c_int),
        ("norm_eps", c_float),
        ("embed", c_void_p),
        ("positions", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("final_norm", _Norm),
        ("head", _Matrix),
        ("layers", POINTER(_Layer)),
        ("x", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("inner", c_void_p),
        ("scratch", c_void_p),
        ("words", c_void_p),
        ("scales", c_void_p),
    ]


class NativeStep:
    """The compiled forward pass of one model over one KV cache of B rows.

    Weights are stored in the given precision; decode.cpp says what else is rounded. C holds
    pointers into the model and the cache, so neither may be moved or reallocated while this object
    lives.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: GPT,
        precision: str,
        cache: list[LayerCache],
        packed: PackedMatrices | None = None,
        embed: Tensor | None = None,
    ) -> None:
        """`packed` holds the weights in C's layout, for all steps of one model to share.

        `embed` is the table that tokens are looked up in (V, D), by default the model's.

        Raises UnexpectedModelError for a model that was changed, as C computes where a tensor ends
        from the configuration alone. Modules of your own may raise anything.
        """
        self._function = library.gptmini_step
        self._function.restype = None
        self._precision = precision
        self._packed = {} if packed is None else packed
        self._referenced: list[Tensor] = []  # keeps alive what C has pointers to
        # The residual stream, which a call leaves as the last layer made it.
        self.x = torch.zeros(MAX_CALL_TOKENS, round_up(model.config.d_model))
        self._embed: Tensor = model.embed.weight if embed is None else embed
        self._model = self._build_model(model, cache)
        # Fixed buffers, so that a call allocates nothing: tokens, rows, positions and logit
        # indices, then the logits. The array shares the memory whose addresses C gets.
        inputs = torch.zeros(4, MAX_CALL_TOKENS, dtype=torch.int32)
        self._inputs = inputs.numpy()
        self._vocab_size = model.config.vocab_size
        self._logits = torch.zeros(MAX_CALL_TOKENS, round_up(self._vocab_size or 0))
        self._pointers = [c_void_p(buffer.data_ptr()) for buffer in [*inputs, self._logits]]

    def __call__(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        logit_indices: Sequence[int],
    ) -> Tensor:
        """Pass M <= MAX_CALL_TOKENS tokens through the model; return the logits (N, V) of some.

        Each token has its row of the cache and its position. Tokens of the same row come in order,
        right behind what the cache holds. `logit_indices` are the indices of the N tokens among
        the M. The next call overwrites the logits.
        """
        M = len(tokens)
        N = len(logit_indices)
        self._inputs[0, :M] = tokens
        self._inputs[1, :M] = rows
        self._inputs[2, :M] = positions
        self._inputs[3, :N] = logit_indices
        *inputs, indices, logits = self._pointers
        self._function(ctypes.byref(self._model), M, *inputs, N, indices, logits)
        return self._logits[:N, : self._vocab_size]  # (N, V)

    def _build_model(self, model: GPT, cache: list[LayerCache]) -> _Model:
        config = model.config
        n_threads = torch.get_num_threads()
        D, F, H, K = config.d_model, config.d_ff, config.n_head, config.head_dim
        V = config.vocab_size or 0
        n_scratch = MAX_QUERIES * (round_up(K, CACHE_ALIGNMENT) + config.context_length + 64)
        check_tensor(self._embed, V, D)
        layers = (_Layer * config.n_layer)()
        check_layers(model)
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)  # `open_engine` leaves others to PyTorch
            layers[number] = self._build_layer(config, block, cache[number])
            layers[number].window = config.get_window(number) or 0
        described = _Model(  # fields left out are 0, pointers null
            n_layer=config.n_layer,
            n_head=H,
            n_kv_head=config.n_kv_head,
            head_dim=K,
            d_model=D,
            d_ff=F,
            context_length=config.context_length,
            rms=config.norm == "rmsnorm",
            activation=ACTIVATION_CODES[config.activation],
            precision=PRECISION_CODES[self._precision],
            embed_precision=PRECISION_CODES[str(self._embed.dtype).removeprefix("torch.")],
            n_threads=n_threads,
            norm_eps=config.norm_eps,
            embed=self._pointer(self._embed),
            final_norm=self._build_norm(model.final_norm, D),
            head=self._build_matrix(D, (model.head or model.embed, V)),
            layers=layers,
            x=self._pointer(self.x),
            normed=self._allocate_buffer(MAX_CALL_TOKENS, D),
            qkv=self._allocate_buffer(MAX_CALL_TOKENS, (H + 2 * config.n_kv_head) * K),
            mixed=self._allocate_buffer(MAX_CALL_TOKENS, H * K),
            inner=self._allocate_buffer(2 * MAX_CALL_TOKENS, F),
            scratch=self._allocate_buffer(n_threads, n_scratch),
        )
        if self._precision != "float32":  # inputs rounded to 16 bits, two in a word
            words = torch.zeros(MAX_CALL_TOKENS, round_up(max(D, F, H * K)) // 2)
            described.words = self._pointer(words)
            described.scales = self._allocate_buffer(1, MAX_CALL_TOKENS)
        if model.positions is not None:
            described.positions = self._pointer(model.positions.weight, config.context_length, D)
        if model.rotary is not None:
            shape = (config.context_length, K // 2)
            described.cosines = self._pointer(model.rotary.cosines, *shape)
            described.sines = self._pointer(model.rotary.sines, *shape)
        return described

    def _build_layer(self, config: ModelConfig, block: Block, cache: LayerCache) -> _Layer:
        D, F, K = config.d_model, config.d_ff, config.head_dim
        n_queries = config.n_head * K
        n_keys = config.n_kv_head * K
        attn, mlp = block.attn, block.mlp
        qkv = [(attn.q_proj, n_queries), (attn.k_proj, n_keys), (attn.v_proj, n_keys)]
        layer = _Layer(
            attn_norm=self._build_norm(block.attn_norm, D),
            mlp_norm=self._build_norm(block.mlp_norm, D),
            qkv=self._build_matrix(D, *qkv),
            o=self._build_matrix(n_queries, (attn.o_proj, D)),
            up=self._build_matrix(D, (mlp.up_proj, F)),
            down=self._build_matrix(F, (mlp.down_proj, D)),
            keys=self._pointer(cache.keys),
            values=self._pointer(cache.values),
            alibi_slopes=self._pointer(attn.alibi_slopes, config.n_head),
            size=cache.keys.shape[2],
        )
        if mlp.activation == "swiglu":
            layer.gate = self._build_matrix(D, (mlp.gate_proj, F))
        if attn.qk_norm:
            layer.q_norm = self._build_norm(attn.q_norm, K)
            layer.k_norm = self._build_norm(attn.k_norm, K)
        return layer

    def _build_norm(self, module: nn.Module, width: int) -> _Norm:
        parameters = dict(module.named_parameters())
        return _Norm(
            weight=self._pointer(parameters["weight"], width),
            bias=self._pointer(parameters.get("bias"), width),
        )

    def _build_matrix(self, n_inputs: int, *parts: tuple[nn.Linear | nn.Embedding, int]) -> _Matrix:
        """Pack modules with the same input into one matrix, unless another step has done so.

        Each part is a module and the number of outputs that it must have.
        """
        modules = []
        for module, n_outputs in parts:
            check_tensor(module.weight, n_outputs, n_inputs)
            check_tensor(dict(module.named_parameters()).get("bias"), n_outputs)
            modules.append(module)
        if modules[0] not in self._packed:
            self._packed[modules[0]] = pack(modules, self._precision)
        packed = self._packed[modules[0]]
        return _Matrix(
            data=self._pointer(packed.data),
            scale=self._pointer(packed.scales),
            bias=self._pointer(packed.bias),
            rows=packed.rows,
            columns=packed.columns,
        )

    def _allocate_buffer(self, rows: int, width: int) -> int:
        return self._pointer(torch.zeros(rows, round_up(width))) or 0

    def _pointer(self, tensor: Tensor | None, *shape: int) -> int | None:
        """Return the address of a tensor's values, and keep them in memory.

        With a shape, check that it is a tensor of this shape in float32.
        """
        if tensor is None:
            return None
        if shape:
            check_tensor(tensor, *shape)
        if shape and tensor.dtype != torch.float32:
            raise UnexpectedModelError(f"a tensor is {tensor.dtype} where it must be float32")
        values = tensor.detach().contiguous()
        self._referenced.append(values)
        return values.data_ptr()


def check_layers(model: GPT) -> None:
    """Raise UnexpectedModelError if there are more or fewer layers than the configuration says."""
    found = len(model.blocks)
    expected = model.config.n_layer
    if found != expected:
        raise UnexpectedModelError(f"{found} layers where the configuration says {expected}")


def check_tensor(tensor: Tensor | None, *shape: int) -> None:
    """Raise UnexpectedModelError if there is a tensor and C would not find what it expects."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        found = " x ".join(map(str, tensor.shape))
        expected = " x ".join(map(str, shape))
        raise UnexpectedModelError(f"a tensor is {found} where the configuration says {expected}")
    if tensor.device.type != "cpu":
        raise UnexpectedModelError(f"a tensor is on the device {tensor.device}")
