"""Tokenizers in GGUF, both ways: byte-level BPE and SentencePiece's, as llama.cpp knows them.

A file of GGUF has the tokens, their types, and what orders the merges; llama.cpp knows the rest by
a name. So reading builds the tokenizer.json that says it all, and writing looks for the name.
"""

import json
from pathlib import Path
from typing import Any

from gptmini.errors import ConfigError
from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.extras.interop.architectures import make_unsupported_error
from gptmini.extras.interop.tokenizer_json import (
    build_added_token,
    build_post_processor,
    get_vocabulary,
    to_tokenizer_json,
)
from gptmini.tokenizer.byte_level import BYTE_LEVEL, KNOWN_PATTERNS, find_pattern, to_byte_level
from gptmini.tokenizer.foreign import BYTE_NAME, SPACE, ForeignTokenizer
from gptmini.tokenizer.tokenizers import CharTokenizer, Tokenizer

JsonObject = dict[str, Any]
# Special tokens that a chat template may name, and the keys of their numbers.
TEMPLATE_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as llama.cpp spells it
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
# Types of tokens in llama.cpp.
NORMAL_TOKEN = 1
UNKNOWN_TOKEN = 2
CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4
BYTE_TOKEN = 6
# Names of patterns that llama.cpp spells in more than one way.
PATTERN_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "starcoder": "smollm",
    "command-r": "smollm",
}
REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
RESTORE_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}


# -- writing ---------------------------------------------------------------------------------------


