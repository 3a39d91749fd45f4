"""Convert tokenizers to and from tokenizer.json of Hugging Face, without their package.

Both sides split a text by a regular expression, then merge bytes in the order of the ranks. Their
files list merges; ours give a rank to each token. The two agree if ids rise in the order of the
merges and each token's last merge is the one that its own bytes lead to, which is checked.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gptmini.console import warn
from gptmini.errors import ConfigError, DataError, shorten
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import IMPORTED_KIND, BpeTokenizer, create_bpe_tokenizer
from gptmini.tokenizer.tokenizers import END_OF_TEXT, Tokenizer


class KnownPattern(NamedTuple):
    """How other programs write or name a word pattern of ours, with the same matches."""

    tokenizer_json: str  # without possessive quantifiers: ++ is a repeated repeat to that engine
    llama_cpp: str  # empty where llama.cpp has no such pattern


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+"
DIGITS_THEN_GPT2 = "each digit by itself, then GPT-2's"

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SMOLLM_PATTERN = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s"
LLAMA3_PATTERN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|\p{{N}}{{1,3}}+"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+{_SPACES}"
)
ANY_CHARACTER_PATTERN = r"[\s\S]"  # no merges beyond a character
# What gptmini learned with before it took Qwen2's.
FIRST_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,16}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,16}[\r\n]{0,16}"
    r"|\s{0,16}?[\r\n]|\s{1,16}(?!\S)|\s"
)

KNOWN_PATTERNS = {
    bpe.WORD_PATTERN: KnownPattern(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
        "qwen2",
    ),
    LLAMA3_PATTERN: KnownPattern(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
        "llama-bpe",
    ),
    GPT2_PATTERN: KnownPattern(
        rf"{_GPT2_WORDS}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+", "gpt-2"
    ),
    SMOLLM_PATTERN: KnownPattern(DIGITS_THEN_GPT2, "smollm"),
    ANY_CHARACTER_PATTERN: KnownPattern(ANY_CHARACTER_PATTERN, ""),
    FIRST_PATTERN: KnownPattern(FIRST_PATTERN, ""),
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


def get_vocabulary(tokenizer: Tokenizer) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """Return pattern, ranks and special tokens.

    ConfigError for a pattern that other programs may not have.
    """
    if tokenizer.kind == "ids":
        raise ConfigError("tokenizer.kind: ids has no texts, which other programs need")
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


def recover_merges(mergeable_ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Recover the merges behind the ranks, in order; tokens that no merge makes have none."""
    merges = []
    for token in sorted(mergeable_ranks, key=mergeable_ranks.__getitem__):
        parts = merge_below_rank(token, mergeable_ranks)
        if len(parts) == 2:
            merges.append((to_byte_level(parts[0]), to_byte_level(parts[1])))
    return merges


# -- writing ---------------------------------------------------------------------------------------


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Build the content of tokenizer.json."""
    pattern, ranks, special_tokens = get_vocabulary(tokenizer)
    vocab = {to_byte_level(token): number for token, number in ranks.items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _build_added_tokens(special_tokens, tokenizer.user_defined),
        "normalizer": None,
        "post_processor": _build_post_processor(tokenizer),
        "decoder": byte_level | {"use_regex": True},
        "pre_tokenizer": _build_pre_tokenizer(KNOWN_PATTERNS[pattern].tokenizer_json, byte_level),
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


def _build_post_processor(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Build the part that puts a special token before texts, as Llama 3 has it."""
    if not tokenizer.adds_bos:
        return None
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    bos = names[tokenizer.eos_token_id]
    first, second = (
        [{"SpecialToken": {"id": bos, "type_id": n}}, {"Sequence": {"id": text, "type_id": n}}]
        for n, text in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.eos_token_id], "tokens": [bos]}},
    }


def _build_added_tokens(
    special_tokens: dict[str, int], user_defined: Sequence[str]
) -> list[dict[str, Any]]:
    """List the special tokens; those that the user defined stay in texts that others decode."""
    return [
        {
            "id": number,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": name not in user_defined,
        }
        for name, number in _sort_by_number(special_tokens).items()
    ]


def _build_pre_tokenizer(pattern: str, byte_level: dict[str, Any]) -> dict[str, Any]:
    """Build the two steps that split a text: by words, then into bytes."""
    gpt2_after_digits = pattern == DIGITS_THEN_GPT2
    split: dict[str, Any]
    if gpt2_after_digits:
        split = {"type": "Digits", "individual_digits": True}
    else:
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    into_bytes = byte_level | {"use_regex": gpt2_after_digits}
    return {"type": "Sequence", "pretokenizers": [split, into_bytes]}


