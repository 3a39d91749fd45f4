"""Texts that are token numbers already: .bin of nanoGPT and llm.c, .npy, and lists in JSON.

They become a token file. A .bin of nanoGPT has no header: its numbers have 16 bits, or 32 where the
tokenizer has more than 65,536 tokens. Rows of .npy and lists in JSON are documents, and get an
end-of-text token each; a .bin, and an array of one dimension, is one stream that has its own.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptmini import files
from gptmini.console import show_byte_progress
from gptmini.data.token_file import TokenOutput, TokenWriter
from gptmini.errors import DataError, describe_os_error
from gptmini.tokenizer.tokenizers import Tokenizer

# The first number of a file of llm.c, which has a header of 256 numbers of 32 bits.
LLM_C_TYPES: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
LLM_C_HEADER_BYTES = 1024
NUMBERS_AT_ONCE = 1 << 20
PICKLES_AND_ARCHIVES = (b"PK\3\4", b"\x80", b"GGUF")  # weights, which are named .bin, too
LIST_OF_NUMBERS = re.compile(rb"\s*\[\s*(\[\s*)?\d")
# A stretch of numbers, where it stands, and whether a document begins with it.
Stretch = tuple[str, "np.ndarray[Any, np.dtype[Any]]", bool]


def holds_numbers(path: Path) -> bool:
    """Check by its name, and of JSON by its beginning, whether a file holds token numbers."""
    suffix = path.suffix.lower()
    if suffix not in (".bin", ".npy", ".json", ".jsonl") or not path.is_file():
        return False
    with files.open_regular(path) as file:
        head = file.read(64)
    if suffix == ".bin":
        return not head.startswith(PICKLES_AND_ARCHIVES)
    return suffix == ".npy" or LIST_OF_NUMBERS.match(head) is not None


def find_largest(paths: Sequence[Path]) -> int:
    """Find the largest token number of some files."""
    return max(int(part.max(initial=0)) for path in paths for _, part, _ in _read(path, None))


def write_numbers(paths: Sequence[Path], tokenizer: Tokenizer, output: TokenOutput) -> None:
    """Write the numbers of some files into one token file; DataError for one that is no token."""
    byte_lengths = tokenizer.compute_byte_lengths()  # (V,)
    document = np.array([tokenizer.eos_token_id], np.uint32)
    total = sum(path.stat().st_size for path in paths)
    with (
        files.atomic_write(output.path) as file,
        show_byte_progress("copying the tokens", total) as advance,
    ):
        writer = TokenWriter(file, output.digest, tokenizer)
        for path in paths:
            for place, part, starts_document in _read(path, tokenizer.vocab_size):
                wrong = (part < 0) | (part >= tokenizer.vocab_size)
                if wrong.any():
                    number = part[int(wrong.argmax())]
                    raise DataError(
                        f"{place}: {number} at number {int(wrong.argmax())} is not one of the "
                        f"{tokenizer.vocab_size:,} tokens of {tokenizer.kind}; name the tokenizer "
                        f"that made them with --set tokenizer.kind=NAME"
                    )
                tokens = part.astype(np.uint32)
                if starts_document:
                    writer.append(0, document)
                writer.append(int(byte_lengths[tokens].sum()), tokens)
                advance(part.nbytes)
        writer.finish(prepared=True)


def _read(path: Path, vocab_size: int | None) -> Iterator[Stretch]:
    """Read the numbers of a file in stretches."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".bin":
            yield from _cut(path, _open_bin(path, vocab_size))
        elif suffix == ".npy":
            yield from _read_npy(path)
        else:
            yield from _read_lists(path)
    except (OSError, ValueError, OverflowError, EOFError) as error:
        raise DataError(
            f"{path}: {describe_os_error(error)}; write whole numbers as nanoGPT, llm.c, numpy or "
            f"JSON do"
        ) from None


def _cut(path: Path, numbers: "np.ndarray[Any, np.dtype[Any]]") -> Iterator[Stretch]:
    """Cut a stream of numbers (N,) into stretches."""
    for start in range(0, len(numbers), NUMBERS_AT_ONCE):
        yield f"{path}: from {start:,}", numbers[start : start + NUMBERS_AT_ONCE], False


def _open_bin(path: Path, vocab_size: int | None) -> "np.ndarray[Any, np.dtype[Any]]":
    """Open the numbers of a .bin file."""
    with files.open_regular(path) as file:
        head = file.read(4)
    dtype = LLM_C_TYPES.get(int.from_bytes(head, "little"))
    offset = 0 if dtype is None else LLM_C_HEADER_BYTES
    if dtype is None:
        dtype = np.dtype("<u4" if vocab_size is not None and vocab_size > 1 << 16 else "<u2")
    return np.memmap(path, dtype, "r", offset)


def _read_npy(path: Path) -> Iterator[Stretch]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(f"{array.dtype} in {array.ndim} dimensions, not rows of whole numbers")
    if array.ndim == 1:
        yield from _cut(path, array)
        return
    for number, row in enumerate(array):
        yield f"{path}: row {number}", row, True


def _read_lists(path: Path) -> Iterator[Stretch]:
    with files.open_regular(path) as file:
        if path.suffix.lower() == ".json":
            whole = json.loads(file.read())
            lists = whole if whole and isinstance(whole[0], list) else [whole]
        else:
            lists = (json.loads(line) for line in file if line.strip())
        for number, listed in enumerate(lists, 1):
            place = f"{path}: list {number}"
            if not isinstance(listed, list) or any(type(each) is not int for each in listed):
                raise DataError(f"{place}: not a list of whole numbers; fix or remove it")
            yield place, np.array(listed, np.int64), True
