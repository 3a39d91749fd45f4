import pytest
import regex
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from gptmini.tokenizer import bpe, chunks
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.chunks import find_boundary
from tests.support import WORDS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
)
@given(text=TEXTS | st.text("ab1 \n\t.,'é東。\u0301\u2019\u00a0\u2003!s/", max_size=60))
@pytest.mark.parametrize("kind", ["r50k_base", "o200k_base", "bpe"])
def test_a_text_cut_at_a_boundary_has_the_tokens_of_the_whole(monkeypatch, kind, text):
    if kind == "bpe":
        pattern = bpe.WORD_PATTERN
    else:  # the pattern is all that matters here, and needs no download
        monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *a, **k: {})
        monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *a, **k: {})
        pattern = getattr(openai_public, kind)()["pat_str"]
    whole = regex.findall(pattern, text)
    for limit in range(1, len(text)):
        cut = find_boundary(text, limit)
        assert 0 < cut <= limit
        behind_letter = regex.fullmatch(r"\p{L}[^\p{L}\p{N}\p{M}'\u2019]", text[cut - 1 : cut + 1])
        if behind_letter or (text[cut] == " " and text[cut - 1].isalnum()):
            assert regex.findall(pattern, text[:cut]) + regex.findall(pattern, text[cut:]) == whole


@given(
    st.text("ab1 .,\n'東。\u0301", min_size=1, max_size=60), st.integers(1, 60), st.integers(1, 60)
)
def test_the_cut_is_at_the_last_space_behind_a_letter(text, limit, reach):
    limit = min(limit, len(text))
    lowest = max(1, limit - reach)
    spaces = [at for at in range(lowest, limit) if text[at] == " " and text[at - 1].isalnum()]
    words = [at for at in range(lowest, limit) if regex.match(r"\p{L}[ .,\n。]", text, pos=at - 1)]
    line_ends = [at + 1 for at in range(lowest - 1, limit) if text[at] == "\n"]
    expected = (spaces or words or line_ends or [limit])[-1]
    assert find_boundary(text, limit, reach) == expected


def test_long_texts_are_encoded_in_parts(tiny_encoding: tiktoken.Encoding, monkeypatch):
    tokenizer = BpeTokenizer(tiny_encoding)
    text = WORDS * 20
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr(chunks, "TEXT_BLOCK_SIZE", 50)
    assert tokenizer.encode(text).tolist() == whole
    assert tokenizer.encode("").tolist() == []
