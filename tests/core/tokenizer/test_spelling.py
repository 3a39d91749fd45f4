"""How tokens are shown to people, above all those that are only part of a character."""

from hypothesis import given
from hypothesis import strategies as st

from gptmini.tokenizer.spelling import BYTES_LEGEND, explain_labels, label_pieces, label_tokens
from gptmini.tokenizer.tokenizers import CHAT_TEMPLATE, ByteTokenizer, CharTokenizer

BYTES = ByteTokenizer()


def split(text: str, *places: int) -> list[bytes]:
    """The bytes of a text, cut at these places."""
    data = text.encode()
    ends = [*places, len(data)]
    return [data[start:end] for start, end in zip([0, *places], ends, strict=True)]


def test_symbols_show_what_cannot_be_seen():
    labels = [label_tokens(BYTES, [token])[0] for token in (65, 32, 10, 0x1B, 0xC3, 256)]
    assert labels == ["A", "␣", "\\n", "\\x1b", "c3", "<doc>"]


def test_a_special_token_is_named():
    assert label_tokens(ByteTokenizer(CHAT_TEMPLATE), [257, 97, 258]) == [
        *("<|im_start|>", "a", "<|im_end|>")
    ]


def test_a_whole_character_is_itself():
    tokenizer = CharTokenizer("中")
    assert label_tokens(tokenizer, tokenizer.encode("a中").tolist()) == ["a", "中"]
    assert label_pieces([" 中文".encode(), "。".encode()]) == ["␣中文", "。"]
    assert label_pieces(["\ufffd".encode()]) == ["\ufffd"]  # a character, too, which texts contain


def test_a_part_names_the_character_and_which_part_it_is():
    assert label_tokens(BYTES, list("é中😀".encode())) == [
        *("é1/2", "é2/2", "中1/3", "中2/3", "中3/3", "😀1/4", "😀2/4", "😀3/4", "😀4/4")
    ]
    assert label_pieces(split("信", 2)) == ["信1/2", "信2/2"]  # counted in tokens, not in bytes


def test_a_token_may_end_one_character_and_begin_the_next():
    assert label_pieces(split("中文", 1, 4)) == ["中1/2", "中2/2文1/2", "文2/2"]
    assert label_pieces(split("a中!", 2)) == ["a中1/2", "中2/2!"]


def test_bytes_of_no_character_are_in_hex():
    assert label_pieces([b"\xff", b"a", b"\xe4\xbd", b"b"]) == ["ff", "a", "e4bd", "b"]
    assert label_pieces([b"\xad", "中".encode()]) == ["ad", "中"]  # its first bytes were cut off
    assert label_pieces(["中".encode(), b"\xe4\xb8"]) == ["中", "e4b8"]  # and its last ones
    assert label_pieces([b"\xed\xa0", b"\x80"]) == ["eda0", "80"]  # a surrogate, invalid in UTF-8


def test_no_character_continues_across_a_special_token():
    assert label_tokens(BYTES, [0xE4, 256, 0xB8, 0xAD]) == ["e4", "<doc>", "b8", "ad"]
    assert label_pieces([b"\xe4", b"", b"\xb8\xad"]) == ["e4", "", "b8ad"]


def test_a_character_that_cannot_be_seen_is_named_by_its_code_point():
    assert label_pieces(split("\u200b", 1)) == ["\\u200b1/2", "\\u200b2/2"]
    assert explain_labels(split("\u200b", 1))[0].startswith("\\u200b1/2: the first of 2 tokens")


def test_marks_are_explained_if_there_are_any():
    assert explain_labels([b"abc", "中".encode()]) == []
    assert explain_labels(split("中文", 1, 4)) == [
        "中1/2: the first of 2 tokens that spell the character 中"
    ]
    assert explain_labels([b"\xe4"]) == [BYTES_LEGEND]


@given(st.lists(st.binary(max_size=5)))
def test_every_token_has_a_label_whatever_its_bytes(pieces):
    labels = label_pieces(pieces)
    assert len(labels) == len(pieces)
    assert [bool(label) for label in labels] == [bool(piece) for piece in pieces]
    assert all(label.isprintable() and " " not in label for label in labels)
