"""Makes a byte-pair encoding that model.js can run of somebody else's tokenizer, where it is one.

Its file may say much that model.js does not know: normalizers, flags of added tokens, other models
than byte pairs. What is left here is exact, and everything else is refused.
"""

from typing import Any

from gptmini.errors import DataError
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer, create_bpe_tokenizer
from gptmini.tokenizer.foreign import ForeignTokenizer
from gptmini.tokenizer.tokenizer_json import (
    GPT2_PATTERN,
    KNOWN_PATTERNS,
    build_pre_tokenizer,
    from_byte_level,
    recover_merges,
)
from gptmini.tokenizer.tokenizers import IMPORTED_KIND

JsonObject = dict[str, Any]
UNKNOWN_OF_ADDED_TOKENS = ("single_word", "lstrip", "rstrip")
UNKNOWN_OF_MODELS = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")


def simplify_tokenizer(tokenizer: ForeignTokenizer) -> BpeTokenizer:
    """Make the same tokenizer as a byte-pair encoding; DataError if it is something else."""
    content = tokenizer.read_parts()
    model = content["model"]
    special = tokenizer.special_tokens
    pattern = find_pattern(content["pre_tokenizer"] or {})
    is_plain = (
        model["type"] == "BPE"
        and content["normalizer"] is None
        and not any(model[key] for key in UNKNOWN_OF_MODELS)
        and all(token["content"] in special for token in content["added_tokens"])
        and not any(
            token[key] for token in content["added_tokens"] for key in UNKNOWN_OF_ADDED_TOKENS
        )
    )
    if pattern is None or not is_plain:
        raise make_error()
    names = {number: name for name, number in special.items()}
    try:
        ranks = {
            from_byte_level(text): number
            for text, number in model["vocab"].items()
            if text not in special
        }
        simple = create_bpe_tokenizer(
            IMPORTED_KIND,
            pattern,
            ranks,
            special,
            names[tokenizer.eos_token_id],
            [names[number] for number in tokenizer.end_tokens],
            tokenizer.chat_template,
            tokenizer.template_tokens,
            tokenizer.adds_bos,
        )
    except (KeyError, ValueError):  # a token that is no bytes, or a vocabulary that lacks some
        raise make_error() from None
    # In model.js the number of a token is the rank of its merge, and a word that is a token is it.
    merges = [tuple(merge) for merge in model["merges"]]
    n_made = sum(len(token) > 1 for token in ranks)
    if recover_merges(ranks) != merges or n_made != len(merges):
        raise make_error()
    return simple


def make_error() -> DataError:
    """Make the error for a tokenizer that model.js cannot run."""
    return DataError("tokenizer imported: a page cannot run it; use gptmini serve")


def find_pattern(pre_tokenizer: JsonObject) -> str | None:
    """Find the word pattern that splits texts as a pre-tokenizer does; None if there is none."""
    if strip(pre_tokenizer) == {"type": "ByteLevel"}:
        return GPT2_PATTERN
    for pattern, known in KNOWN_PATTERNS.items():
        if strip(pre_tokenizer) == strip(build_pre_tokenizer(known.tokenizer_json)):
            return pattern
    return None


def strip(step: JsonObject) -> JsonObject:
    """Leave out what has its default, and what says nothing of tokens."""
    defaults = {"use_regex": True, "invert": False, "add_prefix_space": False}
    left = {
        key: value
        for key, value in step.items()
        if key != "trim_offsets" and value != defaults.get(key, ...)
    }
    if "pretokenizers" in left:
        left["pretokenizers"] = [strip(each) for each in left["pretokenizers"]]
    return left
