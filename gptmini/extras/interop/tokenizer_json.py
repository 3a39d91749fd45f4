"""Writes our tokenizers as tokenizer.json of Hugging Face, without their package.

gptmini/tokenizer/foreign.py reads such files.
"""

from typing import Any

from gptmini.errors import ConfigError
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.byte_level import (
    ANY_CHARACTER_PATTERN,
    BYTE_LEVEL,
    KNOWN_PATTERNS,
    recover_merges,
    to_byte_level,
)
from gptmini.tokenizer.tokenizers import Tokenizer


def get_vocabulary(tokenizer: Tokenizer) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """Return pattern, ranks and special tokens.

    ConfigError for a pattern that other programs may not have.
    """
    if not isinstance(tokenizer, BpeTokenizer):
        tokens = range(tokenizer.eos_token_id)
        ranks = {tokenizer.decode_token(token): token for token in tokens}
        return ANY_CHARACTER_PATTERN, ranks, tokenizer.special_tokens
    pattern = tokenizer.encoding._pat_str
    if pattern not in KNOWN_PATTERNS:
        raise ConfigError(
            f"tokenizer.kind: {tokenizer.kind} splits words in a way that others may not share; "
            f"train with bpe, gpt2, char or byte"
        )
    return pattern, tokenizer.encoding._mergeable_ranks, tokenizer.special_tokens


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Build the content of tokenizer.json."""
    pattern, ranks, special_tokens = get_vocabulary(tokenizer)
    vocab = {to_byte_level(token): number for token, number in ranks.items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            build_added_token(number, name)
            for name, number in sorted(special_tokens.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "pre_tokenizer": KNOWN_PATTERNS[pattern].pre_tokenizer,
        "model": {
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab | special_tokens,
            "merges": recover_merges(ranks),
        },
    }


def build_post_processor(bos: str, number: int) -> dict[str, Any]:
    """Build the part that puts a special token before texts, as Llama 3 has it."""
    first, second = (
        [{"SpecialToken": {"id": bos, "type_id": n}}, {"Sequence": {"id": text, "type_id": n}}]
        for n, text in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }


def build_added_token(number: int, name: str, special: bool = True) -> dict[str, Any]:
    """Describe a token that is found in a text before the text is split."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": special}
