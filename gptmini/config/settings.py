"""Every setting of a run: its default, its meaning and its checks."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from gptmini.config.section import (
    Contradiction,
    Count,
    Fraction,
    OnOrOff,
    Paths,
    PathText,
    Penalty,
    Positive,
    Rate,
    Section,
    Seed,
    Steps,
    StopTexts,
    TokenBiases,
    TokenTexts,
    Trackers,
)
from gptmini.errors import ConfigError


def compute_default_d_ff(d_model: int, activation: str) -> int:
    """Compute the inner width for about 8 d_model² weights per MLP.

    swiglu has three matrices, the others two.
    """
    if activation == "swiglu":
        return max(8, round(d_model / 3) * 8)
    return 4 * d_model


class AttentionConfig(Section):
    """How positions attend to each other: H query heads share G KV heads."""

    variant: Literal["mha", "mqa", "gqa"] = "mha"
    """KV heads: mha one per query head, mqa one in all, gqa n_kv_head. In short,
    model.attention=gqa:2+window:64 sets this and the next three."""
    n_kv_head: Count | None = None
    """KV heads of gqa, a divisor of n_head; null for mha and mqa."""
    window: Count | None = None
    """Positions a query sees, its own included; null: all."""
    full_every: Count | None = None
    """Let every n-th layer see all positions despite the window; null: none."""
    qkv_bias: bool | None = None
    """Biases in the q, k and v projections (Qwen2); null: same as model.bias."""
    qk_norm: bool = True
    """RMSNorm on each query and key before the position is applied (Qwen3)."""
    weight_dropout: Fraction = 0.0
    """Dropout of attention weights (GPT-2: 0.1); above 0, no fused kernel."""
    backend: Literal["auto", "eager", "sdpa"] = "auto"
    """Kernel: eager (plain) or sdpa (fused); auto: the faster one."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.variant == "gqa" and self.n_kv_head is None:
            yield "n_kv_head", "variant gqa needs a number of KV heads; set a divisor of n_head"
        if self.variant == "mqa" and self.n_kv_head not in (None, 1):
            yield "n_kv_head", f"variant mqa has 1 KV head, not {self.n_kv_head}; use gqa instead"
        if self.full_every is not None and self.window is None:
            yield "full_every", "has no effect without a window; set window or leave it out"


