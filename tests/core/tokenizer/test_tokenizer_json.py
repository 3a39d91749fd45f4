"""tokenizer.json against the package `tokenizers`: equal ids on texts that are hard to split."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptmini.errors import ConfigError, DataError
from gptmini.tokenizer import bpe, tokenizer_json
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer, create_bpe_tokenizer
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.support import gpt2, prose

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

TEXT = prose()
WHERE = Path("tokenizer.json")
LEFT, RIGHT = "ab zé東\u00a0'1.\n", "\t\r!Z²٣\u017f👍\x1c\u2028\u0301"
QWEN2 = tokenizer_json.KNOWN_PATTERNS[bpe.WORD_PATTERN][0]
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
OLD = next(reversed(tokenizer_json.KNOWN_PATTERNS))


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


def learned(pattern: str = bpe.WORD_PATTERN) -> Tokenizer:
    ranks = bpe.learn_bpe([TEXT], 700)
    return create_bpe_tokenizer("bpe", pattern, ranks, {"<|endoftext|>": len(ranks)})


OURS = {
    "byte": lambda: create_tokenizer("byte"),
    "char": lambda: create_tokenizer("char", None, ["é東👍" + TEXT]),
    "bpe": learned,
    "bpe of old runs": lambda: learned(OLD),
    "gpt2": gpt2,
}


@pytest.mark.parametrize("kind", OURS)
def test_ours_gives_the_same_ids_there_and_back(kind):
    ours = OURS[kind]()
    data = tokenizer_json.to_tokenizer_json(ours)
    there = theirs(data)
    back = tokenizer_json.from_tokenizer_json(data, WHERE, ours.vocab_size, [])
    assert back.eos_token_id == ours.eos_token_id
    for text in texts():
        ids = ours.encode(text).tolist()
        assert there.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert back.encode(text).tolist() == ids, repr(text)
        assert there.decode(ids) == ours.decode(ids)


PRE = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM2": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "Llama 3": lambda: split(LLAMA3),
    "Qwen2": lambda: split(QWEN2),
}


def split(pattern: str) -> Any:
    """A split by a regular expression, then bytes."""
    by_words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_words, pre_tokenizers.ByteLevel(False, use_regex=False)])


def trained(style: str = "GPT-2", **model: Any) -> Any:
    """A tokenizer learned by their trainer."""
    there = tokenizers.Tokenizer(models.BPE(**model))
    there.pre_tokenizer, there.decoder = PRE[style](), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|endoftext|>", "<pad>"], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=800, show_progress=False, **options)
    there.train_from_iterator([TEXT, LEFT * 9, RIGHT * 9, "a   1  \n" * 99], trainer)
    there.encode_special_tokens = True  # a special token in a text is text, as it is here
    return there


def imported(there: Any, vocab_size: int = 800, ends: list[int] | None = None) -> Tokenizer:
    return tokenizer_json.from_tokenizer_json(
        json.loads(there.to_str()), WHERE, vocab_size, ends or []
    )


@pytest.mark.parametrize("style", PRE)
def test_theirs_gives_the_same_ids_here(style):
    there = trained(style)
    ours = imported(there)
    assert ours.eos_token_id == there.token_to_id("<|endoftext|>")
    for text in texts():
        assert ours.encode(text).tolist() == there.encode(text).ids, repr(text)


STYLES = {style: (trained(style), imported(trained(style))) for style in PRE}


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(PRE)),
    st.text(st.sampled_from(LEFT + RIGHT) | st.characters(), max_size=20),
)
def test_theirs_gives_the_same_ids_here_for_any_text(style, text):
    there, ours = STYLES[style]
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert ours.encode(text).tolist() == there.encode(text).ids


def test_llama_3_lists_every_pair_that_makes_a_token():
    there = trained("Llama 3")
    data = json.loads(there.to_str())
    vocab = data["model"]["vocab"]
    pairs = [
        (number, (token[:cut], token[cut:]))
        for token, number in sorted(vocab.items(), key=lambda item: item[1])
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab and token != "<pad>"
    ]
    data["model"] |= {"merges": [list(pair) for _, pair in pairs], "ignore_merges": True}
    assert len(pairs) > 600
    there, ours = theirs(data), tokenizer_json.from_tokenizer_json(data, WHERE, 800, [])
    for text in texts()[:200]:
        assert ours.encode(text).tolist() == there.encode(text).ids, repr(text)


# Control characters, and bytes that only characters of planes 4 to 11 and no characters have: as in
# the vocabulary of SmolLM2.
MISSING = bytes([4, 6, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])
DROPPED = "\x04\x06\U00040000\U000bffff"


def without(style: str, missing: bytes = MISSING) -> dict[str, Any]:
    """A tokenizer.json learned by their trainer whose vocabulary lacks some bytes."""
    data = json.loads(trained(style).to_str())
    vocab, dropped = data["model"]["vocab"], tokenizer_json.to_byte_level(missing)
    data["model"]["vocab"] = {t: n for t, n in vocab.items() if t not in dropped}
    return data


PARTIAL = {
    style: (theirs(without(style)), tokenizer_json.from_tokenizer_json(without(style), WHERE, 800))
    for style in PRE
}


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(PRE)),
    st.text(st.sampled_from(LEFT + RIGHT + "!!..,," + 3 * DROPPED) | st.characters(), max_size=20),
)
@example("GPT-2", "<|endoftext|>")
def test_bytes_without_a_token_are_dropped_as_theirs_are(style, text):
    there, ours = PARTIAL[style]
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert ours.encode(text).tolist() == there.encode(text).ids


@pytest.mark.parametrize("style", PRE)
def test_a_vocabulary_without_some_bytes_is_kept_and_goes_back(style, tmp_path):
    there, ours = PARTIAL[style]
    assert ours.missing_bytes == MISSING
    # Words are split where the byte is, then merged as if it were not there.
    assert ours.encode("!\x04!").tolist() == there.encode("!\x04!").ids
    assert ours.encode(DROPPED[:2]).tolist() == []
    (tmp_path / "t.json").write_text(ours.to_json())
    again = theirs(tokenizer_json.to_tokenizer_json(ours))
    kept = load_tokenizer(tmp_path / "t.json")
    for text in [*texts()[1:200], TEXT + DROPPED + TEXT, "a\x04 b \x06c \U00040000 d"]:
        ids = there.encode(text).ids
        assert ours.encode(text).tolist() == ids, repr(text)
        assert kept.encode(text).tolist() == ids, repr(text)
        assert again.encode(text).ids == ids, repr(text)


def test_a_missing_byte_that_a_token_is_made_of_or_that_becomes_unknown_is_refused():
    data = without("GPT-2")
    data["model"]["unk_token"] = "<pad>"
    with pytest.raises(DataError, match=r"model.unk_token: '<pad>' for missing bytes, which"):
        tokenizer_json.from_tokenizer_json(data, WHERE, 800)
    whole = json.loads(trained().to_str())
    whole["model"]["unk_token"] = "<pad>"  # of no use, as every byte has a token
    assert tokenizer_json.from_tokenizer_json(whole, WHERE, 800).missing_bytes == b""
    with pytest.raises(ValueError, match="byte 97 has no rank"):
        tokenizer_json.from_tokenizer_json(without("GPT-2", b"a"), WHERE, 800)


def test_every_special_token_that_ends_a_text_is_known():
    data = json.loads(trained().to_str())
    data["added_tokens"].append(data["added_tokens"][0] | {"id": 800, "content": "<|im_end|>"})
    ours = tokenizer_json.from_tokenizer_json(
        data, WHERE, 801, ["<|im_end|>", 1, 800, None, 700], 1
    )
    assert ours.special_tokens == {"<|endoftext|>": 0, "<pad>": 1, "<|im_end|>": 800}
    # The end-of-text token ends a text in any case; 700 is an ordinary token.
    assert (ours.eos_token_id, ours.end_tokens) == (0, [800, 1, 0])


def test_an_eos_token_of_another_name_keeps_it_and_unused_numbers_are_special(tmp_path):
    there = trained()
    data = json.loads(there.to_str())
    data["added_tokens"][0]["content"] = "<s>"
    data["model"]["vocab"]["<s>"] = data["model"]["vocab"].pop("<|endoftext|>")
    ours = tokenizer_json.from_tokenizer_json(data, WHERE, 810, [1], 0)
    assert isinstance(ours, BpeTokenizer)
    assert (ours.eos_token_id, ours.vocab_size, ours.end_tokens) == (0, 810, [1, 0])
    assert ours.special_tokens["<s>"] == 0
    assert tokenizer_json.from_tokenizer_json(data, WHERE, 810, [1]).eos_token_id == 1
    (tmp_path / "t.json").write_text(ours.to_json())
    assert load_tokenizer(tmp_path / "t.json").eos_token_id == 0
    assert ours.encode("<s><|unused_805|>").max() < 800
    assert [ours.decode_token(token) for token in (0, 1)] == [b"", b"<pad>"]
    assert ours.compute_byte_lengths()[[0, 1]].tolist() == [0, 0]  # no text encodes to them
    with pytest.raises(DataError, match="no token ends a document"):
        tokenizer_json.from_tokenizer_json(data, WHERE, 800, [700])


def refusals() -> dict[str, tuple[Any, str]]:
    """Changes to a tokenizer.json that works, and the key that is named for each."""
    return {
        "unigram": (lambda d: d["model"].update(type="Unigram"), "model: a SentencePiece"),
        "fallback": (lambda d: d["model"].update(byte_fallback=True), "model: a SentencePiece"),
        "words": (lambda d: d["model"].update(type="WordLevel"), "model.type: WordLevel is not"),
        "metaspace": (
            lambda d: d.update(pre_tokenizer={"type": "Metaspace"}),
            "pre_tokenizer: Met",
        ),
        "no split": (lambda d: d.update(pre_tokenizer=None), "pre_tokenizer: "),
        "prefix": (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "pre_tokenizer"),
        "normalizer": (
            lambda d: d.update(normalizer={"type": "Lowercase"}),
            "normalizer: Lowercase",
        ),
        "normalizers": (
            lambda d: d.update(
                normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}
            ),
            "normalizer: NFC + Strip",
        ),
        "suffix": (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        "order": (
            lambda d: d["model"]["merges"].reverse(),
            "model.merges: not in the order of ids",
        ),
        "missing merge": (lambda d: d["model"]["merges"].pop(), "model.merges: none for"),
        "missing token": (
            lambda d: d["model"]["vocab"].pop("".join(d["model"]["merges"][0])),
            "makes no token of the vocabulary; restore",
        ),
        "half a merge": (
            lambda d: d["model"]["merges"].append("abc"),
            "model.merges: 'abc' is not a pair of tokens; restore",
        ),
        "merge of numbers": (
            lambda d: d["model"]["merges"].append([1, 2]),
            "model.merges: [1, 2] is not written in GPT-2's characters; restore",
        ),
        "merge of other characters": (
            lambda d: d["model"]["merges"].append("中 a"),
            "model.merges: '中 a' is not written in GPT-2's characters; restore",
        ),
    }


@pytest.mark.parametrize(
    ("style", "step", "change"),
    [
        ("Qwen2", 0, {"invert": True}),
        ("Qwen2", 0, {"behavior": "Removed"}),
        ("Qwen2", 0, {"pattern": {"Regex": "a+"}}),
        ("Qwen2", 1, {"use_regex": True}),
        ("SmolLM2", 0, {"individual_digits": False}),
        ("SmolLM2", 1, {"use_regex": False}),
    ],
)
def test_a_split_that_we_do_not_know_is_refused(style, step, change):
    data = json.loads(trained(style).to_str())
    data["pre_tokenizer"]["pretokenizers"][step] |= change
    with pytest.raises(DataError, match=r"pre_tokenizer: .* is not supported"):
        tokenizer_json.from_tokenizer_json(data, WHERE, 800, [])


@pytest.mark.parametrize("case", refusals())
def test_what_we_would_split_otherwise_is_refused(case):
    data = json.loads(trained().to_str())
    change, named = refusals()[case]
    change(data)
    with pytest.raises(DataError, match=r"tokenizer\.json: ") as error:
        tokenizer_json.from_tokenizer_json(data, WHERE, 800, [])
    assert named in str(error.value)


def test_a_tokenizer_larger_than_the_model_is_refused():
    there = trained()
    for size in (790, 799):
        with pytest.raises(DataError, match=f"token 799 is beyond the model's .* of {size}"):
            imported(there, size)


@pytest.mark.parametrize(
    "normalizer", [{"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}]
)
def test_nfc_is_announced(normalizer, capfd):
    data = json.loads(trained().to_str()) | {"normalizer": normalizer}
    tokenizer_json.from_tokenizer_json(data, WHERE, 800, [])
    assert "not brought into NFC" in capfd.readouterr().err


def test_a_pattern_that_others_may_read_differently_is_refused(tiny_encoding):
    with pytest.raises(ConfigError, match="splits words in a way"):
        tokenizer_json.to_tokenizer_json(BpeTokenizer(tiny_encoding))


def test_the_last_merge_of_every_token_is_the_one_that_was_learned():
    ranks = bpe.learn_bpe([TEXT], 700)
    words = [bytes(map(ord, "ab")), *ranks]
    made = {left + right for left, right in tokenizer_json.recover_merges(ranks)}
    assert made == {tokenizer_json.to_byte_level(token) for token in ranks if len(token) > 1}
    assert all(ranks[a] < ranks[b] for a, b in pairwise(words[1:]))
