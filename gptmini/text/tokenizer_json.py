"""tokenizer.json of Hugging Face from a tokenizer of ours, and back, without their package.

Both sides split a text by a regular expression, then merge bytes in the order of the ranks. Their
files list merges; ours give a rank to each token. The two agree if ids rise in the order of the
merges and each token's last merge is the one that its own bytes lead to, which is checked.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gptmini.console import warn
from gptmini.errors import ConfigError, DataError
from gptmini.text import bpe
from gptmini.text.tokenizer import DOCUMENT, IMPORTED, BpeTokenizer, Tokenizer, bpe_tokenizer

_QUOTES, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DIGITS = "each digit by itself, then GPT-2's"
# Our patterns: the equal one of tokenizer.json, which knows no possessive quantifiers (++ is a
# repeated repeat to its regex engine), and the name in llama.cpp.
PATTERNS = {
    bpe.PATTERN: (
        rf"{_QUOTES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
        "qwen2",
    ),
    rf"{_QUOTES}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|\p{{N}}{{1,3}}+"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+{_SPACES}": (
        rf"{_QUOTES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
        "llama-bpe",
    ),
    GPT2: (_WORDS + r"| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "gpt-2"),
    r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s": (
        DIGITS,
        "smollm",
    ),
    r"[\s\S]": (r"[\s\S]", ""),  # no merges beyond a character
    # What gptmini learned with before it took Qwen2's.
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,16}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,16}[\r\n]{0,16}"
    r"|\s{0,16}?[\r\n]|\s{1,16}(?!\S)|\s": (
        r"[^\r\n\p{L}\p{N}]?\p{L}{1,16}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,16}[\r\n]{0,16}"
        r"|\s{0,16}?[\r\n]|\s{1,16}(?!\S)|\s",
        "",
    ),
}
# GPT-2 writes bytes as characters: those that print as themselves, the others from 256 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
CHARACTERS = dict(zip(_PRINTED + _OTHERS, map(chr, [*_PRINTED, *range(256, 324)]), strict=True))
BYTES = {character: byte for byte, character in CHARACTERS.items()}


def spelled(token: bytes) -> str:
    """A token in GPT-2's characters."""
    return "".join(CHARACTERS[byte] for byte in token)


def unspelled(token: str) -> bytes:
    """Its bytes; KeyError for a token that is not spelled so."""
    return bytes(BYTES[character] for character in token)


def parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What a token's bytes merge to by the ranks below its own; two parts are its last merge."""
    limit = ranks[token]
    found = [token[place : place + 1] for place in range(len(token))]
    while len(found) > 1:
        joined = [ranks.get(left + right, limit) for left, right in pairwise(found)]
        rank = min(joined)
        if rank >= limit:
            break
        place = joined.index(rank)
        found[place : place + 2] = [found[place] + found[place + 1]]
    return found


def vocabulary(tokenizer: Tokenizer) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """Pattern, ranks and special tokens; ConfigError for a pattern that others may not have."""
    if not isinstance(tokenizer, BpeTokenizer):
        tokens = range(tokenizer.document_token)
        ranks = {tokenizer.token_bytes(token): token for token in tokens}
        return r"[\s\S]", ranks, tokenizer.special_tokens
    pattern = tokenizer.settings()["pattern"]
    if pattern not in PATTERNS:
        raise ConfigError(
            f"tokenizer.kind: {tokenizer.kind} splits words in a way that others may not share; "
            f"train with bpe, gpt2, char or byte"
        )
    return pattern, tokenizer.encoding._mergeable_ranks, tokenizer.special_tokens


def merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The merges of the ranks, in their order; tokens that no merge makes have none."""
    split = (parts(token, ranks) for token in sorted(ranks, key=ranks.__getitem__))
    return [(spelled(both[0]), spelled(both[1])) for both in split if len(both) == 2]


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json."""
    pattern, ranks, special = vocabulary(tokenizer)
    split: dict[str, Any] = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern][0]}}
    split |= {"behavior": "Isolated", "invert": False}
    if PATTERNS[pattern][0] == DIGITS:
        split = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": name, **flags, "special": True}
        for name, number in sorted(special.items(), key=lambda pair: pair[1])
    ]
    model: dict[str, Any] = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    model |= {"type": "BPE", "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    model["vocab"] = {spelled(token): number for token, number in ranks.items()} | special
    model["merges"] = merges(ranks)
    by_bytes = level | {"use_regex": PATTERNS[pattern][0] == DIGITS}
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        **{"normalizer": None, "post_processor": None, "decoder": level | {"use_regex": True}},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_bytes]},
        "model": model,
    }


