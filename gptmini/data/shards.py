"""Prepare token files ahead of training, on several machines if need be; read them as one text.

`prepare_part` turns one machine's share of the files into part-03-of-16.tokens; tokenizer.json
beside it is the same for all. Shares are consecutive, so the parts in order are the whole text,
with the same tokens however many there are. Training cuts its held-out tail from that, which is why
the tokenizer must not be learned from the text.
"""

import glob
import hashlib
import json
import os
import re
from bisect import bisect_left, bisect_right
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
        with sources.spool_stdin(config.data.path, out) as paths:
            whole = sources.find_source(paths, config.data)
            name = f"part-{part:0{len(str(parts))}}-of-{parts}"
            share = Source(name, tuple(select_files(list(whole.files), part, parts)), config.data)
            _save_tokenizer(tokenizer, out, name)
            with show_byte_progress(f"preparing {name}", share.bytes) as advance:
                path = out / f"{name}.tokens"
                digest = _hash_file_list(whole)
                output = token_file.TokenOutput(path, digest)
                token_file.write_token_file(output, share.iter_chunks(), tokenizer, advance)
    except OSError as error:
        raise MachineError(
            f"{error.filename or out}: {describe_os_error(error)}; free some space, or choose "
            f"another --out"
        ) from None
    return TokenFile(path, tokenizer)


def _hash_file_list(source: Source) -> str:
    """Hash the names and sizes of all files: parts with the same hash belong together."""
    listed = [(file.path.name, file.bytes, file.kind, file.errors) for file in source.files]
    options = [source.settings.text_key, source.settings.separator]
    return hashlib.sha256(json.dumps([listed, options]).encode()).hexdigest()


def select_files(listed: list[File], part: int, parts: int) -> list[File]:
    """Select the files of a part (from 1): a stretch of the list, with about as many bytes as any.

    Every part has a file; ConfigError if there are more parts than files.
    """
    if parts > len(listed):
        raise ConfigError(
            f"--part {part}/{parts}: the text has {len(listed)} files; use at most as many parts"
        )
    bytes_before = [0, *accumulate(file.bytes for file in listed)]  # of each place to cut
    cuts = [0]
    for number in range(1, parts):
        ideal = bytes_before[-1] * number / parts
        after = bisect_left(bytes_before, ideal)
        before = max(after - 1, 0)
        cut = after if bytes_before[after] - ideal < ideal - bytes_before[before] else before
        earliest = cuts[-1] + 1  # leaves a file for the part before
        latest = len(listed) - parts + number  # leaves a file for each part after
        cuts.append(min(max(earliest, cut), latest))
    cuts.append(len(listed))
    return listed[cuts[part - 1] : cuts[part]]


def _save_tokenizer(tokenizer: Tokenizer, out: Path, name: str) -> None:
    """Write tokenizer.json; DataError or ConfigError if there is another."""
    path = out / "tokenizer.json"
    if path.exists() and load_tokenizer(path).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"{path}: not {tokenizer.kind}, the tokenizer asked for; choose another --out"
        )
    # Named after the part: other machines may be writing the same at this moment.
    temporary = out / f".tmp-{name}.json"
    temporary.unlink(missing_ok=True)
    files.write_and_sync(temporary, [tokenizer.to_json().encode()])
    files.rename(temporary, path)


# -- training on parts -----------------------------------------------------------------------------


