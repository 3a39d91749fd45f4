"""GGUF, the files of llama.cpp, Ollama and LM Studio; written, and read back for the proof."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError, MachineError
from gptmini.generate.run import Run
from gptmini.interop.architectures import Tensors, shapes
from gptmini.text import tokenizer_json
from gptmini.text.tokenizer import CharTokenizer, Tokenizer

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
WORDS = {
    **{"embed": "token_embd", "positions": "position_embd", "blocks": "blk"},
    **{"attn": "", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"},
    **{"o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"},
    **{"mlp": "", "mlp_norm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up"},
    **{"down_proj": "ffn_down", "final_norm": "output_norm", "head": "output"},
}
# Settings as metadata, after the name of the architecture; the rest follows from `kind`.
KEYS = {
    **{"n_layer": "block_count", "n_head": "attention.head_count", "d_model": "embedding_length"},
    **{"d_ff": "feed_forward_length", "context_length": "context_length"},
    **{"head_dim": "attention.key_length", "rope_theta": "rope.freq_base"},
}
SPACE = "\u2581"  # stands for a space in SentencePiece
NORMAL, CONTROL, BYTE = 1, 3, 6  # kinds of tokens


def library() -> Any:
    """The package gguf, of llama.cpp's authors; MachineError if it is not installed."""
    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError:
        raise MachineError(
            "--to gguf: the package gguf is not installed; run pip install gguf"
        ) from None
    return gguf


def check(config: ModelConfig, tokenizer: Tokenizer, weights: str) -> None:
    """ConfigError for what llama.cpp does not have, MachineError if the package is missing."""
    library()
    problem = ""
    if weights not in TYPES:
        raise ConfigError(f"--weights {weights}: unknown type; use {', '.join(TYPES)}")
    if config.attention.window is not None:
        problem = f"model.attention.window: {config.attention.window}, but must be none"
    elif config.activation == "relu2":
        problem = "model.activation: relu2, but must be gelu"
    elif config.rope_scaling is not None:
        problem = "model.rope_scaling: set, but must be none"
    if problem:
        raise ConfigError(f"{problem} in llama.cpp; use --to hf, or change this and train again")
    pattern = tokenizer_json.vocabulary(tokenizer)[0]
    if isinstance(tokenizer, CharTokenizer):
        if SPACE in tokenizer.characters:
            raise ConfigError("tokenizer: has U+2581, llama.cpp's space; train with bpe or byte")
    elif not tokenizer_json.PATTERNS[pattern][1] and tokenizer.kind != "byte":
        raise ConfigError(
            f"tokenizer.kind: {tokenizer.kind} splits words in a way that llama.cpp does not know; "
            f"use --to hf, or train again with this version of gptmini"
        )


def name_of(name: str, kind: str) -> str:
    """The name of a tensor in GGUF."""
    words = [WORDS.get(part, part) for part in name.split(".")]
    if kind == "gpt2":
        words = ["attn_qkv" if w in ("attn_q", "attn_k", "attn_v") else w for w in words]
    return ".".join(filter(None, words))


def _type(name: str, tensor: Tensor, weights: str) -> Any:
    """The type a tensor is stored in; vectors and positions stay in float32."""
    types = library().GGMLQuantizationType
    if tensor.ndim == 1 or name.startswith("position"):
        return types.F32
    return types["F16" if weights == "q8_0" and tensor.shape[1] % 32 else TYPES[weights]]


def rounded(weights: Tensors, to: str) -> Tensors:
    """The weights as they are after rounding to a type."""
    quants = library().quants
    made = {}
    for name, tensor in weights.items():
        kind = _type(name, tensor, to)
        made[name] = torch.from_numpy(
            quants.dequantize(quants.quantize(tensor.numpy(), kind), kind)
        )
    return made


def _interleaved(tensor: Tensor, heads: int, back: bool = False) -> Tensor:
    """Rows of q or k for llama.cpp's llama, which rotates neighbors (2i, 2i + 1) of a head."""
    halves = (-1, 2) if back else (2, -1)
    return tensor.unflatten(0, (heads, *halves)).transpose(1, 2).flatten(0, 2).contiguous()


