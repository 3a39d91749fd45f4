"""What several tests share: small texts, a small configuration, short ways to train it.

PyTorch is imported by what needs it: pytest's first process, which starts the others, does not.
"""

import base64
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from gptmini.cli import app
from gptmini.config.settings import Config, ModelConfig

if TYPE_CHECKING:
    from gptmini.tokenizer.tokenizers import Tokenizer
    from gptmini.train.state import Training

# The headless shell draws no window, which saves two thirds of the time.
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell or signals")

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
WORDS = "the quick brown fox jumps over the lazy dog and the cat sat on a mat. "

# Tests that try them all take them from here, so that a new one is tried as well.
POSITIONS: tuple[str, ...] = get_args(ModelConfig.model_fields["position"].annotation)
ACTIVATIONS: tuple[str, ...] = get_args(ModelConfig.model_fields["activation"].annotation)
NORMS: tuple[str, ...] = get_args(ModelConfig.model_fields["norm"].annotation)

HOSTILE = (
    "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>'\"&amp;\u2028\0\x1b\ud800"
)

SMALL = [
    "--set",
    "model={n_layer: 1, n_head: 4, d_model: 32, context_length: 16}",
    "--set",
    "train={steps: 4, batch_size: 4, eval_every: 2, save_every: 2}",
    "--set",
    "sample.max_new_tokens=8",
]

# Rates and tying are stated, or the number of epochs would decide them.
TINY: dict[str, Any] = {
    "model": {
        "n_layer": 2,
        "n_head": 4,
        "d_model": 32,
        "context_length": 16,
        "tie_embeddings": True,
    },
    "tokenizer": {"kind": "byte"},
    "train": {
        "steps": 6,
        "batch_size": 4,
        "lr": 2e-3,
        "eval_every": 3,
        "save_every": 3,
        "log_every": 1,
    },
    "sample": {"max_new_tokens": 8},
}


def prose(n_words: int = 3000) -> str:
    """Words of an invented language with digits, punctuation and line ends; always the same."""
    draw = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(draw.choices(syllables, k=draw.randrange(1, 4))) for _ in range(200)]
    ends = [" ", " ", " ", " ", " ", ", ", ". ", "\n", "\n\n", " 12", "'s ", "-", " (", ") "]
    pairs = zip(draw.choices(words, k=n_words), draw.choices(ends, k=n_words), strict=True)
    return "".join(word + end for word, end in pairs)


def tiny(**sections: dict[str, Any]) -> Config:
    """The small configuration with some settings changed, section by section."""
    names = TINY.keys() | sections.keys()
    return Config.model_validate(
        {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names}
    )


def train(config: Config, out: Path, started: float | None = None) -> None:
    """Decide and train, as the command does, without timing each of a thousand small runs."""
    from gptmini.plan.settle import make_plan
    from gptmini.runs.directory import RunDirectory
    from gptmini.train import loop

    if config.train.micro_batch_size is None:
        config = config.with_train(micro_batch_size=config.train.batch_size)
    if config.train.compile == "auto":
        config = config.with_train(compile="off")
    loop.train(make_plan(config, RunDirectory(out), started), out)


def prepared(config: Config, out: Path) -> "Training":
    """A training at step 0."""
    from gptmini.plan.settle import make_plan
    from gptmini.runs.directory import RunDirectory
    from gptmini.train.build import build_training

    return build_training(make_plan(config, None), RunDirectory(out))


def new_cache(folder: Path) -> Path:
    """A cache that holds nothing but the code compiled in this session."""
    compiled = Path.home() / ".cache" / "gptmini" / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "native").symlink_to(compiled)
    return folder / "cache"


def gpt2() -> "Tokenizer":
    """The gpt2 encoding from a folder with its files; skips where there is none."""
    from gptmini.tokenizer.load import create_tokenizer

    folder = SHARED / "data" / "tiktoken-cache"
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        if not folder.is_dir():
            pytest.skip("no folder with the gpt2 files; name one in TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return create_tokenizer("gpt2", None, ())


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        app.main()
    return int(end.value.code or 0)


def bpe_file(**changes: object) -> str:
    """The JSON of a BPE tokenizer of bytes, with some things changed."""
    ranks = {base64.b64encode(bytes([byte])).decode(): byte for byte in range(256)}
    special = {"<|endoftext|>": 256}
    whole = {"format": 1, "kind": "x", "pattern": "a|.", "special_tokens": special, "ranks": ranks}
    return json.dumps(whole | changes)
