"""Token files made ahead of training, each by another machine if need be, and read as one text.

`prepare` turns one machine's share of the files into part-03-of-16.tokens; tokenizer.json beside it
is the same for all. Shares are consecutive, so the parts in order are the whole text, with the same
tokens however many there are. Training cuts its held-out tail from that, which is why only a
tokenizer that has learned nothing from the text will do.
"""

import glob
import hashlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.config.settings import Config
from gptmini.console import show_byte_progress
from gptmini.data import sources, token_file
from gptmini.data.formats import File
from gptmini.data.sources import Source
from gptmini.data.token_file import MAGIC, TokenFile
from gptmini.errors import ConfigError, DataError, MachineError, describe_os_error
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer, Tokens

PART_NAME = re.compile(r"part-(\d+)-of-(\d+)\.tokens")


# -- preparing a part ------------------------------------------------------------------------------


def prepare_part(config: Config, part: int, parts: int, out: Path) -> TokenFile:
    """Write the tokens of one part of a text, and the tokenizer, to a folder.

    ConfigError for a tokenizer that would be learned from the text, or for more parts than files.
    """
    kind = config.tokenizer.kind
    if kind in ("auto", "char", "bpe"):
        raise ConfigError(
            f"tokenizer.kind: {kind} is learned from the text, but all parts need the same; set it "
            f"to gpt2, byte or a file from gptmini tokenizer train"
        )
    tokenizer = create_tokenizer(kind)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with sources.stdin_as_file(config.data.path, out) as paths:
            whole = sources.find_source(paths, config.data)
            name = f"part-{part:0{len(str(parts))}}-of-{parts}"
            listed = [(file.path.name, file.bytes, file.kind, file.errors) for file in whole.files]
            settings = [config.data.text_key, config.data.separator]
            digest = hashlib.sha256(json.dumps([listed, settings]).encode()).hexdigest()
            own = Source(name, tuple(select_files(list(whole.files), part, parts)), config.data)
            _save_tokenizer(tokenizer, out, name)
            with show_byte_progress(f"preparing {name}", own.bytes) as advance:
                path = out / f"{name}.tokens"
                token_file.write_token_file(path, own.iter_chunks(), digest, tokenizer, advance)
    except OSError as error:
        raise MachineError(
            f"{error.filename or out}: {describe_os_error(error)}; free some space, or choose another --out"
        ) from None
    return TokenFile(path, tokenizer)


def select_files(listed: list[File], part: int, parts: int) -> list[File]:
    """The files of a part (from 1): a stretch of the list, cut where bytes come nearest to equal.

    Every part has a file; ConfigError if there are more parts than files.
    """
    if parts > len(listed):
        raise ConfigError(
            f"--part {part}/{parts}: the text has {len(listed)} files; use at most as many parts"
        )
    ends = [0, *accumulate(file.bytes for file in listed)]  # bytes before each possible cut
    cuts = [0]
    for number in range(1, parts):
        ideal = ends[-1] * number / parts
        after = bisect_left(ends, ideal)
        nearest = min(max(after - 1, 0), after, key=lambda cut: abs(ends[cut] - ideal))
        cuts.append(min(max(cuts[-1] + 1, nearest), len(listed) - parts + number))
    return listed[cuts[part - 1] : [*cuts, len(listed)][part]]


def _save_tokenizer(tokenizer: Tokenizer, out: Path, name: str) -> None:
    """Write tokenizer.json, by a name of our own: other machines may be doing the same."""
    path, ours = out / "tokenizer.json", out / f".tmp-{name}.json"
    if path.exists() and load_tokenizer(path).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"{path}: not {tokenizer.kind}, the tokenizer asked for; choose another --out"
        )
    ours.unlink(missing_ok=True)
    files.write_and_sync(ours, tokenizer.to_json().encode())
    files.rename(ours, path)


# -- training on parts -----------------------------------------------------------------------------


def find_token_files(paths: list[str]) -> list[Path] | None:
    """The token files that paths name, in order; None if they name texts.

    DataError for both in one list, and for a folder that lacks some of its parts.
    """
    found = [_find_token_files_at(path) for path in paths]
    if not any(found):
        return None
    for path, listed in zip(paths, found, strict=True):
        if not listed:
            raise DataError(
                f"{path}: a text beside token files; prepare it too, with gptmini data prepare "
                f"--out DIR"
            )
    return [file for listed in found for file in listed]


