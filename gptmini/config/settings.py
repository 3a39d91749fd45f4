"""Every setting of a run: its default, its meaning, its check. A configuration is frozen data."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gptmini.errors import ConfigError

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Contradiction = tuple[str, str]  # the key to change, and what is wrong with it


def default_d_ff(d_model: int, activation: str) -> int:
    """Inner width with about 8 d_model² weights per MLP: swiglu has three matrices, not two."""
    return max(8, round(d_model / 3) * 8) if activation == "swiglu" else 4 * d_model


class Section(BaseModel):
    """A group of settings: frozen, strict about types, without unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def contradictions(self) -> Iterator[Contradiction]:
        """Settings that are legal one by one but not together."""
        return iter(())

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if found := list(self.contradictions()):
            text = "; ".join(f"{key}: {what}" for key, what in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "found": found})
        return self


class AttentionConfig(Section):
    """Who attends with what: H query heads share G key/value heads."""

    variant: Literal["mha", "mqa", "gqa"] = Field(
        "mha", description="mha: a KV head per query head; mqa: one for all; gqa: n_kv_head of them"
    )
    n_kv_head: Count | None = Field(None, description="KV heads of gqa; divides n_head")
    window: Count | None = Field(None, description="positions a query sees back; null is all")
    full_every: Count | None = Field(
        None, description="with a window: each so-many-th layer sees everything"
    )
    qkv_bias: bool | None = Field(None, description="of q, k and v; by default as model.bias")
    qk_norm: bool = Field(True, description="RMSNorm of each query and key before its position")
    weight_dropout: Fraction = Field(0.0, description="of the weights; slow, as it takes eager")
    backend: Literal["auto", "eager", "sdpa", "flash"] = Field(
        "auto", description="auto chooses by measured rules; flash insists on the flash kernel"
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.variant == "gqa" and self.n_kv_head is None:
            yield "n_kv_head", "variant gqa needs it; set a divisor of n_head"
        if self.variant == "mqa" and self.n_kv_head not in (None, 1):
            yield "n_kv_head", f"variant mqa has 1, not {self.n_kv_head}; use gqa or leave it out"
        if self.full_every is not None and self.window is None:
            yield "full_every", "without a window every layer is full; set window or leave it out"


class ModelConfig(Section):
    """The shape of a GPT; the GPT-2 and the Llama shape are both settings of it."""

    vocab_size: Count | None = Field(None, description="set by the tokenizer")
    n_layer: Annotated[int, Field(ge=1, le=1000)] = Field(4, description="blocks")
    n_head: Annotated[int, Field(ge=1, le=1000)] = Field(4, description="query heads")
    d_model: Count = Field(192, description="width of the residual stream")
    head_dim: Count = Field(
        default_factory=lambda data: max(1, data["d_model"] // data["n_head"]),
        description="size of a head; by default d_model / n_head",
    )
    context_length: Count = Field(256, description="positions the model is made for")
    attention: AttentionConfig = AttentionConfig()
    position: Literal["learned", "rope", "none"] = Field("rope", description="how order is told")
    rope_theta: Positive = Field(10_000.0, description="base of the rotary frequencies")
    norm: Literal["layernorm", "rmsnorm"] = Field(
        "layernorm", description="layernorm has a fused kernel on a CPU, rmsnorm has not"
    )
    norm_eps: Positive = 1e-5
    activation: Literal["gelu", "swiglu", "relu2"] = Field("relu2", description="of the MLP")
    d_ff: Count = Field(
        default_factory=lambda data: default_d_ff(data["d_model"], data["activation"]),
        description="inner width of the MLP; by default 4 d_model, for swiglu 8/3 of it",
    )
    bias: bool = Field(False, description="in projections and layer norms")
    tie_embeddings: bool = Field(True, description="the output head is the embedding table")
    dropout: Fraction | None = Field(
        None, description="of embeddings and residual branches; by default by the epochs planned"
    )

    @property
    def n_kv_head(self) -> int:
        """G, the number of key/value heads."""
        kv_heads = {"mha": self.n_head, "mqa": 1, "gqa": self.attention.n_kv_head}
        return kv_heads[self.attention.variant] or self.n_head

    def window(self, layer: int) -> int | None:
        """Positions a query of a layer (from 0) sees back; None is all."""
        every = self.attention.full_every
        return None if every and (layer + 1) % every == 0 else self.attention.window

    def cache_length(self, layer: int) -> int:
        """Positions whose keys and values a layer keeps when generating."""
        return min(self.window(layer) or self.context_length, self.context_length)

    def contradictions(self) -> Iterator[Contradiction]:
        given = self.attention.n_kv_head
        pairs = 2 if self.position == "rope" else 1
        unit = self.n_head * pairs
        if "head_dim" not in self.model_fields_set and self.d_model % unit:
            below = self.d_model // unit * unit
            near = " or ".join(str(n) for n in (below, below + unit) if n)
            why = "n_head, and rope rotates pairs" if pairs == 2 else "n_head"
            yield (
                "d_model",
                f"{self.d_model} is not a multiple of {unit} ({why}); take {near}, or set head_dim",
            )
        elif self.head_dim % pairs:
            yield "head_dim", f"rope rotates pairs, {self.head_dim} is odd; take an even one"
        if self.attention.variant == "mha" and given not in (None, self.n_head):
            yield (
                "attention.n_kv_head",
                f"variant mha has n_head = {self.n_head}, not {given}; use gqa or leave it out",
            )
        if self.n_head % self.n_kv_head:
            legal = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            yield (
                "attention.n_kv_head",
                f"{self.n_kv_head} does not divide n_head {self.n_head}; take one of {legal}",
            )


class TokenizerConfig(Section):
    """How text becomes tokens."""

    kind: str = Field(
        "auto",
        description="auto (by the size of text and model), byte, char, bpe (learnt from the text), "
        "an encoding of tiktoken such as gpt2, or a saved tokenizer: a .json file",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] | None = Field(
        None, description="tokens of bpe; by default chosen by the size of text and model"
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.vocab_size is not None and self.kind != "bpe":
            yield "vocab_size", f"is chosen for kind bpe alone, not {self.kind}; leave it out"


Paths = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]


class DataConfig(Section):
    """What is learnt from."""

    path: Paths = Field(
        ["builtin:python-docs"],
        description="a file, a folder, a glob, - for standard input, builtin:python-docs or "
        "builtin:python-code, or a list of them",
    )
    weights: Annotated[list[Positive], Field(max_length=100)] | None = Field(
        None, description="how the windows are shared among a list of paths; by default by size"
    )
    text_key: str = Field("text", description="where JSON lines, CSV and Parquet keep the text")
    separator: Annotated[str, Field(min_length=1, max_length=100)] | None = Field(
        None, description="what stands between documents in a text file; by default nothing does"
    )
    errors: Literal["strict", "replace"] = Field(
        "strict", description="bytes that are no UTF-8: refuse them, or put U+FFFD there"
    )
    validation: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="share held out; by default a tenth, of large texts about 1.5 MB"
    )
    split: Literal["tail", "documents"] = Field(
        "tail", description="hold out the end of the tokens, or whole documents by their hash"
    )
    validation_path: Paths | None = Field(
        None, description="a text of its own to hold out, instead of a share"
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.weights is not None and len(self.weights) != len(self.path):
            yield (
                "weights",
                f"{len(self.weights)} of them for {len(self.path)} paths; give one for each path",
            )


class TrainConfig(Section):
    """How it is learnt: an optimizer, warm-up, a constant rate, a cool-down."""

    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="time for the whole command: sizes and steps not given are fitted to it"
    )
    steps: Steps = Field(250, description="optimizer updates")
    batch_size: Count = Field(16, description="windows per update")
    micro_batch_size: Count | None = Field(
        None,
        description="windows per forward pass, whose gradients add up to those of batch_size; by "
        "default as many as fit in memory and are fast",
    )
    seq_len: Count | None = Field(None, description="tokens per window; by default context_length")
    optimizer: Literal["muon", "adamw"] = Field(
        "muon", description="of the matrices in the blocks; all else is AdamW's"
    )
    muon_lr: Positive = Field(0.02, description="of Muon, falling and rising as lr does")
    lr: Positive = Field(2e-3, description="of AdamW")
    min_lr: Annotated[float, Field(ge=0)] = Field(0.0, description="at the end of the cool-down")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default_factory=lambda data: min(100, data["steps"] // 10),
        description="of linear rise; by default a tenth of the steps, 100 at most",
    )
    schedule: Literal["cosine", "linear"] = Field("linear", description="shape of the cool-down")
    cooldown: Annotated[float, Field(ge=0, le=1)] = Field(
        0.7, description="share of the steps, at the end, in which the rate falls to min_lr"
    )
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(0.3, description="on matrices only")
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.95], description="of AdamW"
    )
    grad_clip: Positive = Field(1.0, description="largest norm of the gradient")
    on_divergence: Literal["stop", "rewind"] = Field(
        "stop",
        description="at a loss that is not finite: end, or go back to the newest checkpoint and "
        "on at half the rate",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute blocks in the backward pass: less memory, more time"
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="torch.compile of the blocks; auto: if there is a C++ compiler, the run is "
        "long enough and a timing says that it is faster",
    )
    patience: Count | None = Field(
        5, description="evaluations of the cool-down without a better one, then the run ends"
    )
    eval_every: Steps = Field(100, description="steps between whole-split evaluations")
    save_every: Steps = Field(100, description="steps between checkpoints")
    keep: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        2, description="newest checkpoints that stay, beside the best"
    )
    log_every: Steps = Field(20, description="steps between lines of metrics")
    log_to: list[Literal["tensorboard", "wandb"]] = Field(
        [], description="where metrics go too; needs the extra of that name"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of matrix products; auto: bfloat16 where the machine is fast at it"
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.warmup_steps > self.steps:
            yield "warmup_steps", f"{self.warmup_steps} is over steps {self.steps}; lower it"
        if self.min_lr > self.lr:
            yield "min_lr", f"{self.min_lr} is over lr {self.lr}; lower it"
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            yield (
                "micro_batch_size",
                f"{self.micro_batch_size} does not divide batch_size {self.batch_size}; "
                f"take a divisor",
            )


class SampleConfig(Section):
    """How a token is drawn when generating, and when a text ends."""

    max_new_tokens: Steps = 256
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(0.8, description="0 is greedy")
    top_k: Count | None = Field(50, description="keep the k likeliest tokens")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="keep the likeliest tokens that hold this much probability"
    )
    min_p: Fraction | None = Field(None, description="of the likeliest one's probability")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="divides logits of tokens that were there; over 1 is against repeating"
    )
    presence_penalty: Penalty = Field(0.0, description="off the logits of drawn tokens, once")
    frequency_penalty: Penalty = Field(0.0, description="the same, as often as they were drawn")
    bias: dict[str, Penalty] = Field({}, description="added to the logit of the token of a text")
    ban: list[str] = Field([], description="tokens that are never drawn")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="texts that end the text, and are left out"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    overflow: Literal["slide", "stop", "error"] = Field(
        "slide", description="past the context: go on from its newer half, end, or refuse"
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if 0 < self.temperature < 1e-3:
            yield "temperature", f"{self.temperature} overflows; take 0 for greedy, or 0.001 and up"


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()

    @property
    def seq_len(self) -> int:
        """Tokens in a training window."""
        return self.train.seq_len or self.model.context_length

    def contradictions(self) -> Iterator[Contradiction]:
        limit = self.model.context_length
        if self.seq_len > limit:
            yield "train.seq_len", f"{self.seq_len} is over model.context_length {limit}; lower it"

    def with_train(self, **settings: Any) -> "Config":
        """The same run with other settings of the section train."""
        return self.model_copy(update={"train": self.train.model_copy(update=settings)})

    def with_tokenizer(self, kind: str, vocab_size: int) -> "Config":
        """The same run with the tokenizer it got; ConfigError if another size is asked for."""
        if self.model.vocab_size not in (None, vocab_size):
            raise ConfigError(
                f"model.vocab_size: {self.model.vocab_size}, but tokenizer {kind} has "
                f"{vocab_size}; leave model.vocab_size out"
            )
        model = self.model.model_copy(update={"vocab_size": vocab_size})
        if self.tokenizer.kind.endswith(".json"):
            return self.model_copy(update={"model": model})
        tokenizer = TokenizerConfig(kind=kind, vocab_size=vocab_size if kind == "bpe" else None)
        return self.model_copy(update={"model": model, "tokenizer": tokenizer})
