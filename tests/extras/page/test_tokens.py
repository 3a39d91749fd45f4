"""The tokenizers of model.js give the tokens of Python's, on odd texts too."""

import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gptmini.errors import DataError
from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.extras.interop.tokenizer_json import build_added_token, build_post_processor
from gptmini.extras.page.export import build_page
from gptmini.tokenizer.bpe import learn_bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from gptmini.tokenizer.byte_level import KNOWN_PATTERNS
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import END_OF_TEXT, Tokenizer
from tests.extras.page.samples import random_run
from tests.samples import (
    CHAT_TOKENIZER,
    adopted_tokenizer,
    thinking_tokenizer,
    write_tokenizer_json,
)
from tests.support import prose

# What patterns treat differently, in ways that differ between engines of regular expressions.
ODD = [
    *("'s", "'S", "'\u017f", "'ll", "'LL", "'Re", "'t", "\u212a", "\u2019s", "don't"),
    *(" ", "  ", "\t", "\n", "\r\n", "\r", "\u0085", "\u00a0", "\ufeff", "\u3000", "\u2028"),
    *("\u180e", "\u200b", "\x1c", "\x00", "\x7f", "\x0b", "\x0c"),
    *("1", "23", "4567", "\u0663", "\u00bd", "\u2167", "\u4e00", "\U0001d7d8"),
    *("e\u0301", "\u0301", "\u200d", "\U0001f468\u200d\U0001f469", "\U0001f1e9", "\ufe0f"),
    *("\u01c5", "\u02b0", "\u05d0", "\u0e01\u0e33", "\u4e2d\u6587", "\U00020000", "\uac00"),
    *("!?", "...", "_", "<|endoftext|>", "<doc>", "</script>", "the", " the", "Dursley", "\ufffd"),
]


@cache
def assigned() -> list[str]:
    """All characters but surrogates and those that no version of Unicode may know."""
    characters = map(chr, range(0x30000))
    return [c for c in characters if unicodedata.category(c) not in ("Cs", "Cn", "Co")]


def odd_texts(count: int) -> list[str]:
    draw = random.Random(0)
    pools = [ODD, ODD, list("abc XYZ09.,\n"), assigned(), prose(200).split(" ")]
    texts = ["".join(ODD)]
    while len(texts) < count:
        text = [draw.choice(draw.choice(pools)) for _ in range(draw.randrange(12))]
        texts.append("".join(text))
    return texts


@cache
def ranks() -> dict[bytes, int]:
    return learn_bpe([prose(), "".join(ODD) * 3], 400)


def make(kind: str) -> Tokenizer:
    if kind in ("byte", "char", "bpe"):
        return create_tokenizer(kind, 420, [prose(), "".join(ODD) * 3])
    if kind == "chat":
        return create_tokenizer("char", 420, ODD, chat=True)
    if kind == "adopted":
        return adopted_tokenizer()
    if kind == "missing bytes":
        content = write_tokenizer_json(b"\x04\xe4\xff")
        content["post_processor"] = build_post_processor(END_OF_TEXT, 299)
        content["model"]["vocab"]["<|im_end|>x"] = 302
        content["added_tokens"].append(build_added_token(302, "<|im_end|>x"))
        return adopt_tokenizer(json.dumps(content), Path(), 303, CHAT_TOKENIZER.end_tokens)
    pattern = list(KNOWN_PATTERNS)[int(kind.removeprefix("pattern "))]
    return create_bpe_tokenizer("bpe", pattern, ranks(), {END_OF_TEXT: len(ranks())})


KINDS = [
    "byte",
    "char",
    "chat",
    "missing bytes",
    "adopted",
    *(f"pattern {n}" for n in range(len(KNOWN_PATTERNS))),
]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_python(visit, kind):
    tokenizer = make(kind)
    tab = visit(build_page(random_run({"n_layer": 1}, tokenizer)))
    texts = odd_texts(120)
    shown = tab.evaluate("texts => texts.map(text => opened.tokenizer.encode(text))", texts)
    for text, tokens in zip(texts, shown, strict=True):
        assert tokens == tokenizer.encode(text).tolist(), repr(text)
    draw = random.Random(1)
    rows = [draw.choices(range(tokenizer.vocab_size), k=9) for _ in range(120)]
    decoded = tab.evaluate("rows => rows.map(tokens => opened.tokenizer.decode(tokens))", rows)
    assert decoded == [tokenizer.decode(row) for row in rows]
    with_bos = tab.evaluate("rows => rows.map(tokens => opened.tokenizer.addBos(tokens))", rows)
    assert with_bos == [tokenizer.add_bos(row) for row in rows]
    described = "[opened.tokenizer.vocabSize, opened.tokenizer.endTokens]"
    assert tab.evaluate(described) == [tokenizer.vocab_size, tokenizer.end_tokens]


def with_token(text: str) -> Callable[[Any], object]:
    """Adds a token that no merge makes; the library finds it only as a whole word, if at all."""
    new = {text: CHAT_TOKENIZER.vocab_size}
    return lambda content: content["model"].update(
        vocab=content["model"]["vocab"] | new, ignore_merges=False
    )


SPACE_FIRST = {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
CHANGES: dict[str, Callable[[Any], object]] = {
    "a normalizer": lambda content: content.update(normalizer={"type": "NFC"}),
    "a space before each text": lambda content: content.update(
        pre_tokenizer={"type": "ByteLevel"} | SPACE_FIRST
    ),
    "other words": lambda content: content.update(pre_tokenizer={"type": "Whitespace"}),
    "merges in another order": lambda content: content["model"]["merges"].reverse(),
    "a token that no merge makes": with_token("qqq"),
    "a token that is not of bytes": with_token("\u20ac"),
    **{
        flag: lambda content, flag=flag: content["added_tokens"][1].update({flag: True})
        for flag in ("single_word", "lstrip", "rstrip")
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_tokens_of_another_model_is_refused(name):
    content = write_tokenizer_json()
    CHANGES[name](content)
    size, ends = CHAT_TOKENIZER.vocab_size + 1, CHAT_TOKENIZER.end_tokens
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), size, ends)
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(random_run({"n_layer": 1}, tokenizer))


def test_the_tokenizer_of_another_model_is_refused_by_name():
    run = random_run({"n_layer": 1}, thinking_tokenizer())
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(run)