class ModelConfig(Section):
    """The shape of a GPT; GPT-2 and Llama are both settings of it."""

    vocab_size: Count | None = None
    """Number of different tokens; null: the tokenizer's."""
    n_layer: Annotated[int, Field(ge=1, le=1000)] = 4
    """Number of blocks."""
    n_head: Annotated[int, Field(ge=1, le=1000)] = 4
    """Query heads per attention layer."""
    d_model: Count = 192
    """Width of embeddings and residual stream."""
    head_dim: Count = Field(default_factory=lambda data: max(1, data["d_model"] // data["n_head"]))
    """Size of each head; default: d_model / n_head."""
    context_length: Count = 256
    """Most tokens the model sees at once."""
    attention: AttentionConfig = AttentionConfig()
    position: Literal["learned", "rope", "alibi", "none"] = "rope"
    """Token order: rope rotates queries and keys (Llama), learned adds an embedding per position
    (GPT-2), alibi weakens distant keys (BLOOM), none relies on the causal mask."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies; raise it for long contexts."""
    rope_scaling: Annotated[list[Positive], Field(min_length=4, max_length=4)] | None = None
    """Slower rotation, as in Llama 3.1: factor, low_freq_factor, high_freq_factor, old context."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization; layernorm is faster on a CPU."""
    norm_eps: Positive = 1e-5
    """Added to the variance in norms, to avoid division by zero."""
    activation: Literal["gelu", "swiglu", "relu2"] = "relu2"
    """Activation of the MLP; relu2 is ReLU squared."""
    d_ff: Count = Field(
        default_factory=lambda d: compute_default_d_ff(d["d_model"], d["activation"])
    )
    """Inner width of the MLP; default: 4 d_model, or about 8/3 d_model for swiglu."""
    bias: bool = False
    """Biases in linear layers and layer norms (GPT-2)."""
    tie_embeddings: bool = True
    """Share one matrix between token embedding and output head; default: true, with Muon only at a
    high risk of overfitting."""
    dropout: Annotated[float, Field(ge=0, le=255 / 256)] | None = None
    """Dropout of embeddings and residual branches, in steps of 1/256; null: 0 to 0.2, by
    the risk of overfitting."""
    induction_head: bool = True
    """Begin with an induction head, where there are RoPE and two layers; false: random weights."""

    @property
    def n_kv_head(self) -> int:
        """G, the number of key/value heads."""
        kv_heads = {"mha": self.n_head, "mqa": 1, "gqa": self.attention.n_kv_head}
        return kv_heads[self.attention.variant] or self.n_head

    def get_window(self, layer: int) -> int | None:
        """Get the positions that a query of a layer (from 0) sees, its own included; None: all."""
        every = self.attention.full_every
        if every and (layer + 1) % every == 0:
            return None
        return self.attention.window

    def get_cache_length(self, layer: int) -> int:
        """Get the number of positions whose keys and values a layer keeps when generating."""
        return min(self.get_window(layer) or self.context_length, self.context_length)

    def contradictions(self) -> Iterator[Contradiction]:
        yield from self._head_size_contradictions()
        if self.rope_scaling and not self.rope_scaling[1] < self.rope_scaling[2]:
            yield "rope_scaling", "low_freq_factor is not below high_freq_factor; exchange them"
        yield from self._kv_head_contradictions()

    def _head_size_contradictions(self) -> Iterator[Contradiction]:
        rotates_pairs = self.position == "rope"
        unit = 2 * self.n_head if rotates_pairs else self.n_head
        if "head_dim" not in self.model_fields_set and self.d_model % unit:
            reason = "2 x n_head, as rope rotates pairs" if rotates_pairs else "n_head"
            problem = f"{self.d_model} is not a multiple of {unit} ({reason})"
            yield "d_model", f"{problem}; use one, or set head_dim"
        elif rotates_pairs and self.head_dim % 2:
            yield "head_dim", f"{self.head_dim} is odd, but rope rotates pairs; use an even number"

    def _kv_head_contradictions(self) -> Iterator[Contradiction]:
        requested = self.attention.n_kv_head
        if self.attention.variant == "mha" and requested not in (None, self.n_head):
            problem = f"variant mha has {self.n_head} KV heads, one per query head, not {requested}"
            yield "attention.n_kv_head", f"{problem}; use gqa"
        if self.n_head % self.n_kv_head:
            legal = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            problem = f"{self.n_head} heads (n_head) cannot share {self.n_kv_head} KV heads"
            yield "attention.n_kv_head", f"{problem}; use one of {legal}"


class TokenizerConfig(Section):
    """How text becomes tokens."""

    kind: str = "auto"
    """byte, char or bpe, learned from the text; a tiktoken encoding such as gpt2; or a saved
    tokenizer (.json), ours or Hugging Face's. auto: bpe, or byte below 40 KB of training text."""
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] | None = None
    """Size of the vocabulary of bpe; null: chosen for text, model and minutes."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.vocab_size is not None and self.kind != "bpe":
            yield "vocab_size", f"only kind bpe has a choice, not {self.kind}; set kind to bpe"


class DataConfig(Section):
    """The text to learn from."""

    path: Paths = ["builtin:stories"]
    """A file, folder, glob, - (stdin), builtin:stories, builtin:python-docs or -code, a dataset on
    the Hugging Face Hub (hf:OWNER/NAME), or a list."""
    weights: Annotated[list[Positive], Field(max_length=100)] | None = None
    """Sampling weights of several paths; null: by size."""
    text_key: str = "text"
    """Field or column with the text in JSON lines, CSV and Parquet."""
    separator: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Text between documents within a file; null: each file is one document."""
    errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: strict stops, replace puts U+FFFD in their place."""
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the text held out for validation; null: 0.1, at most about 1.5 MB."""
    split: Literal["tail", "documents"] = "tail"
    """Held-out part: tail, the end of the text; documents, whole ones picked by hash."""
    validation_path: Paths | None = None
    """Text to hold out instead of a fraction of path."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction held out for --split test, unused until then; null: none."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.weights is not None and len(self.weights) != len(self.path):
            counts = f"{len(self.weights)} weights for {len(self.path)} paths"
            yield "weights", f"{counts}; give one per path"
        if (self.validation or 0.1) + (self.test or 0) >= 1:
            yield "test", f"{self.test} and validation leave nothing to train on; lower one of them"


class TrainConfig(Section):
    """How to train: optimizer, schedule, intervals, machine."""

    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Minutes for the whole command; sizes and steps left open are chosen to fit."""
    steps: Steps = 400
    """Number of optimizer updates."""
    batch_size: Count = 16
    """Rows of seq_len tokens per update."""
    micro_batch_size: Count | None = None
    """Rows per pass, a divisor of batch_size (gradients add up); null: what fits and is fast."""
    seq_len: Count | None = None
    """Tokens per row; null: the model's context_length."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimizer of the matrices in the blocks; AdamW trains the rest."""
    muon_lr: Rate = 0.02
    """Peak learning rate of Muon; default: 0.02, or 0.01 at a high risk of overfitting."""
    lr: Rate = 2e-3
    """Peak learning rate of AdamW, which beside Muon trains all but the blocks' matrices (muon_lr);
    default: 2e-3, or with Muon 12e-3 at a low risk of overfitting."""
    embed_lr: Rate | None = None
    """Peak learning rate of the token embeddings; null: lr, or with Muon 6 lr."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the cool-down."""
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default_factory=lambda data: min(100, data["steps"] // 40)
    )
    """Steps over which the rate rises from 0; default: steps / 40, at most 100; from a base at
    least two."""
    schedule: Literal["cosine", "linear"] = "linear"
    """How the rate falls in the cool-down."""
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Fraction of the steps, at the end, in which the rate falls to min_lr."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.3
    """Weight decay of matrices in linear layers and of a tied head; default: 0.3, or with Muon 0.1
    at a low risk of overfitting, 1.0 at a high one."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2, strict=False)] = [0.8, 0.95]
    """AdamW's decay rates of its two running averages."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradients; larger ones are scaled down to it."""
    reduce: Literal["auto", "exact", "fast"] = "auto"
    """exact: bit-identical on 1, 2, 4 and 8 processes; fast: faster, and the only way with shards;
    auto: exact on 2, 4 and 8 processes with whole models."""
    shard: bool = False
    """Shard weights, gradients and optimizer state over the processes (FSDP)."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, more time."""
    deterministic: OnOrOff = "auto"
    """Repeat and resume to equal bits on a GPU, as always on a CPU, at some cost of speed; auto: on
    NVIDIA's GPUs."""
    compile: OnOrOff = "auto"
    """Use torch.compile; auto: on CUDA, and on a CPU with a C++ compiler for more than five minutes
    of training."""
    patience: Count | None = 5
    """Stop after this many evaluations of the cool-down without improvement; null: never."""
    eval_every: Steps = 100
    """Steps between evaluations."""
    eval_tokens: Count | None = None
    """Held-out tokens per evaluation, spread over all; null: all, or as many as fit minutes."""
    save_every: Steps = 100
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=1_000_000)] = 2
    """Newest checkpoints to keep besides the best."""
    log_every: Steps = 20
    """Steps between log lines."""
    log_to: Trackers = []
    """Trackers to send metrics to; install the extra of that name."""
    seed: Seed = 1337
    """Random seed of initial weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """auto: a GPU if there is one (cuda, also for AMD; mps; xpu), else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of matrix products; auto: bfloat16 if the hardware has it, else float16 on
    NVIDIA's GPUs from Volta (V100) on, else float32."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.warmup_steps > self.steps:
            yield "warmup_steps", f"{self.warmup_steps} is more than steps ({self.steps}); lower it"
        if self.min_lr > self.lr:
            yield "min_lr", f"{self.min_lr} is more than lr ({self.lr}); lower it"
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            problem = f"{self.micro_batch_size} does not divide batch_size {self.batch_size}"
            yield "micro_batch_size", f"{problem}; use a divisor"


