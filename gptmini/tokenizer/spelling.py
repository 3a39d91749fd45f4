"""Spells tokens as a person reads them.

A token is some bytes. Most are whole characters and stand for themselves. A character of several
bytes may be split over several tokens, which then name the character and their part of it: 中1/3,
中2/3, 中3/3. Symbols make the rest visible: spaces, line ends and other control characters, bytes
that belong to no character (in hex), and the end-of-text token.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gptmini.tokenizer.tokenizers import Tokenizer

BYTES_LEGEND = "in hex: bytes that are no whole character"


def label_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Label each token of a text; a special one by its name."""
    labels = label_pieces([tokenizer.decode_token(token) for token in tokens])
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    names[tokenizer.eos_token_id] = "<doc>"
    return [names.get(token, label) for token, label in zip(tokens, labels, strict=True)]


def label_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Label the tokens of a text, given the bytes of each; "" for one that has none."""
    labels = [""] * len(pieces)
    for character, places in iter_characters(pieces):
        for part, place in enumerate(places, 1):
            labels[place] += _show(character)
            if len(places) > 1:
                labels[place] += f"{part}/{len(places)}"
    return labels


def explain_labels(pieces: Sequence[bytes]) -> list[str]:
    """Explain the marks in the labels of a text, a line each: parts of characters, bytes in hex."""
    characters = list(iter_characters(pieces))
    lines = []
    for character, places in characters:
        if len(places) > 1:
            lines.append(
                f"{_show(character)}1/{len(places)}: the first of {len(places)} tokens that spell "
                f"the character {_show(character)}"
            )
            break  # one example is enough
    if any(_is_byte(character) for character, _ in characters):
        lines.append(BYTES_LEGEND)
    return lines


def iter_characters(pieces: Sequence[bytes]) -> Iterator[tuple[str, list[int]]]:
    """Yield the characters of a text, each with the numbers of the pieces that have its bytes.

    A byte that belongs to no character is a lone surrogate, as in Python's `surrogateescape`. No
    character continues across an empty piece, which is a special token.
    """
    for is_empty, group in groupby(enumerate(pieces), lambda numbered: not numbered[1]):
        if is_empty:
            continue
        data = bytearray()
        owners: list[int] = []  # the number of the piece of each byte
        for number, piece in group:
            data += piece
            owners += [number] * len(piece)
        start = 0
        for character in data.decode("utf-8", "surrogateescape"):
            end = start + len(character.encode("utf-8", "surrogateescape"))
            yield character, sorted(set(owners[start:end]))
            start = end


def _show(character: str) -> str:
    """Return a character, or the symbol for one that cannot be seen."""
    if _is_byte(character):
        return f"{ord(character) - 0xDC00:02x}"
    if character == " ":
        return "␣"
    return character if character.isprintable() else repr(character)[1:-1]


def _is_byte(character: str) -> bool:
    """Tell whether a character is a byte that belongs to none."""
    return 0xDC80 <= ord(character) <= 0xDCFF
