from collections import Counter
from itertools import pairwise

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from gptmini.tokenizer import bpe
from tests.support import prose


def learn_slowly(text: str, vocab_size: int) -> dict[bytes, int]:
    """The definition: count all pairs anew, join the most frequent, smaller pairs first."""
    words = [list(word.encode()) for word in regex.findall(bpe.WORD_PATTERN, text)]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < vocab_size:
        counts = Counter(pair for word in words for pair in pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if pair is None or counts[pair] < 2:
            break
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == pair:
                    word[at : at + 2] = [len(tokens)]
                at += 1
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
    return {token: rank for rank, token in enumerate(tokens)}


@given(st.text(st.sampled_from("ab é\n1東"), max_size=300))
def test_it_learns_the_same_as_the_definition(text):
    assert bpe.learn_bpe([text], 280) == learn_slowly(text, 280)


def test_pairs_that_lose_occurrences_keep_their_turn():
    """Which short texts have too few of."""
    text = prose(400)
    assert bpe.learn_bpe([text], 500) == learn_slowly(text, 500)


def test_texts_are_counted_together():
    assert bpe.learn_bpe(["ab ab", " ab cd", " cd"], 300) == bpe.learn_bpe(["ab ab ab cd cd"], 300)


def test_nothing_is_learned_from_nothing():
    assert len(bpe.learn_bpe([], 5000)) == len(bpe.learn_bpe(["abcdefg"], 5000)) == 256


def test_frequent_words_are_kept_when_not_all_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "MAX_DISTINCT_WORD_BYTES", 3)
    ranks = bpe.learn_bpe(["the " * 9 + "some other words that are seldom and seldom"], 300)
    assert b" the" in ranks
    assert b"seldom" not in ranks


@given(st.text(max_size=100))
def test_words_cover_the_text(text):
    assert "".join(regex.findall(bpe.WORD_PATTERN, text)) == text


@given(st.text(st.sampled_from("ab S1'\n\r\t!é東\x1c\x85\u00a0\u2028\u017f\u0663²"), max_size=30))
def test_words_are_those_of_qwen2(text):
    published = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert regex.findall(bpe.WORD_PATTERN, text) == regex.findall(published, text)


def test_a_word_of_a_megabyte_does_not_take_hours():
    assert len(bpe.learn_bpe(["a" * 1_000_000 + " " + "ab" * 500_000], 300)) > 260


def test_the_parts_of_a_long_word_count_as_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "MAX_WORD_CHARACTERS", 4)
    ranks = bpe.learn_bpe(["abcdabcdab"], 300)
    assert ranks == bpe.learn_bpe(["abcd", "abcd", "ab"], 300)
    assert b"abcd" in ranks


def test_tiktoken_splits_words_as_we_do():
    text = "It's 12345 o'clock,\r\n\n   東京タワー  is\ttall!!?\n" + "x" * 40 + " " * 40
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = regex.findall(bpe.WORD_PATTERN, text)
    ranks |= {word.encode(): 256 + n for n, word in enumerate(dict.fromkeys(words))}
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(ranks))}
    # a word that is in the ranks is one token, whatever its pairs
    encoding = tiktoken.Encoding(
        "t", pat_str=bpe.WORD_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    tokens = encoding.encode(text)
    assert [encoding.decode_single_token_bytes(token).decode() for token in tokens] == words