def _sort_by_number(special_tokens: dict[str, int]) -> dict[str, int]:
    return dict(sorted(special_tokens.items(), key=lambda item: item[1]))


# -- reading ---------------------------------------------------------------------------------------


def from_tokenizer_json(
    data: dict[str, Any],
    path: Path,
    vocab_size: int,
    end_tokens: Sequence[int | str | None] = (),
    bos_token: int | None = None,
    chat_template: str | None = None,
    template_tokens: dict[str, str] | None = None,
) -> Tokenizer:
    """Build a tokenizer from tokenizer.json; DataError, which names `path`, for other kinds.

    Unused numbers up to `vocab_size` become special tokens. `end_tokens`, numbers or names, end a
    text. The end-of-text token is the one that the tokenizer puts before texts, if it does that; or
    else `<|endoftext|>`, `bos_token` or the first of `end_tokens`. The last two may name tokens
    that are not special; these are ignored.
    """
    _check_model(data["model"], path)
    pattern = _find_pattern(data.get("pre_tokenizer") or {}, path)
    _check_normalizer(data.get("normalizer") or {}, path)
    added_bos = _find_added_bos(data.get("post_processor") or {}, path)
    ranks, special_tokens = _read_vocabulary(data, path, vocab_size)
    names: dict[int | str | None, str] = {}
    for name, number in special_tokens.items():
        names[number] = name
        names[name] = name
    end_names = [names[end] for end in end_tokens if end in names]
    if added_bos is not None and added_bos not in names:
        raise DataError(
            f"{path}: post_processor: {shorten(added_bos)} is not in added_tokens; restore the file"
        )
    preferred = (added_bos, END_OF_TEXT, bos_token)
    document_names = [names[each] for each in preferred if each in names]
    document_names += end_names
    if added_bos is not None and END_OF_TEXT in names:
        end_names.append(END_OF_TEXT)
    if not document_names:
        raise DataError(f"{path}: no token ends a document; add {END_OF_TEXT} to added_tokens")
    tokenizer = create_bpe_tokenizer(
        IMPORTED_KIND,
        pattern,
        ranks,
        special_tokens,
        document_names[0],
        end_names,
        chat_template,
        template_tokens,
        adds_bos=added_bos is not None,
        user_defined=[
            token["content"]
            for token in data.get("added_tokens") or []
            if not token.get("special", True)
        ],
    )
    unknown = data["model"].get("unk_token")
    if tokenizer.missing_bytes and unknown is not None:
        raise _unsupported(path, "model.unk_token", f"{unknown!r} for missing bytes, which")
    return tokenizer


def _check_model(model: dict[str, Any], path: Path) -> None:
    """DataError for anything but a byte-level BPE."""
    kind = model.get("type", "BPE")  # old files, such as GPT-2's, do not state it
    if kind == "Unigram" or model.get("byte_fallback"):
        raise _unsupported(path, "model", "a SentencePiece tokenizer")
    if kind != "BPE":
        raise _unsupported(path, "model.type", str(kind))
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _unsupported(path, f"model.{key}", repr(model[key]))


