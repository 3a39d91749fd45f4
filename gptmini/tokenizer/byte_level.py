"""Byte-level encodings as other programs write them: characters of bytes, patterns, merges.

Both sides split a text by a regular expression, then merge bytes in the order of the ranks. Their
files list merges; ours give a rank to each token, whose last merge is the one that its own bytes
lead to.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from gptmini.tokenizer import bpe


class KnownPattern(NamedTuple):
    """How other programs split words where a pattern of ours does: with the same matches."""

    pre_tokenizer: dict[str, Any]  # of tokenizer.json
    llama_cpp: str  # its name there; empty where llama.cpp has no such pattern


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SMOLLM_PATTERN = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s"
LLAMA3_PATTERN = bpe.WORD_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}+|")  # up to three digits
ANY_CHARACTER_PATTERN = r"[\s\S]"  # no merges beyond a character
BYTE_LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
DIGITS = {"type": "Digits", "individual_digits": True}


def _split_by(pattern: str) -> dict[str, Any]:
    """Build the two steps that split a text: by words, then into bytes.

    Without possessive quantifiers, as ++ is a repeated repeat to that engine.
    """
    greedy = re.sub(r"([?+*]|\{1,3\})\+", r"\1", pattern)
    split = {"type": "Split", "pattern": {"Regex": greedy}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}


KNOWN_PATTERNS = {
    bpe.WORD_PATTERN: KnownPattern(_split_by(bpe.WORD_PATTERN), "qwen2"),
    LLAMA3_PATTERN: KnownPattern(_split_by(LLAMA3_PATTERN), "llama-bpe"),
    GPT2_PATTERN: KnownPattern(
        _split_by(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        "gpt-2",
    ),
    # Each digit by itself, then as GPT-2.
    SMOLLM_PATTERN: KnownPattern(
        {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}, "smollm"
    ),
    ANY_CHARACTER_PATTERN: KnownPattern(_split_by(ANY_CHARACTER_PATTERN), ""),
}

# GPT-2 writes a byte as one character: itself if that prints, else one from 256 on.
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
BYTE_TO_UNICODE = {byte: chr(byte) for byte in _PRINTABLE_BYTES}
BYTE_TO_UNICODE |= {byte: chr(256 + index) for index, byte in enumerate(_OTHER_BYTES)}
UNICODE_TO_BYTE = {character: byte for byte, character in BYTE_TO_UNICODE.items()}


def to_byte_level(token: bytes) -> str:
    """Write a token in GPT-2's characters."""
    return "".join(BYTE_TO_UNICODE[byte] for byte in token)


def from_byte_level(token: str) -> bytes:
    """Read the bytes of a token in GPT-2's characters; KeyError if it has others."""
    return bytes(UNICODE_TO_BYTE[character] for character in token)


def merge_below_rank(token: bytes, mergeable_ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge a token's bytes by the ranks below its own; two parts are its last merge."""
    limit = mergeable_ranks[token]
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        ranks = [mergeable_ranks.get(left + right, limit) for left, right in pairwise(parts)]
        lowest = min(ranks)
        if lowest >= limit:
            break
        place = ranks.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def recover_merges(mergeable_ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Recover the merges behind the ranks, in order; tokens that no merge makes have none."""
    merges = []
    for token in sorted(mergeable_ranks, key=mergeable_ranks.__getitem__):
        parts = merge_below_rank(token, mergeable_ranks)
        if len(parts) == 2:
            merges.append((to_byte_level(parts[0]), to_byte_level(parts[1])))
    return merges


def find_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Find the word pattern that splits texts as a pre-tokenizer does; None if there is none."""
    if pre_tokenizer is None:
        return None
    wanted = _strip(pre_tokenizer)
    if wanted == {"type": "ByteLevel"}:
        return GPT2_PATTERN
    for pattern, known in KNOWN_PATTERNS.items():
        if wanted == _strip(known.pre_tokenizer):
            return pattern
    return None


def _strip(step: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has its default, and what says nothing of tokens."""
    defaults = {"use_regex": True, "invert": False, "add_prefix_space": False}
    left = {
        key: value
        for key, value in step.items()
        if key != "trim_offsets" and value != defaults.get(key, ...)
    }
    if "pretokenizers" in left:
        left["pretokenizers"] = [_strip(each) for each in left["pretokenizers"]]
    return left
