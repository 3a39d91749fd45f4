"""What several tests share: a small text, a small configuration, a small BPE encoding."""

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Small models are fastest on one thread, and bits are the same in this process and its children.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HOME"] = tempfile.mkdtemp()  # for what is compiled once and used in many tests
atexit.register(shutil.rmtree, os.environ["HOME"])

import pytest
import tiktoken
from hypothesis import Phase, settings

from gptmini.cli import app
from gptmini.config.settings import Config
from gptmini.files import CACHE
from gptmini.plan.decide import decide
from gptmini.runs.directory import RunDirectory
from gptmini.text.tokenizer import Tokenizer, create
from gptmini.train import trainer
from gptmini.train.state import Training, prepare

settings.register_profile("any machine", deadline=None)  # a busy machine is not a failure
settings.register_profile("first failure", deadline=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("any machine")

SHARED = Path(__file__).parents[2] / "shared"
WORDS = "the quick brown fox jumps over the lazy dog and the cat sat on a mat. "


def prose(n_words: int = 3000) -> str:
    """Words of an invented language with digits, punctuation and line ends; always the same."""
    draw = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(draw.choices(syllables, k=draw.randrange(1, 4))) for _ in range(200)]
    ends = [" ", " ", " ", " ", " ", ", ", ". ", "\n", "\n\n", " 12", "'s ", "-", " (", ") "]
    pairs = zip(draw.choices(words, k=n_words), draw.choices(ends, k=n_words), strict=True)
    return "".join(word + end for word, end in pairs)


SMALL = [
    "--set",
    "model={n_layer: 1, n_head: 4, d_model: 32, context_length: 16}",
    "--set",
    "train={steps: 4, batch_size: 4, eval_every: 2, save_every: 2}",
    "--set",
    "sample.max_new_tokens=8",
]

TINY: dict[str, Any] = {
    "model": {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": 16},
    "tokenizer": {"kind": "byte"},
    "train": {"steps": 6, "batch_size": 4, "eval_every": 3, "save_every": 3, "log_every": 1},
    "sample": {"max_new_tokens": 8},
}


def tiny(**sections: dict[str, Any]) -> Config:
    """The small configuration with some settings changed, section by section."""
    names = TINY.keys() | sections.keys()
    return Config.model_validate(
        {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names}
    )


def train(config: Config, out: Path, cache: Path, started: float | None = None) -> None:
    """Decide and train, as the command does, without weighing each of a thousand small runs."""
    if config.train.micro_batch_size is None:
        config = config.with_train(micro_batch_size=config.train.batch_size)
    trainer.train(decide(config, RunDirectory(out), cache, started), out)


def prepared(config: Config, out: Path, cache: Path) -> Training:
    """A training at step 0."""
    return prepare(decide(config, None, cache), RunDirectory(out))


def new_cache(folder: Path) -> Path:
    """A cache that holds nothing but the code compiled in this session."""
    compiled = CACHE / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "native").symlink_to(compiled)
    return folder / "cache"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n}. {WORDS}\n" for n in range(40)))
    return path


def gpt2() -> Tokenizer:
    """The gpt2 encoding from a folder with its files; skips where there is none."""
    folder = SHARED / "data" / "tiktoken-cache"
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        if not folder.is_dir():
            pytest.skip("no folder with the gpt2 files; name one in TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return create("gpt2", None, ())


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals do what they do in a foreground shell, in this process and its children.

    nohup and background shells start the tests with SIGHUP or SIGINT ignored.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def gptmini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    """Runs a command line in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTMINI_CACHE", str(new_cache(tmp_path)))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptmini", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return run


@pytest.fixture
def tiny_encoding() -> tiktoken.Encoding:
    """A byte-level BPE of 256 bytes, three merges and a document token."""
    ranks = {bytes([n]): n for n in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    pattern = r"\s?\w+|\s+|[^\w\s]+"
    special = {"<|endoftext|>": 259}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
