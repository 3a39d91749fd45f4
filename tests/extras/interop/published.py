"""Pretrained models as their authors publish them, made tiny.

Each has the settings of its config.json and the parts of its tokenizer.json around the vocabulary,
as facts; nothing is copied. Sizes are then replaced by small ones, weights are drawn, and a small
vocabulary is learned, numbered and written in the way of the original.
"""

import copy
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gptmini.tokenizer import bpe
from gptmini.tokenizer.byte_level import BYTE_TO_UNICODE, recover_merges, to_byte_level
from tests.support import prose

JsonObject = dict[str, Any]
N_WORDS = 300  # of a vocabulary: bytes and what is merged from them
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# -- tokenizer.json --------------------------------------------------------------------------------

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTE_LEVEL_5 = BYTE_LEVEL | {"use_regex": True}  # files written since 2022 state it
QWEN_BYTES = BYTE_LEVEL | {"trim_offsets": False, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_PATTERN = CONTRACTIONS + SPACES
LLAMA3_PATTERN = CONTRACTIONS + "{1,3}" + SPACES


def split_by(pattern: str) -> JsonObject:
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    return split | {"behavior": "Isolated", "invert": False}


def in_turn(*steps: JsonObject) -> JsonObject:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@dataclass(frozen=True)
class PublishedTokenizer:
    """What surrounds the vocabulary in a tokenizer.json, and how the vocabulary is numbered."""

    head: JsonObject
    special: list[str]
    """The names of special tokens, in the order of their numbers."""
    special_first: bool = False
    """Whether special tokens have the lowest numbers, and are listed in the vocabulary as well."""
    unspecial: tuple[str, ...] = ()
    """Added tokens that are not special: those of tools and of code to be filled in."""
    missing: bytes = b""
    """Bytes without a token."""
    merges: str = "texts"
    """"texts": "a b"; "pairs": ["a", "b"]; "all": as texts, every way to split each token."""
    model: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    """tokenizer_config.json."""

    def build(self, vocab_size: int) -> JsonObject:
        """The content of tokenizer.json for a vocabulary of `vocab_size` at most."""
        known = [bytes([byte]) for byte in BYTE_TO_UNICODE if byte not in self.missing]
        learned = [token for token in bpe.learn_bpe([prose()], N_WORDS) if len(token) > 1]
        added = [*self.special, *self.unspecial]
        first = len(added) if self.special_first else 0
        tokens = (known + learned)[: vocab_size - len(added)]
        ranks = {token: first + number for number, token in enumerate(tokens)}
        numbers = {
            name: number + (0 if self.special_first else len(tokens))
            for number, name in enumerate(added)
        }
        words = {to_byte_level(token): number for token, number in ranks.items()}
        model = {"vocab": numbers | words if self.special_first else words}
        model["merges"] = self.list_merges(ranks)
        head = copy.deepcopy(self.head)
        for step in (head["post_processor"] or {}).get("processors", []):
            if step["type"] == "TemplateProcessing":
                bos = self.config["bos_token"]
                step["special_tokens"] = {bos: {"id": bos, "ids": [numbers[bos]], "tokens": [bos]}}
        return head | {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": number,
                    "content": name,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": name in self.special,
                }
                for name, number in numbers.items()
            ],
            "model": self.model | model,
        }

    def list_merges(self, ranks: dict[bytes, int]) -> list[Any]:
        if self.merges == "all":
            return [
                f"{to_byte_level(token[:place])} {to_byte_level(token[place:])}"
                for token in ranks
                for place in range(1, len(token))
                if token[:place] in ranks and token[place:] in ranks
            ]
        merges = recover_merges(ranks)
        if self.merges == "pairs":
            return [list(merge) for merge in merges]
        return [" ".join(merge) for merge in merges]


BPE_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
# Written before models had types, and before bytes could be a fallback.
OLD_MODEL = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
}