class BaseConfig(Section):
    """The trained run that this one begins from (fine-tuning)."""

    run: PathText | None = None
    """Run to fine-tune (--from): its best weights and tokenizer; null: begin untrained."""
    step: Annotated[int, Field(ge=0)] | None = None
    """Step of its best checkpoint, recorded at the start."""
    sha256: str | None = None
    """SHA-256 of that checkpoint's model.safetensors, recorded at the start."""


class SampleConfig(Section):
    """How tokens are sampled when generating, and where a text ends."""

    max_new_tokens: Steps = 256
    """Most tokens to generate."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    """0: always the likeliest token; 1: as the model predicts."""
    top_k: Count | None = 50
    """Keep the k likeliest tokens; lower it if words make no sense; null: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the likeliest tokens up to this total probability, such as 0.9; null: all."""
    min_p: Fraction | None = None
    """Keep tokens at least this fraction, such as 0.05, as likely as the likeliest; null: all."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Above 1, discourage tokens of prompt and text (divides their positive logits)."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of every token generated so far."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time it was generated."""
    bias: TokenBiases = {}
    """Added to a token's logit, by its text: {the: -2}; at most 1,024."""
    ban: TokenTexts = []
    """Tokens never to generate, by their text; at most 1,024."""
    stop: StopTexts = []
    """Texts to stop before; at most 16, of 1,000 characters."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """Beginning of an empty prompt; null: the end-of-text token. Default: that token if training
    read it often, else a line break or a common character."""
    seed: Seed = 1337
    """Random seed for sampling."""
    overflow: Literal["slide", "stop", "error"] = "slide"
    """When the context is full: slide drops its older half, stop ends the text, error refuses
    beforehand."""

    def contradictions(self) -> Iterator[Contradiction]:
        if 0 < self.temperature < 1e-3:
            yield "temperature", f"{self.temperature} overflows; use 0 (greedy) or at least 0.001"


class Config(Section):
    """All settings of a run."""

    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    base: BaseConfig = BaseConfig()
    sample: SampleConfig = SampleConfig()

    @property
    def seq_len(self) -> int:
        return self.train.seq_len or self.model.context_length

    def contradictions(self) -> Iterator[Contradiction]:
        limit = self.model.context_length
        if self.seq_len > limit:
            problem = f"{self.seq_len} is more than model.context_length ({limit})"
            yield "train.seq_len", f"{problem}; lower it"

    def with_train(self, **settings: Any) -> "Config":
        """Return the same run with some settings of `train` changed."""
        return self.model_copy(update={"train": self.train.model_copy(update=settings)})

    def fill_open(self, defaults: dict[str, dict[str, Any]]) -> "Config":
        """Return the same run with settings filled in that are not set, null or auto, by section.

        Whatever follows from them by default is computed again. Nothing is checked: `revalidate`
        does that once all settings are filled.
        """
        sections = {}
        for name, values in defaults.items():
            section = getattr(self, name)
            settings = {key: getattr(section, key) for key in section.model_fields_set}
            for key, value in values.items():
                if settings.get(key) in (None, "auto"):
                    settings[key] = value
            sections[name] = type(section).model_construct(**settings)
        return self.model_copy(update=sections)

    def with_tokenizer(self, kind: str, vocab_size: int) -> "Config":
        """Return the same run with this tokenizer; ConfigError if vocab_size is set to another."""
        if self.model.vocab_size not in (None, vocab_size):
            raise ConfigError(
                f"model.vocab_size: {self.model.vocab_size}, but tokenizer {kind} has "
                f"{vocab_size}; leave model.vocab_size out"
            )
        model = self.model.model_copy(update={"vocab_size": vocab_size})
        if self.tokenizer.kind.endswith(".json"):
            return self.model_copy(update={"model": model})
        learned_size = vocab_size if kind == "bpe" else None
        tokenizer = TokenizerConfig(kind=kind, vocab_size=learned_size)
        return self.model_copy(update={"model": model, "tokenizer": tokenizer})
