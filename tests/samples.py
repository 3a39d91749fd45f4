"""Tokenizers, runs and kinds of models that several tests share."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from gptmini.config.load import validate
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.runs.write import write_run
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from gptmini.tokenizer.byte_level import SMOLLM_PATTERN, to_byte_level
from gptmini.tokenizer.foreign import ForeignTokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.support import prose

TEXT = prose()
NO_NORM = {"qk_norm": False}
GQA = {"variant": "gqa", "n_kv_head": 2}
MQA = {"variant": "mqa"}
WINDOW = {"window": 7}
SOME = {"window": 7, "full_every": 2}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu"}
GPT2 = {"position": "learned", "activation": "gelu", "bias": True}
STARCODER = {"activation": "gelu", "bias": True}
SCALED = {"rope_scaling": [8.0, 1.0, 4.0, 16.0]}


def learned_tokenizer() -> Tokenizer:
    ranks = bpe.learn_bpe([TEXT], 299)
    return create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, ranks, {"<|endoftext|>": 299})


TOKENIZER = learned_tokenizer()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = {"<|endoftext|>": 299, "<|im_start|>": 300, "<|im_end|>": 301}


TEMPLATE_TOKENS = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
}
# It splits words as SmolLM2's: single digits.
CHAT_TOKENIZER = create_bpe_tokenizer(
    "bpe",
    SMOLLM_PATTERN,
    bpe.learn_bpe([TEXT], 299),
    CHAT,
    ends=["<|im_end|>"],
    chat_template=TEMPLATE,
)


def write_tokenizer_json(missing: bytes = b"", **added: int) -> dict[str, Any]:
    """The tokenizer above as a tokenizer.json, without some bytes, with added tokens."""
    # Here, as the tests of the core run without extras.
    from gptmini.extras.interop.tokenizer_json import build_added_token, to_tokenizer_json

    content = to_tokenizer_json(CHAT_TOKENIZER)
    for byte in missing:
        del content["model"]["vocab"][to_byte_level(bytes([byte]))]
    content["added_tokens"] += [
        build_added_token(number, name, False) for name, number in added.items()
    ]
    return content


def adopted_tokenizer(missing: bytes = b"", **added: int) -> ForeignTokenizer:
    """The same, adopted with its chat template."""
    from gptmini.extras.interop.adopt import adopt_tokenizer

    return adopt_tokenizer(
        json.dumps(write_tokenizer_json(missing, **added)),
        Path("tokenizer.json"),
        CHAT_TOKENIZER.vocab_size + len(added),
        CHAT_TOKENIZER.end_tokens,
        chat_template=TEMPLATE,
        template_tokens=TEMPLATE_TOKENS,
    )


def uneven_chats() -> str:
    """The lines of a file of conversations in which one side says far more than the other."""
    draw = random.Random(1)
    lines = []
    for _ in range(60):
        lengths = draw.sample([2, 100], 2)
        messages = [
            {"role": role, "content": "".join(draw.choices("abc def.", k=length)) + "x"}
            for role, length in zip(("user", "assistant"), lengths, strict=True)
        ]
        lines.append(json.dumps({"messages": messages}))
    return "\n".join(lines)


def thinking_tokenizer() -> ForeignTokenizer:
    """A tokenizer as Qwen3's: answers show some of its added tokens."""
    return adopted_tokenizer(**{"<think>": 302, "</think>": 303})


def run_of(
    path: Path, tokenizer: Tokenizer = TOKENIZER, sample: dict[str, Any] | None = None, **model: Any
) -> Run:
    """A run on disk whose weights, all of them, are far from where they began."""
    shape = {"n_layer": 3, "n_head": 4, "d_model": 32, "context_length": 40}
    shape["vocab_size"] = tokenizer.vocab_size
    config = validate({"model": shape | model, "sample": sample or {}}, {})
    torch.manual_seed(0)
    net = GPT(config.model)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
    write_run(RunDirectory(path), config, net.state_dict().items(), tokenizer)
    return load_run(path, "cpu", "float32")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("qwen3", {}),
    "gqa": ("qwen3", {"attention": GQA}),
    "mqa": ("qwen3", {"attention": MQA}),
    "window": ("qwen3", {"attention": WINDOW}),
    "window in some layers": ("qwen3", {"attention": {**SOME, **GQA}, "head_dim": 16}),
    "swiglu, untied": ("qwen3", {**LLAMA, "tie_embeddings": False, "norm_eps": 1e-3}),
    "layernorm, swiglu, scaled": ("qwen3", {"activation": "swiglu", **SCALED}),
    "rmsnorm, relu2, qkv_bias": ("qwen3", {"norm": "rmsnorm", "attention": {"qkv_bias": True}}),
    "llama": ("llama", {**LLAMA, "attention": NO_NORM, **SCALED}),
    "llama of ours": ("llama", {"attention": {**NO_NORM, **GQA}, "rope_theta": 500.0}),
    "llama, biases": ("llama", {**LLAMA, "bias": True, "attention": {**NO_NORM, **MQA}}),
    "llama, biases, relu2": ("llama", {"norm": "rmsnorm", "bias": True, "attention": NO_NORM}),
    "llama, qkv_bias": ("llama", {"attention": {**NO_NORM, "qkv_bias": True}}),
    "mistral": ("mistral", {"attention": {**NO_NORM, **GQA, **WINDOW}}),
    "starcoder2": ("starcoder2", {**STARCODER, "attention": {**NO_NORM, **MQA, **WINDOW}}),
    "starcoder2, no bias": ("starcoder2", {"activation": "gelu", "attention": NO_NORM}),
    "starcoder2, relu2": ("starcoder2", {"bias": True, "attention": {**NO_NORM, **GQA}}),
    "gpt2": ("gpt2", {**GPT2, "attention": NO_NORM}),
    "gpt2, gqa": ("gpt2", {**GPT2, "bias": False, "attention": {**NO_NORM, **GQA}}),
    "gpt2, mqa, untied": ("gpt2", {**GPT2, "tie_embeddings": False, "attention": NO_NORM | MQA}),
    "gpt2, no positions": ("gpt2", {"position": "none", "attention": NO_NORM}),
}