def check_supported(tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a tokenizer that llama.cpp does not have."""
    if isinstance(tokenizer, CharTokenizer):
        if SPACE in tokenizer.characters:
            raise ConfigError("tokenizer: has U+2581, llama.cpp's space; train with bpe or byte")
        return
    if isinstance(tokenizer, ForeignTokenizer):
        content = tokenizer.read_parts()
        # Metaspace puts no space before a text that begins with one; llama.cpp does.
        kind = (content["pre_tokenizer"] or {}).get("type")
        is_known = bool(_find_pattern_name(content))
        if content["model"].get("byte_fallback"):
            is_known = kind != "Metaspace"
    else:
        pattern, _, _ = get_vocabulary(tokenizer)
        llama_cpp_name = KNOWN_PATTERNS[pattern].llama_cpp
        is_known = bool(llama_cpp_name) or tokenizer.kind == "byte"
    if not is_known:
        raise ConfigError(
            f"tokenizer.kind: {tokenizer.kind} splits words in a way that llama.cpp does not know; "
            f"use --to hf, or train with bpe"
        )


def write_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """Add the vocabulary, its merges and the special tokens to the metadata."""
    if isinstance(tokenizer, CharTokenizer):
        tokens = _write_characters(writer, tokenizer)
    else:
        tokens = _write_pairs(writer, tokenizer)
    for name, number in tokenizer.special_tokens.items():
        tokens.setdefault(number, (name, CONTROL_TOKEN))
    for number in range(tokenizer.vocab_size):  # gaps in some vocabularies
        tokens.setdefault(number, (f"<|unused_{number}|>", CONTROL_TOKEN))
    texts, types = zip(*(tokens[number] for number in range(tokenizer.vocab_size)), strict=True)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.end_tokens[0])
    if len(tokenizer.end_tokens) > 1:
        writer.add_eot_token_id(tokenizer.end_tokens[1])
    if len(tokenizer.end_tokens) > 2:
        writer.add_eom_token_id(tokenizer.end_tokens[2])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
        for use, name in tokenizer.template_tokens.items():
            is_written = use in ("bos_token", "eos_token")
            if use in TEMPLATE_TOKENS and not is_written and name in tokenizer.special_tokens:
                key = f"tokenizer.ggml.{TEMPLATE_TOKENS[use]}"
                writer.add_uint32(key, tokenizer.special_tokens[name])
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_eos_token(False)


Spelled = dict[int, tuple[str, int]]  # text and type of each token


def _write_characters(writer: Any, tokenizer: CharTokenizer) -> Spelled:
    """Add a vocabulary as SentencePiece has it: characters, or else bytes."""
    _add_sentencepiece(writer, [0.0] * tokenizer.vocab_size, False)
    tokens = {byte: (f"<0x{byte:02X}>", BYTE_TOKEN) for byte in range(256)}
    tokens[ord(" ")] = (SPACE, NORMAL_TOKEN)
    for number, character in enumerate(tokenizer.characters, 256):
        tokens[number] = (character, NORMAL_TOKEN)
    return tokens


def _write_pairs(writer: Any, tokenizer: Tokenizer) -> Spelled:
    """Add what the tokenizer.json of a byte-pair encoding says."""
    if isinstance(tokenizer, ForeignTokenizer):
        content = tokenizer.read_parts()
    else:
        content = to_tokenizer_json(tokenizer)
    model = content["model"]
    merges = model["merges"]
    if model["byte_fallback"]:
        assert isinstance(tokenizer, ForeignTokenizer)  # ours have no such thing
        scores = [0.0] * tokenizer.vocab_size
        for rank, (left, right) in reversed([*enumerate(merges)]):  # the first merge counts
            scores[model["vocab"][left + right]] = -float(rank)
        _add_sentencepiece(writer, scores, tokenizer.drops_first_space)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_find_pattern_name(content) or "gpt-2")
        # llama.cpp refuses an empty list. This merge never happens, as no pattern puts a letter
        # and a space after it into one word.
        merges = merges or [("a", to_byte_level(b" "))]
        writer.add_token_merges([f"{left} {right}" for left, right in merges])
    tokens = {number: (text, NORMAL_TOKEN) for text, number in model["vocab"].items()}
    if model["byte_fallback"]:
        for number, (text, _) in tokens.items():
            if BYTE_NAME.fullmatch(text):
                tokens[number] = (text, BYTE_TOKEN)
    for token in content["added_tokens"]:
        kind = CONTROL_TOKEN if token["special"] else USER_DEFINED_TOKEN
        is_unknown = token["content"] == model.get("unk_token")
        tokens[token["id"]] = (token["content"], UNKNOWN_TOKEN if is_unknown else kind)
    return tokens


def _add_sentencepiece(writer: Any, scores: list[float], begins_with_space: bool) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(begins_with_space)


def _find_pattern_name(content: JsonObject) -> str:
    """Return llama.cpp's name for the way in which words are split, empty if it has none."""
    pattern = find_pattern(content["pre_tokenizer"])
    return "" if pattern is None else KNOWN_PATTERNS[pattern].llama_cpp


# -- reading ---------------------------------------------------------------------------------------


def read_tokenizer(metadata: JsonObject, path: Path) -> Tokenizer:
    """Read the tokenizer; CheckpointError for one of another kind."""
    texts = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    numbers = {text: number for number, text in enumerate(texts)}
    model = metadata["tokenizer.ggml.model"]
    added_types = {CONTROL_TOKEN, USER_DEFINED_TOKEN, UNKNOWN_TOKEN}
    content: JsonObject = {
        "added_tokens": [
            build_added_token(number, text, types[number] != USER_DEFINED_TOKEN)
            for text, number in numbers.items()
            if types[number] in added_types
        ]
    }
    if model == "llama":
        content |= _build_sentencepiece(metadata, numbers)
    elif model == "gpt2":
        content |= _build_byte_level(metadata, numbers, path)
    else:
        raise make_unsupported_error(path, "tokenizer.ggml.model", model)

    def find_token(key: str) -> int | None:
        """Return the number of a special token, None if the vocabulary has no such token."""
        number = metadata.get(f"tokenizer.ggml.{key}", -1)
        return number if 0 <= number < len(texts) else None

    bos_token = find_token("bos_token_id")
    # Like llama.cpp, where the file does not say.
    adds_bos = model == "llama" or _get_pattern_name(metadata) == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos_token is not None:
        content["post_processor"] = build_post_processor(texts[bos_token], bos_token)
    template_tokens = {
        use: texts[number]
        for use, key in TEMPLATE_TOKENS.items()
        if (number := find_token(key)) is not None
    }
    return adopt_tokenizer(
        json.dumps(content, ensure_ascii=False),
        path,
        len(texts),
        [find_token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")],
        bos_token,
        metadata.get("tokenizer.chat_template"),
        template_tokens,
    )


def _get_pattern_name(metadata: JsonObject) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", "missing"))
    return PATTERN_ALIASES.get(name, name)


def _build_byte_level(metadata: JsonObject, numbers: dict[str, int], path: Path) -> JsonObject:
    """Build the parts of tokenizer.json that follow from the name of the pattern."""
    pre_tokenizers = {name: steps for steps, name in KNOWN_PATTERNS.values() if name}
    name = _get_pattern_name(metadata)
    if name not in pre_tokenizers:
        raise make_unsupported_error(path, "tokenizer.ggml.pre", name)
    merges = [
        merge
        for merge in metadata["tokenizer.ggml.merges"]
        if merge.replace(" ", "") in numbers  # not the one that stands for an empty list
    ]
    return {
        "pre_tokenizer": pre_tokenizers[name],
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": name == "llama-bpe",
            "vocab": numbers,
            "merges": merges,
        },
    }


def _build_sentencepiece(metadata: JsonObject, numbers: dict[str, int]) -> JsonObject:
    """Build the parts of tokenizer.json for tokens whose scores order the merges."""
    scores = metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    normal = {text: number for text, number in numbers.items() if types[number] == NORMAL_TOKEN}
    merges = [
        (text[:place], text[place:])
        for text in sorted(normal, key=lambda text: -scores[normal[text]])
        for place in range(1, len(text))
        if text[:place] in normal and text[place:] in normal
    ]
    unknown = [text for text, number in numbers.items() if types[number] == UNKNOWN_TOKEN]
    before = []
    after: list[JsonObject] = [RESTORE_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        before = [{"type": "Prepend", "prepend": SPACE}]
        after += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, REPLACE_SPACES]},
        "decoder": {"type": "Sequence", "decoders": after},
        "model": {
            "type": "BPE",
            "unk_token": unknown[0] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": numbers,
            "merges": merges,
        },
    }