def find_token_files(paths: list[str]) -> list[Path] | None:
    """Find the token files that paths name, in order; None if they name texts.

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
    """Find the token files of a file, folder or pattern; none if it names a text."""
    place = Path(os.path.expanduser(path))  # Path.expanduser can raise
    if place.is_dir():
        found = [file for file in sorted(place.glob("*.tokens")) if _is_token_file(file)]
        _check_complete(place, found)
        return found
    if place.suffix != ".tokens":
        return []
    matches = [place]
    if not place.exists():
        matches = [Path(match) for match in sorted(glob.glob(str(place)))]
    return [match for match in matches if _is_token_file(match)]


def _is_token_file(path: Path) -> bool:
    """Check whether a file holds tokens of ours; the texts of WikiText are named so too."""
    try:
        with files.open_regular(path) as file:
            return bool(PART_NAME.fullmatch(path.name)) or file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _check_complete(folder: Path, found: list[Path]) -> None:
    """DataError if a folder lacks a part, or has parts of two sets."""
    parts = [match for file in found if (match := PART_NAME.fullmatch(file.name))]
    if not parts:
        return
    counts = sorted({int(part[2]) for part in parts})
    if len(counts) > 1:
        raise DataError(
            f"{folder}: has parts of {' and of '.join(map(str, counts))}; keep one kind"
        )
    count = counts[0]
    missing = set(range(1, count + 1)) - {int(part[1]) for part in parts}
    if missing:
        first = f"{min(missing)}/{count}"
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{folder}: lacks part {first}{others}; make it with gptmini data prepare --part "
            f"{first}"
        )


def load_tokenizer_beside(paths: list[Path], config: Config) -> Tokenizer:
    """Load the tokenizer beside token files; DataError if the configuration names another."""
    tokenizer = load_tokenizer(paths[0].parent / "tokenizer.json")
    kind = config.tokenizer.kind
    vocab_size = config.tokenizer.vocab_size
    if kind.endswith(".json"):
        same = load_tokenizer(Path(kind)).fingerprint == tokenizer.fingerprint
    else:
        same = kind in ("auto", tokenizer.kind) and vocab_size in (None, tokenizer.vocab_size)
    if not same:
        raise DataError(
            f"{paths[0].parent}: prepared with {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, "
            f"not with {kind}; prepare the text again, or leave the tokenizer out"
        )
    return tokenizer


def open_token_files(paths: list[Path], tokenizer: Tokenizer) -> "ConcatTokenFile":
    """Open token files as one; DataError if parts in a folder were made from different files."""
    opened = [TokenFile(path, tokenizer, prepared=True) for path in paths]
    first_in_folder: dict[Path, TokenFile] = {}
    for file in opened:
        if not PART_NAME.fullmatch(file.path.name):
            continue
        first = first_in_folder.setdefault(file.path.parent, file)
        if first.content != file.content:
            raise DataError(
                f"{file.path}: prepared from other files than {first.path.name}; prepare all "
                f"parts from the same"
            )
    return ConcatTokenFile(opened)


class ConcatTokenFile(TokenFile):
    """Consecutive tokens of several token files, read by position as if they were one file.

    Its bytes of text and documents are its share of the total, in proportion to the tokens. `path`
    does not exist: its name identifies the content, as that of a cached file does.
    """

    def __init__(self, parts: list[TokenFile], start: int = 0, stop: int | None = None) -> None:
        self.prepared = True
        self._parts = parts
        self._start = start
        self._ends = list(accumulate(map(len, parts)))  # where each part ends in the whole
        total = self._ends[-1]
        self.count = (total if stop is None else stop) - start
        share = self.count / max(1, total)
        self.text_bytes = round(share * sum(part.text_bytes for part in parts))
        self.documents = round(share * sum(part.documents for part in parts))
        self.content = hashlib.sha256("".join(part.root for part in parts).encode()).hexdigest()
        self.vocab_size = parts[0].vocab_size
        self.has_ignored = any(part.has_ignored for part in parts)
        self.path = parts[0].path.with_name(f"{self.content[:20]}-{start}-{stop}.tokens")

    def read_marked(self, start: int, count: int) -> Tokens:
        """Read tokens (count,) from a position, from as many parts as that takes."""
        tokens = [np.empty(0, np.uint32)]
        at = self._start + start
        remaining = count
        index = bisect_right(self._ends, at)  # of the part that has this position
        while remaining > 0:
            part = self._parts[index]
            start_in_part = at - (self._ends[index] - len(part))
            n_tokens = min(remaining, len(part) - start_in_part)
            tokens.append(part.read_marked(start_in_part, n_tokens))
            at += n_tokens
            remaining -= n_tokens
            index += 1
        return np.concatenate(tokens)

    def split(
        self, validation: float, test: float
    ) -> "tuple[ConcatTokenFile, ConcatTokenFile, ConcatTokenFile]":
        """Split into training, validation and test: validation is the tail, test lies before it."""
        n_validation = max(1, round(self.count * validation)) if validation else 0
        n_test = max(1, round(self.count * test)) if test else 0
        validation_start = self.count - n_validation
        test_start = validation_start - n_test
        return (
            ConcatTokenFile(self._parts, 0, test_start),
            ConcatTokenFile(self._parts, validation_start, self.count),
            ConcatTokenFile(self._parts, test_start, validation_start),
        )
