"""Download known small corpora once, and check them against a SHA-256."""

import hashlib
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from gptmini import files
from gptmini.console import show_elapsed
from gptmini.errors import DataError, MachineError


@dataclass(frozen=True)
class KnownCorpus:
    """A corpus at a fixed revision, and the bytes it must have."""

    url: str
    bytes: int
    sha256: str


KNOWN_CORPORA = {
    "tinyshakespeare": KnownCorpus(
        "https://raw.githubusercontent.com/karpathy/char-rnn/"
        "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "tinystories": KnownCorpus(
        "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
        "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/TinyStories-valid.txt",
        19_447_282,
        "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """Return the file of a known corpus in a folder; download it if it is missing.

    Raises DataError for an unknown name or unexpected bytes, MachineError if the download fails.
    """
    if name not in KNOWN_CORPORA:
        raise DataError(f"{name}: no such corpus; choose {' or '.join(KNOWN_CORPORA)}")
    known = KNOWN_CORPORA[name]
    target = folder / f"{name}.txt"
    if target.exists():
        if hashlib.sha256(files.read_regular(target)).hexdigest() == known.sha256:
            return target
        raise DataError(f"{target}: already exists with other content; move it away")
    try:
        with (
            show_elapsed("downloading"),
            urllib.request.urlopen(known.url, timeout=30) as response,  # noqa: S310 - URLs of ours
        ):
            data = response.read(known.bytes + 1)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise MachineError(
            f"{known.url}: download failed ({reason}); save the file as {target} yourself, or "
            f"train on builtin:python-docs, which needs no network"
        ) from None
    if hashlib.sha256(data).hexdigest() != known.sha256:
        raise DataError(
            f"{known.url}: not saved, its SHA-256 is not the expected one; try again, or save the "
            f"right file as {target} yourself"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files.atomic_write_bytes(target, data)
    return target
