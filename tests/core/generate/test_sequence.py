import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.config.settings import SampleConfig
from gptmini.generate.sampler import append_token
from gptmini.generate.sequence import Sequence
from gptmini.tokenizer.tokenizers import ByteTokenizer


def read(tokens: list[int], stops: list[str]) -> tuple[list[str], Sequence]:
    """The pieces of a text of bytes, and the text itself."""
    sample = SampleConfig(max_new_tokens=len(tokens), stop=stops)
    text = Sequence(0, [], 99, sample, tokenizer=ByteTokenizer())
    pieces = []
    for token in tokens:
        append_token(text, token)
        pieces.append(text.decode_token(token))
        if text.finish_reason:
            break
    return pieces, text


@given(st.binary(min_size=1, max_size=40))
def test_streamed_bytes_are_the_whole_text_wherever_they_are_cut(data):
    pieces, sample = read(list(data), [])
    assert "".join(pieces) == sample.text == data.decode("utf-8", "replace")
    assert sample.tokens == list(data)


@given(
    st.text("abé€", min_size=1, max_size=30),
    st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_text_whatever_the_tokens(text, stops):
    pieces, sample = read(list(text.encode()), stops)
    certain = ""
    for piece in pieces:  # nothing is ever taken back
        certain += piece
        assert text.startswith(certain)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        seen = text[: min(ends)]  # where the first stop text is complete
        assert sample.text == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
        assert sample.finish_reason == "stop"
    else:
        assert sample.text == text
        assert sample.finish_reason == "length"


class Words:
    """A tokenizer whose tokens are these texts."""

    end_tokens = frozenset()
    drops_first_space = False

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode_token(self, token: int) -> bytes:
        return self.words[token].encode()


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (["bcd", "c"], "ab"),  # "c" is complete first
        (["d", "cd", "bcd"], "a"),  # of those that are complete at once, the longest
        (["e", "abx"], "abcd"),
    ],
)
@pytest.mark.parametrize("words", [["abcdef"], ["a", "bcd", "ef"], ["ab", "cdef"], [*"abcdef"]])
def test_which_stop_text_ends_a_text_does_not_hang_on_how_it_is_cut(words, stops, kept):
    text = Sequence(0, [], 99, SampleConfig(stop=stops), tokenizer=Words(words))
    pieces = []
    for token in range(len(words)):
        pieces.append(text.decode_token(token))
        if text.finish_reason:
            break
    assert "".join(pieces) == text.text == kept
    assert text.finish_reason == "stop"


def test_a_character_in_two_tokens_appears_once_and_whole():
    assert read(list("é!".encode()), [])[0] == ["", "é", "!"]


def test_an_eos_token_ends_the_text():
    pieces, sample = read([104, 105, 0xC3, 256, 106], ["ix"])
    assert "".join(pieces) == "hi\ufffd"
    assert sample.finish_reason == "document"
    assert sample.tokens == [104, 105, 0xC3, 256]