def _check_normalizer(normalizer: dict[str, Any], path: Path) -> None:
    """DataError for a normalizer that changes texts; a warning for NFC, which seldom does."""
    steps: list[dict[str, Any]] = [normalizer] if normalizer else []
    if normalizer.get("type") == "Sequence":
        steps = normalizer["normalizers"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["NFC"]:
        warn(f"{path}: normalizer: texts are not brought into NFC; do so yourself if they are not")
    elif kinds:
        raise _unsupported(path, "normalizer", " + ".join(map(str, kinds)))


def _find_added_bos(post_processor: dict[str, Any], path: Path) -> str | None:
    """Return the special token that is put before texts, as in Llama 3; warn of all others."""
    bos = None
    steps: list[dict[str, Any]] = [post_processor]
    if post_processor.get("type") == "Sequence":
        steps = post_processor["processors"]
    for step in steps:
        pieces = step["single"] if step.get("type") == "TemplateProcessing" else []
        special = [str(piece["SpecialToken"]["id"]) for piece in pieces if "SpecialToken" in piece]
        if pieces and "SpecialToken" in pieces[0]:
            bos = special.pop(0)
        for name in special:
            warn(
                f"{path}: post_processor: {shorten(name)} is not put around texts; write it there, "
                f"with --special"
            )
    return bos


def _read_vocabulary(
    data: dict[str, Any], path: Path, vocab_size: int
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Read the ranks and the special tokens, which fill the vocabulary up to its size."""
    special_tokens = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
    special_numbers = set(special_tokens.values())
    ranks: dict[bytes, int] = {}
    for token, number in data["model"]["vocab"].items():
        if number in special_numbers:
            continue
        if set(token) <= UNICODE_TO_BYTE.keys():
            ranks[from_byte_level(token)] = number
        else:
            special_tokens[token] = number
    _check_merges(data["model"], ranks, path)
    used = {*ranks.values(), *special_tokens.values()}
    if used and max(used) >= vocab_size:
        raise DataError(
            f"{path}: token {max(used)} is beyond the model's vocabulary of {vocab_size}; restore "
            f"the tokenizer of this model"
        )
    for number in range(vocab_size):
        if number not in used:
            special_tokens[f"<|unused_{number}|>"] = number
    return ranks, _sort_by_number(special_tokens)


def _check_merges(model: dict[str, Any], mergeable_ranks: dict[bytes, int], path: Path) -> None:
    """DataError if the merges do not give what the ranks give."""
    listed = set[tuple[bytes, bytes]]()
    last = -1
    for merge, left, right in _iter_merges(model, path):
        rank = mergeable_ranks.get(left + right)
        if rank is None:
            raise _make_merge_error(path, merge, "makes no token of the vocabulary")
        if rank < last:
            problem = f"not in the order of ids at {merge!r}, which"
            raise _unsupported(path, "model.merges", problem)
        last = rank
        listed.add((left, right))
    for token in mergeable_ranks:
        parts = merge_below_rank(token, mergeable_ranks)
        needs_no_merge = len(token) == 1 or (len(parts) > 2 and model.get("ignore_merges"))
        if not needs_no_merge and tuple(parts) not in listed:
            problem = f"none for token {to_byte_level(token)!r}, which"
            raise _unsupported(path, "model.merges", problem)


def _iter_merges(model: dict[str, Any], path: Path) -> Iterator[tuple[Any, bytes, bytes]]:
    """Yield each merge as it is written, "a b" or ["a", "b"], and the bytes of both halves."""
    for merge in model["merges"]:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(halves, list | tuple) or len(halves) != 2:
            raise _make_merge_error(path, merge, "is not a pair of tokens")
        try:
            left, right = map(from_byte_level, halves)
        except (KeyError, TypeError):
            raise _make_merge_error(path, merge, "is not written in GPT-2's characters") from None
        yield merge, left, right


def _make_merge_error(path: Path, merge: Any, problem: str) -> DataError:
    return DataError(f"{path}: model.merges: {shorten(repr(merge))} {problem}; restore the file")


def _find_pattern(pre_tokenizer: dict[str, Any], path: Path) -> str:
    """Find our pattern for a pre-tokenizer; DataError if there is none."""
    steps: list[dict[str, Any]] = [pre_tokenizer]
    if pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    last_step = steps[-1] if steps else {}
    kinds = [step.get("type") for step in steps]
    splits_as_gpt2 = last_step.get("use_regex", True)
    split = ""
    if kinds == ["ByteLevel"] and splits_as_gpt2:
        split = KNOWN_PATTERNS[GPT2_PATTERN].tokenizer_json
    elif kinds == ["Digits", "ByteLevel"] and splits_as_gpt2:
        split = DIGITS_THEN_GPT2 if steps[0].get("individual_digits") else ""
    elif kinds == ["Split", "ByteLevel"] and not splits_as_gpt2:
        words_stay_whole = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        split = steps[0]["pattern"].get("Regex", "") if words_stay_whole else ""
    ours = {known.tokenizer_json: pattern for pattern, known in KNOWN_PATTERNS.items()}
    if split not in ours or last_step.get("add_prefix_space"):
        raise _unsupported(path, "pre_tokenizer", split or " + ".join(map(str, kinds)) or "none")
    return ours[split]


def _unsupported(path: Path, key: str, value: str) -> DataError:
    return DataError(
        f"{path}: {key}: {shorten(value, 120)} is not supported; use a model with byte-level BPE, "
        f"as GPT-2, Llama 3, Qwen and SmolLM have"
    )
