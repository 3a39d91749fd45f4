"""What several tests share: a small text, a small configuration, a small BPE encoding."""

import os
from pathlib import Path
from typing import Any

# Small models are fastest on one thread, and bits are the same in this process and its children.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import tiktoken

from gptmini.config import Config

SHARED = Path(__file__).parents[2] / "shared"
WORDS = "the quick brown fox jumps over the lazy dog and the cat sat on a mat. "

TINY: dict[str, Any] = {
    "model": {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": 16},
    "train": {"steps": 6, "batch_size": 4, "eval_every": 3, "save_every": 3, "log_every": 1},
    "sample": {"max_new_tokens": 8},
}


def tiny(**sections: dict[str, Any]) -> Config:
    """The small configuration with some settings changed, section by section."""
    names = TINY.keys() | sections.keys()
    return Config.model_validate(
        {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names}
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n}. {WORDS}\n" for n in range(40)))
    return path


@pytest.fixture
def tiny_encoding() -> tiktoken.Encoding:
    """A byte-level BPE of 256 bytes, three merges and a document token."""
    ranks = {bytes([n]): n for n in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    pattern = r"\s?\w+|\s+|[^\w\s]+"
    special = {"<|endoftext|>": 259}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