def write(path: Path, run: Run, kind: str, config: ModelConfig, weights: Tensors, to: str) -> None:
    """Write a folded model with its tokenizer; `to` is the type of its matrices."""
    gguf = library()
    writer = gguf.GGUFWriter(path, kind)
    values = config.model_dump()
    for name, key in KEYS.items():
        add = writer.add_float32 if name == "rope_theta" else writer.add_uint32
        add(f"{kind}.{key}", values[name])
    rms = "rms_" if config.norm == "rmsnorm" else ""
    writer.add_float32(f"{kind}.attention.layer_norm_{rms}epsilon", config.norm_eps)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_name(run.path.name)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(to, f"MOSTLY_{to.upper()}")])
    _add_tokenizer(writer, run.tokenizer)
    together: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        heads = {"q_proj": config.n_head, "k_proj": config.n_kv_head}.get(part)
        rows = _interleaved(tensor, heads) if kind == "llama" and heads else tensor
        together.setdefault(name_of(name, kind), []).append(rows)
    for name, tensors in together.items():
        whole = torch.cat(tensors)
        stored = _type(name, whole, to)
        writer.add_tensor(name, gguf.quants.quantize(whole.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    pattern, ranks, special = tokenizer_json.vocabulary(tokenizer)
    texts = {number: tokenizer_json.spelled(token) for token, number in ranks.items()}
    kinds = dict.fromkeys(ranks.values(), NORMAL)
    if isinstance(tokenizer, CharTokenizer):  # by SentencePiece: characters, or else bytes
        texts = {number: f"<0x{number:02X}>" for number in range(256)}
        texts |= {ord(" "): SPACE, **dict(enumerate(tokenizer.characters, 256))}
        kinds |= {number: BYTE for number in range(256) if number != ord(" ")}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * tokenizer.vocab_size)
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(tokenizer_json.PATTERNS[pattern][1] or "gpt-2")
        # An empty list is refused; a letter is never in one word with a space after it.
        merges = tokenizer_json.merges(ranks) or [("a", tokenizer_json.spelled(b" "))]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    texts |= {number: name for name, number in special.items()}
    for number in range(tokenizer.vocab_size):  # some vocabularies have gaps
        texts.setdefault(number, f"<|unused_{number}|>")
        kinds.setdefault(number, CONTROL)
    writer.add_token_list([texts[number] for number in range(tokenizer.vocab_size)])
    writer.add_token_types([kinds[number] for number in range(tokenizer.vocab_size)])
    writer.add_bos_token_id(tokenizer.document_token)
    writer.add_eos_token_id(tokenizer.end_tokens[0])
    if len(tokenizer.end_tokens) > 1:
        writer.add_eot_token_id(tokenizer.end_tokens[1])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def read(path: Path) -> tuple[ModelConfig, Tensors, Tokenizer]:
    """The settings, weights and tokenizer of a file that `write` wrote."""
    gguf = library()
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"]
    tree = {name: fields[f"{kind}.{key}"] for name, key in KEYS.items()}
    rms = f"{kind}.attention.layer_norm_rms_epsilon" in fields
    tree["norm"] = "rmsnorm" if rms else "layernorm"
    tree["norm_eps"] = fields[f"{kind}.attention.layer_norm_{'rms_' * rms}epsilon"]
    tree |= {"activation": "swiglu" if rms else "gelu", "position": "rope"}
    stored = {
        each.name: torch.tensor(gguf.quants.dequantize(each.data, each.tensor_type))
        for each in reader.tensors
    }
    if "position_embd.weight" in stored:
        tree["position"] = "learned"
    tree["vocab_size"] = len(stored["token_embd.weight"])
    tree["tie_embeddings"] = "output.weight" not in stored
    tree["bias"] = "blk.0.ffn_up.bias" in stored
    kv_heads = fields[f"{kind}.attention.head_count_kv"]
    attention: dict[str, Any] = {
        "variant": "gqa",
        "n_kv_head": kv_heads,
        "qk_norm": "blk.0.attn_q_norm.weight" in stored,
    }
    attention["qkv_bias"] = True if "blk.0.attn_q.bias" in stored else None
    config = ModelConfig.model_validate(tree | {"attention": attention})
    weights: Tensors = {}
    for name in shapes(config):
        tensor, part = stored[name_of(name, kind)], name.split(".")[-2]
        if kind == "gpt2" and part in ("q_proj", "k_proj", "v_proj"):
            tensor = tensor.chunk(3)["qkv".index(part[0])]
        if kind == "llama" and part in ("q_proj", "k_proj"):
            heads = config.n_head if part == "q_proj" else kv_heads
            tensor = _interleaved(tensor, heads, back=True)
        weights[name] = tensor
    return config, weights, _tokenizer(fields, path)


def _tokenizer(fields: dict[str, Any], path: Path) -> Tokenizer:
    texts = fields["tokenizer.ggml.tokens"]
    kinds = dict(zip(texts, fields["tokenizer.ggml.token_type"], strict=True))
    if fields["tokenizer.ggml.model"] == "llama":
        return CharTokenizer("".join(t for t in texts if kinds[t] == NORMAL and t != SPACE))
    numbers = {text: number for number, text in enumerate(texts)}
    pre = {name: theirs for theirs, name in tokenizer_json.PATTERNS.values()}
    merges = [
        merge for merge in fields["tokenizer.ggml.merges"] if merge.replace(" ", "") in numbers
    ]
    split: dict[str, Any] = {
        "type": "Split",
        "pattern": {"Regex": pre[fields["tokenizer.ggml.pre"]]},
    }
    split |= {"behavior": "Isolated"}
    by_digits = split["pattern"]["Regex"] == tokenizer_json.DIGITS
    if by_digits:
        split = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "use_regex": by_digits}
    special = [{"content": t, "id": n} for t, n in numbers.items() if kinds[t] == CONTROL]
    data = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "added_tokens": special,
        "model": {"type": "BPE", "ignore_merges": True, "vocab": numbers, "merges": merges},
    }
    return tokenizer_json.from_json(
        data,
        path,
        len(texts),
        [fields["tokenizer.ggml.eos_token_id"]],
        fields["tokenizer.ggml.bos_token_id"],
        fields.get("tokenizer.chat_template"),
    )
