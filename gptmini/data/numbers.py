"""Texts that are token numbers already: the .bin files of nanoGPT and llm.c.

Their numbers are copied into a token file. Those of nanoGPT have no header: they have 32 bits where
all of them, read so, are tokens of the tokenizer, else 16.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptmini import files
from gptmini.data.token_file import Encoded
from gptmini.errors import DataError, describe_os_error
from gptmini.tokenizer.tokenizers import Tokenizer

# The first number of a file of llm.c, which has a header of 256 numbers of 32 bits.
LLM_C_TYPES: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
LLM_C_HEADER_BYTES = 1024
NUMBERS_AT_ONCE = 1 << 20
PICKLES_AND_ARCHIVES = (b"PK\3\4", b"\x80", b"GGUF")  # weights, which are named .bin, too


def holds_numbers(path: Path) -> bool:
    """Check by its name and beginning whether a file holds token numbers."""
    if path.suffix.lower() != ".bin" or not path.is_file():
        return False
    with files.open_regular(path) as file:
        return not file.read(4).startswith(PICKLES_AND_ARCHIVES)


def read_numbers(
    paths: Sequence[Path], tokenizer: Tokenizer, advance: Callable[[int], object]
) -> Iterator[Encoded]:
    """Yield the token numbers of files, a stretch at a time; DataError for one out of range.

    `advance` gets the bytes of the files as they are read.
    """
    byte_lengths = tokenizer.compute_byte_lengths()  # (V,)
    for path in paths:
        try:
            dtype, offset = _find_type(path, tokenizer.vocab_size)
            numbers = np.memmap(path, dtype, "r", offset)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: {describe_os_error(error)}; write numbers as nanoGPT or llm.c do"
            ) from None
        for start in range(0, len(numbers), NUMBERS_AT_ONCE):
            part = numbers[start : start + NUMBERS_AT_ONCE]
            wrong = part >= tokenizer.vocab_size
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"{path}: {part[at]} at number {start + at:,} is not one of the "
                    f"{tokenizer.vocab_size:,} tokens of {tokenizer.kind}; name the tokenizer "
                    f"that made them with --set tokenizer.kind=NAME"
                )
            tokens = part.astype(np.uint32)
            yield int(byte_lengths[tokens].sum()), tokens
            advance(part.nbytes)


def _find_type(path: Path, vocab_size: int) -> tuple[np.dtype[Any], int]:
    """Find the type of a file's numbers, and where they begin."""
    with files.open_regular(path) as file:
        head = file.read(4 * NUMBERS_AT_ONCE)
    llm_c_type = LLM_C_TYPES.get(int.from_bytes(head[:4], "little"))
    if llm_c_type is not None:
        return llm_c_type, LLM_C_HEADER_BYTES
    wide = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
    is_wide = len(head) % 4 == 0 and bool((wide < vocab_size).all())
    return np.dtype("<u4" if is_wide else "<u2"), 0
