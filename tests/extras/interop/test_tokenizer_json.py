"""tokenizer.json against the package `tokenizers`: equal ids on texts that are hard to split."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from gptmini.errors import ConfigError
from gptmini.extras.interop.tokenizer_json import to_tokenizer_json
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer, create_bpe_tokenizer
from gptmini.tokenizer.byte_level import recover_merges, to_byte_level
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.samples import CHAT_TOKENIZER
from tests.support import gpt2, prose

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

TEXT = prose()
LEFT, RIGHT = "ab zé東\u00a0'1.\n", "\t\r!Z²٣\u017f👍\x1c\u2028\u0301"


def texts() -> list[str]:
    draw = random.Random(0)
    alphabet = LEFT + RIGHT + "the THE 0123456789   "
    made = ["".join(draw.choices(alphabet, k=draw.randrange(30))) for _ in range(400)]
    return [TEXT, "", *made, "<|endoftext|>", "don't I'LL", " " * 99 + "a", "é" * 99]


def theirs(data: dict[str, Any]) -> Any:
    there = tokenizers.Tokenizer.from_str(json.dumps(data))
    # A special token in a text is text, as it is here (split_special_tokens of transformers).
    there.encode_special_tokens = True
    return there


def learned() -> Tokenizer:
    ranks = bpe.learn_bpe([TEXT], 700)
    return create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, ranks, {"<|endoftext|>": len(ranks)})


OURS = {
    "byte": lambda: create_tokenizer("byte"),
    "char": lambda: create_tokenizer("char", None, ["é東👍" + TEXT]),
    "bpe": learned,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("kind", OURS)
def test_ours_gives_the_same_ids_there(kind):
    ours = OURS[kind]()
    there = theirs(to_tokenizer_json(ours))
    for text in texts():
        ids = ours.encode(text).tolist()
        assert there.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert there.decode(ids) == ours.decode(ids)


def test_of_equal_pairs_the_first_is_merged_first():
    """As tiktoken does; it matters in a longer word."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"aa": 256, b"aaa": 257}
    ours = create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, ranks, {"<|endoftext|>": 258})
    there = theirs(to_tokenizer_json(ours))
    for text in ("aaab", "aaaa", "baaaaab"):
        assert there.encode(text).ids == ours.encode(text).tolist()


def test_special_tokens_are_found_there_as_here():
    content = to_tokenizer_json(CHAT_TOKENIZER)
    there = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in ("a <|im_start|> b", "x<|im_end|>y", "<|im_end|><|im_start|>\n", "a\n<|im_end|>"):
        assert there.encode(text).ids == CHAT_TOKENIZER.encode_special(text).tolist(), text


def test_a_pattern_that_others_may_read_differently_is_refused(tiny_encoding):
    with pytest.raises(ConfigError, match="splits words in a way"):
        to_tokenizer_json(BpeTokenizer(tiny_encoding))


def test_the_last_merge_of_every_token_is_the_one_that_was_learned():
    ranks = bpe.learn_bpe([TEXT], 700)
    words = [bytes(map(ord, "ab")), *ranks]
    made = {left + right for left, right in recover_merges(ranks)}
    assert made == {to_byte_level(token) for token in ranks if len(token) > 1}
    assert all(ranks[a] < ranks[b] for a, b in pairwise(words[1:]))