def _find_token_files_at(path: str) -> list[Path]:
    """The token files of one path: a file, a folder or a pattern; none if it names a text."""
    place = Path(os.path.expanduser(path))  # Path.expanduser can raise
    if place.is_dir():
        listed = [file for file in sorted(place.glob("*.tokens")) if _is_token_file(file)]
        _check_complete(
            place, [match for file in listed if (match := PART_NAME.fullmatch(file.name))]
        )
        return listed
    if place.suffix != ".tokens":
        return []
    matches = [place] if place.exists() else map(Path, sorted(glob.glob(str(place))))
    return [match for match in matches if _is_token_file(match)]


def _is_token_file(path: Path) -> bool:
    """Whether a file holds tokens of ours; the texts of WikiText are named so too."""
    try:
        with files.open_regular(path) as file:
            return bool(PART_NAME.fullmatch(path.name)) or file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _check_complete(folder: Path, parts: list[re.Match[str]]) -> None:
    counts = sorted({int(part[2]) for part in parts})
    if len(counts) > 1:
        raise DataError(
            f"{folder}: has parts of {' and of '.join(map(str, counts))}; keep one kind"
        )
    missing = set(range(1, (counts or [0])[0] + 1)) - {int(part[1]) for part in parts}
    if missing:
        first = f"{min(missing)}/{counts[0]}"
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{folder}: lacks part {first}{others}; make it with gptmini data prepare --part "
            f"{first}"
        )


def load_tokenizer_beside(paths: list[Path], config: Config) -> Tokenizer:
    """The tokenizer beside token files; DataError if the configuration asks for another."""
    tokenizer = load_tokenizer(paths[0].parent / "tokenizer.json")
    kind, size = config.tokenizer.kind, config.tokenizer.vocab_size
    if kind.endswith(".json"):
        same = load_tokenizer(Path(kind)).fingerprint == tokenizer.fingerprint
    else:
        same = kind in ("auto", tokenizer.kind) and size in (None, tokenizer.vocab_size)
    if not same:
        raise DataError(
            f"{paths[0].parent}: prepared with {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, "
            f"not with {kind}; prepare the text again, or leave the tokenizer out"
        )
    return tokenizer


def open_token_files(paths: list[Path], tokenizer: Tokenizer) -> "ConcatTokenFile":
    """Token files as one; DataError if parts in one folder were made from different files."""
    opened = [TokenFile(path, tokenizer, prepared=True) for path in paths]
    first: dict[Path, TokenFile] = {}
    for file in opened:
        if PART_NAME.fullmatch(file.path.name):
            other = first.setdefault(file.path.parent, file)
            if other.content != file.content:
                raise DataError(
                    f"{file.path}: prepared from other files than {other.path.name}; prepare all "
                    f"parts from the same"
                )
    return ConcatTokenFile(opened)


class ConcatTokenFile(TokenFile):
    """Consecutive tokens of several token files, read by position as if they were one file.

    Bytes of text and documents are those of all, in proportion. The name of `path` identifies the
    content, as that of a cached file does; there is no such file.
    """

    def __init__(self, parts: list[TokenFile], start: int = 0, stop: int | None = None) -> None:
        self._parts, self._start, self.prepared = parts, start, True
        self._ends = list(accumulate(map(len, parts)))
        total = self._ends[-1]
        self.count = (total if stop is None else stop) - start
        ratio = self.count / max(1, total)
        self.text_bytes = round(ratio * sum(part.text_bytes for part in parts))
        self.documents = round(ratio * sum(part.documents for part in parts))
        self.content = hashlib.sha256("".join(part.root for part in parts).encode()).hexdigest()
        self.vocab_size = parts[0].vocab_size
        self.path = parts[0].path.with_name(f"{self.content[:20]}-{start}-{stop}.tokens")

    def read(self, start: int, count: int) -> Tokens:
        return np.concatenate([np.empty(0, np.uint32), *self._read(self._start + start, count)])

    def _read(self, at: int, count: int) -> Iterator[Tokens]:
        index = bisect_right(self._ends, at)
        while count > 0:
            part = self._parts[index]
            first = at - (self._ends[index] - len(part))
            taken = min(count, len(part) - first)
            yield part.read(first, taken)
            at, count, index = at + taken, count - taken, index + 1

    def split(
        self, validation: float, test: float
    ) -> "tuple[ConcatTokenFile, ConcatTokenFile, ConcatTokenFile]":
        """Training, validation and test tokens: validation is the tail, test lies before it."""
        held_out = max(1, round(self.count * validation)) if validation else 0
        tested = max(1, round(self.count * test)) if test else 0
        cuts = [0, self.count - held_out - tested, self.count - held_out, self.count]
        spans = [ConcatTokenFile(self._parts, *cuts[place : place + 2]) for place in range(3)]
        return spans[0], spans[2], spans[1]