GPT2_TOKENIZER = PublishedTokenizer(
    head={
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    },
    special=["<|endoftext|>"],
    model=OLD_MODEL,
    config={"model_max_length": 1024},
)
SMOLLM2_TOKENIZER = PublishedTokenizer(
    head={
        "normalizer": None,
        "pre_tokenizer": in_turn(DIGITS, BYTE_LEVEL_5),
        "post_processor": None,
        "decoder": BYTE_LEVEL_5 | {"add_prefix_space": True},
    },
    special=[
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
        "<reponame>",
        "<file_sep>",
        "<filename>",
        "<gh_stars>",
        "<issue_start>",
        "<issue_comment>",
        "<issue_closed>",
        "<jupyter_start>",
        "<jupyter_text>",
        "<jupyter_code>",
        "<jupyter_output>",
        "<jupyter_script>",
        "<empty_output>",
    ],
    special_first=True,
    missing=bytes([4, 6, 19, 20, 22, 29, 192, 193, 241, 242, *range(245, 256)]),
    model=BPE_MODEL,
    config={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_prefix_space": False},
)
QWEN25_TOKENIZER = PublishedTokenizer(
    head={
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": in_turn(split_by(QWEN_PATTERN), QWEN_BYTES),
        "post_processor": QWEN_BYTES,
        "decoder": QWEN_BYTES,
    },
    special=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"],
    unspecial=("<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    model=BPE_MODEL | {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
    config={"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False},
)
QWEN3_TOKENIZER = replace(
    QWEN25_TOKENIZER, merges="pairs", unspecial=("<tool_call>", "</tool_call>", "<think>")
)
BOS_AND_TEXT = [
    {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
]
BOS_AND_TEXTS = [
    *BOS_AND_TEXT,
    {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 1}},
    {"Sequence": {"id": "B", "type_id": 1}},
]
LLAMA3_CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|reserved_special_token_0|>' + message['role'] + '\n\n' + message['content'] + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|reserved_special_token_0|>assistant\n\n' }}{% endif %}"""
LLAMA3_TOKENIZER = PublishedTokenizer(
    head={
        "normalizer": None,
        "pre_tokenizer": in_turn(split_by(LLAMA3_PATTERN), BYTE_LEVEL | {"use_regex": False}),
        "post_processor": {
            "type": "Sequence",
            "processors": [
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
                | {"use_regex": True},
                # "special_tokens" is filled in by `build`, since it has numbers.
                {"type": "TemplateProcessing", "single": BOS_AND_TEXT, "pair": BOS_AND_TEXTS},
            ],
        },
        "decoder": BYTE_LEVEL_5 | {"add_prefix_space": True},
    },
    special=["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"],
    merges="all",
    model=BPE_MODEL | {"ignore_merges": True},
    config={
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "chat_template": LLAMA3_CHAT_TEMPLATE,
    },
)
STARCODER2_TOKENIZER = PublishedTokenizer(
    head=SMOLLM2_TOKENIZER.head,
    special=["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"],
    special_first=True,
    model=BPE_MODEL,
    config={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
)

# -- config.json and weights -----------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A model: its settings, and those that make it tiny."""

    config: JsonObject
    n_parameters: int
    """As published, with tied matrices counted once."""
    tiny: JsonObject
    tokenizer: PublishedTokenizer
    n_shards: int = 1

    def write(self, folder: Path, **changes: Any) -> None:
        """Write the tiny model as the authors' folder has it, with some settings changed."""
        import transformers

        folder.mkdir()
        config = self.config | self.tiny | changes
        config = {key: value for key, value in config.items() if value is not REMOVED}
        tokenizer = self.tokenizer.build(config["vocab_size"] - 3)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.tokenizer.config))
        hf_config = transformers.AutoConfig.from_pretrained(folder)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
        dtype = DTYPES[config.get("dtype") or config.get("torch_dtype") or "float32"]
        stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        if hf_config.tie_word_embeddings:
            del stored["lm_head.weight"]
        if config["model_type"] == "gpt2":  # published without the head's prefix, with masks
            stored = {name.removeprefix("transformer."): each for name, each in stored.items()}
            mask = torch.ones(1, 1, config["n_ctx"], config["n_ctx"]).tril()
            stored |= {f"h.{layer}.attn.bias": mask.clone() for layer in range(config["n_layer"])}
        self.write_tensors(folder, stored)

    def write_tensors(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write the tensors as one file, or as several with an index."""
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        if self.n_shards == 1:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            return
        weight_map: dict[str, str] = {}
        for shard in range(self.n_shards):
            file = f"model-{shard + 1:05}-of-{self.n_shards:05}.safetensors"
            names = list(tensors)[shard :: self.n_shards]
            save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


REMOVED = object()
N_TOKENS = 340  # of the tiny models; the tokenizers have fewer, as Qwen's do
SMALL = {"max_position_embeddings": 64, "vocab_size": N_TOKENS, "num_hidden_layers": 2}

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
# Of what neither transformers nor gptmini computes with, the settings above have all.
QWEN25_05B = {
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = QWEN25_05B | {
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
}
GPT2 = {
    "activation_function": "gelu_new",
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
LLAMA_32_1B = {
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B_01 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
PHI3_MINI_4K = {
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
STARCODER2_3B = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "use_bias": True,
    "vocab_size": 49152,
}


def size(d_model: int, d_ff: int, n_head: int, n_kv_head: int, **more: Any) -> JsonObject:
    """Tiny sizes of everything but GPT-2."""
    sizes = {"hidden_size": d_model, "intermediate_size": d_ff}
    heads = {"num_attention_heads": n_head, "num_key_value_heads": n_kv_head}
    return SMALL | sizes | heads | more


def gpt2_size(n_embd: int, n_head: int) -> JsonObject:
    return {
        "n_ctx": 64,
        "n_embd": n_embd,
        "n_head": n_head,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": N_TOKENS,
    }


# Tiny frequencies must turn in a tiny context, or nothing would tell one scaling from another.
TINY_SCALING = LLAMA_32_1B["rope_scaling"] | {"original_max_position_embeddings": 32}
AT_END = N_WORDS  # the number of the first special token, where they come last
ENDS = {"bos_token_id": AT_END, "eos_token_id": AT_END}
TINY_QWEN = ENDS | {"max_window_layers": 2}
TINY_LLAMA3 = {"bos_token_id": AT_END, "eos_token_id": AT_END + 1, "rope_scaling": TINY_SCALING}
SMOLLM2 = SMOLLM2_TOKENIZER
MODELS = {
    "SmolLM2-135M": Published(SMOLLM2_135M, 134_515_008, size(36, 96, 9, 3), SMOLLM2),
    "Qwen2.5-0.5B": Published(
        QWEN25_05B, 494_032_768, size(56, 152, 14, 2, **TINY_QWEN), QWEN25_TOKENIZER
    ),
    "Qwen3-0.6B": Published(
        QWEN3_06B, 596_049_920, size(32, 96, 4, 2, head_dim=16, **TINY_QWEN), QWEN3_TOKENIZER
    ),
    "GPT-2": Published(GPT2, 124_439_808, gpt2_size(48, 12) | ENDS, GPT2_TOKENIZER),
    "Llama-3.2-1B": Published(
        LLAMA_32_1B, 1_235_814_400, size(32, 96, 4, 2, head_dim=8, **TINY_LLAMA3), LLAMA3_TOKENIZER
    ),
    # This one and the next have SentencePiece tokenizers; here they get another.
    "Mistral-7B-v0.1": Published(
        MISTRAL_7B_01,
        7_241_732_096,
        size(32, 112, 4, 2, sliding_window=9, **ENDS),
        GPT2_TOKENIZER,
        n_shards=2,
    ),
    "Phi-3-mini-4k": Published(
        PHI3_MINI_4K,
        3_821_079_552,
        size(32, 88, 4, 2, sliding_window=9, pad_token_id=0, **ENDS),
        GPT2_TOKENIZER,
        n_shards=2,
    ),
    "StarCoder2-3B": Published(
        STARCODER2_3B, 3_030_371_328, size(48, 192, 6, 2, sliding_window=9), STARCODER2_TOKENIZER
    ),
}

# -- texts -----------------------------------------------------------------------------------------

PIECES = [
    *("It's", " we'LL", "I'M", " don't ", "the", "  the", "bananan", "Mondegano"),
    *("1", "42", "1234567", " 3.14", "٣٤", "Ⅷ½"),
    *(" ", "   ", "\n", "\n\n  ", "\r\n", "\t", "\u3000", "\u00a0", " \n ", "\x1c"),
    *("é", "e\u0301", "Straße", "中文字", "한국어", "かな", "עברית", "हिन्दी", "ﬁ"),
    *("😀", "👍🏽", "👨\u200d👩\u200d👧", "\U000e0041", "\ufeff", "\ufffd"),
    *("\x00", "\x04", "\x7f", "\x85", "<|endoftext|>", "<|im_end|>", "<tool", "_-/\\{}[]#!?…"),
]


def odd_texts(n_texts: int = 300) -> list[str]:
    """Texts that are hard to split, always the same."""
    draw = random.Random(3)
    texts = []
    for _ in range(n_texts):
        pieces = draw.choices(PIECES, k=draw.randrange(1, 7))
        pieces.append(chr(draw.randrange(1, 0xD800)) if draw.random() < 0.3 else "")
        texts.append("".join(pieces))
    return texts
