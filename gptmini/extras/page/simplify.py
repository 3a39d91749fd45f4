"""Describes somebody else's tokenizer as a byte-pair encoding for model.js, where it is one.

Its file may say much that model.js does not know: normalizers, flags of added tokens, other models
than byte pairs. What is left here is exact, and everything else is refused.
"""

import base64
from typing import Any

from gptmini.errors import DataError
from gptmini.tokenizer.byte_level import find_pattern, from_byte_level, recover_merges
from gptmini.tokenizer.foreign import ForeignTokenizer

UNKNOWN_OF_ADDED_TOKENS = ("single_word", "lstrip", "rstrip")
UNKNOWN_OF_MODELS = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")


def simplify_tokenizer(tokenizer: ForeignTokenizer) -> dict[str, Any]:
    """Describe the same tokenizer as a byte-pair encoding; DataError if it is something else.

    It may lack bytes, which model.js then leaves out of a text.
    """
    content = tokenizer.read_parts()
    model = content["model"]
    added = content["added_tokens"]
    special = tokenizer.special_tokens
    pattern = find_pattern(content["pre_tokenizer"])
    is_plain = (
        model["type"] == "BPE"
        and content["normalizer"] is None
        and not any(model[key] for key in UNKNOWN_OF_MODELS)
        and all(token["content"] in special for token in added)
        and not any(token[key] for token in added for key in UNKNOWN_OF_ADDED_TOKENS)
    )
    if pattern is None or not is_plain:
        raise make_error()
    plain = {text: number for text, number in model["vocab"].items() if text not in special}
    try:
        ranks = {from_byte_level(text): number for text, number in plain.items()}
    except KeyError:  # a token outside the alphabet that spells bytes
        raise make_error() from None
    # In model.js the number of a token is the rank of its merge, and a word that is a token is it.
    merges = [tuple(merge) for merge in model["merges"]]
    n_made = sum(len(token) > 1 for token in ranks)
    if recover_merges(ranks) != merges or n_made != len(merges):
        raise make_error()
    names = {number: name for name, number in special.items()}
    return {
        "kind": tokenizer.kind,
        "pattern": pattern,
        "special_tokens": special,
        "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks.items()},
        "document": names[tokenizer.eos_token_id],
        "ends": [names[number] for number in tokenizer.end_tokens],
        "adds_bos": tokenizer.adds_bos,
    }


def make_error() -> DataError:
    """Make the error for a tokenizer that model.js cannot run."""
    return DataError("tokenizer imported: a page cannot run it; use gptmini serve")