def from_json(
    data: dict[str, Any],
    where: Path,
    vocab_size: int,
    ends: Sequence[int | str | None] = (),
    beginning: int | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of tokenizer.json; unused numbers up to `vocab_size` become special tokens.

    `ends`, numbers or names, are the tokens that end a text. The document token is `<|endoftext|>`
    or, without that, `beginning` or else the first of `ends`. What is not a special token is left
    out of both. DataError for tokenizers of another kind.
    """
    model = data["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise _refused(where, "model.type", f"{model['type']}, a SentencePiece tokenizer,")
    pattern = _pattern(data.get("pre_tokenizer") or {}, where)
    normalizer = data.get("normalizer") or {}
    if normalizer.get("type") == "NFC":
        warn(f"{where}: normalizer: texts are not brought into NFC; do so yourself if they are not")
    elif normalizer.get("normalizers") != [] and normalizer:
        raise _refused(where, "normalizer", str(normalizer.get("type")))
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(where, f"model.{key}", repr(model[key]))
    special = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
    added, ranks = set(special.values()), dict[bytes, int]()
    for token, number in model["vocab"].items():
        if number in added:
            continue
        if set(token) <= BYTES.keys():
            ranks[unspelled(token)] = number
        else:
            special[token] = number
    _check(model, ranks, where)
    used = {*ranks.values(), *special.values()}
    if used and max(used) >= vocab_size:
        raise DataError(
            f"{where}: token {max(used)} is beyond the model's vocabulary of {vocab_size}; restore "
            f"the tokenizer of this model"
        )
    special |= {f"<|unused_{n}|>": n for n in range(vocab_size) if n not in used}
    special = dict(sorted(special.items(), key=lambda item: item[1]))
    names: dict[int | str | None, str] = {number: name for name, number in special.items()}
    names |= {name: name for name in special}
    known_ends = [names[end] for end in ends if end in names]
    documents = [names[each] for each in (DOCUMENT, beginning, *known_ends) if each in names]
    if not documents:
        raise DataError(f"{where}: no token ends a document; add {DOCUMENT} to added_tokens")
    tokenizer = bpe_tokenizer(
        IMPORTED, pattern, ranks, special, documents[0], known_ends, chat_template
    )
    if tokenizer.missing_bytes and model.get("unk_token") is not None:
        raise _refused(where, "model.unk_token", f"{model['unk_token']!r} for missing bytes, which")
    return tokenizer


def _check(model: dict[str, Any], ranks: dict[bytes, int], where: Path) -> None:
    """DataError if the merges do not give what the ranks give."""
    listed = set[tuple[bytes, bytes]]()
    last = -1
    for merge in model["merges"]:
        left, right = map(unspelled, merge.split(" ") if isinstance(merge, str) else merge)
        if ranks[left + right] < last:
            raise _refused(where, "model.merges", f"not in the order of ids at {merge!r}, which")
        last = ranks[left + right]
        listed.add((left, right))
    for token in ranks:
        split = parts(token, ranks)
        single = len(token) == 1 or (len(split) > 2 and model.get("ignore_merges"))
        if not single and tuple(split) not in listed:
            raise _refused(where, "model.merges", f"none for token {spelled(token)!r}, which")


def _pattern(pre: dict[str, Any], where: Path) -> str:
    """Our pattern for a pre-tokenizer."""
    steps: list[dict[str, Any]] = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    level = steps[-1] if steps else {}
    names = [step.get("type") for step in steps]
    by_words = level.get("use_regex", True)  # the last step splits as GPT-2 does
    split = ""
    if names == ["ByteLevel"] and by_words:
        split = PATTERNS[GPT2][0]
    elif names == ["Digits", "ByteLevel"] and by_words and steps[0].get("individual_digits"):
        split = DIGITS
    elif names == ["Split", "ByteLevel"] and not by_words:
        alone = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        split = steps[0]["pattern"].get("Regex", "") if alone else ""
    known = {theirs: pattern for pattern, (theirs, _) in PATTERNS.items()}
    if split not in known or level.get("add_prefix_space"):
        raise _refused(where, "pre_tokenizer", split or " + ".join(map(str, names)) or "none")
    return known[split]


def _refused(where: Path, key: str, value: str) -> DataError:
    return DataError(
        f"{where}: {key}: {value} is not supported; use a model with byte-level BPE, as GPT-2, "
        f"Llama 3, Qwen and SmolLM have"
    )
