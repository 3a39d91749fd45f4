"""The tokenizers of model.js give the tokens of Python's, on odd texts too."""

import json
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from gptmini.errors import DataError
from gptmini.extras.interop.tokenizer_json import build_added_token, build_post_processor
from gptmini.extras.page.export import build_page
from gptmini.tokenizer.bpe import learn_bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from gptmini.tokenizer.byte_level import KNOWN_PATTERNS
from gptmini.tokenizer.foreign import adopt_tokenizer
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
    if kind.startswith("chat of "):
        return create_tokenizer(kind.removeprefix("chat of "), 420, ODD, chat=True)
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
    "chat of byte",
    "chat of char",
    "missing bytes",
    "adopted",
    *(f"pattern {n}" for n in range(len(KNOWN_PATTERNS))),
]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_python(visit, kind):
    tokenizer = make(kind)
    tab = visit(build_page(random_run({"n_layer": 1}, tokenizer)))
    texts = odd_texts(300)
    shown = tab.evaluate("texts => texts.map(text => opened.tokenizer.encode(text))", texts)
    for text, tokens in zip(texts, shown, strict=True):
        assert tokens == tokenizer.encode(text).tolist(), repr(text)
    draw = random.Random(1)
    rows = [draw.choices(range(tokenizer.vocab_size), k=9) for _ in range(300)]
    decoded = tab.evaluate("rows => rows.map(tokens => opened.tokenizer.decode(tokens))", rows)
    assert decoded == [tokenizer.decode(row) for row in rows]
    with_bos = tab.evaluate("rows => rows.map(tokens => opened.tokenizer.addBos(tokens))", rows)
    assert with_bos == [tokenizer.add_bos(row) for row in rows]
    described = "[opened.tokenizer.vocabSize, opened.tokenizer.endTokens]"
    assert tab.evaluate(described) == [tokenizer.vocab_size, tokenizer.end_tokens]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalizer", {"type": "NFC"}),
        (
            "pre_tokenizer",
            {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
        ),
        ("pre_tokenizer", {"type": "Whitespace"}),
    ],
)
def test_what_changes_the_tokens_of_another_model_is_refused(key, value):
    content = write_tokenizer_json() | {key: value}
    ends = CHAT_TOKENIZER.end_tokens
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), CHAT_TOKENIZER.vocab_size, ends)
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(random_run({"n_layer": 1}, tokenizer))


def test_a_vocabulary_that_is_not_of_bytes_is_refused():
    content = write_tokenizer_json()
    content["model"]["vocab"] |= {"\u20ac": CHAT_TOKENIZER.vocab_size}
    ends = CHAT_TOKENIZER.end_tokens
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), CHAT_TOKENIZER.vocab_size + 1, ends)
    assert tokenizer.encode("ab").tolist() == CHAT_TOKENIZER.encode("ab").tolist()
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(random_run({"n_layer": 1}, tokenizer))


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
def test_a_special_token_that_takes_more_than_its_name_is_refused(flag):
    content = write_tokenizer_json()
    content["added_tokens"][1][flag] = True
    ends = CHAT_TOKENIZER.end_tokens
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), CHAT_TOKENIZER.vocab_size, ends)
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(random_run({"n_layer": 1}, tokenizer))


def test_merges_in_another_order_than_their_tokens_are_refused():
    content = write_tokenizer_json()
    merges = content["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    ends = CHAT_TOKENIZER.end_tokens
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), CHAT_TOKENIZER.vocab_size, ends)
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(random_run({"n_layer": 1}, tokenizer))


def test_a_token_that_no_merge_makes_is_refused():
    """The library never finds it, and model.js would."""
    content = write_tokenizer_json()
    content["model"]["merges"].pop()
    content["model"]["ignore_merges"] = False
    ends = CHAT_TOKENIZER.end_tokens
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), CHAT_TOKENIZER.vocab_size, ends)
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(random_run({"n_layer": 1}, tokenizer))


def test_the_tokenizer_of_another_model_is_refused_by_name():
    run = random_run({"n_layer": 1}, thinking_tokenizer())
    with pytest.raises(DataError, match="tokenizer imported: "):
        build_page(run)
