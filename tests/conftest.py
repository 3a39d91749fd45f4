"""Fixtures, and the environment that every test runs in."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# pytest runs a process for each core (`-n auto` in pyproject.toml), so each takes one thread. Bits
# are then the same in this process and its children.
os.environ["OMP_NUM_THREADS"] = "1"
# The cache of compiled code is in HOME, which pytest's processes share: it is compiled once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HOME"] = os.environ["USERPROFILE"] = tempfile.mkdtemp()
    # Windows keeps loaded code.
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import pytest
import tiktoken
from hypothesis import HealthCheck, Phase, settings

from gptmini.cli import app
from tests.local_hub import LocalHub, set_endpoint
from tests.support import ROOT, SMALL, WORDS, new_cache, run_command

# A busy machine is not a failure: nothing that hypothesis runs has to be fast.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "first failure", settings.get_profile("any machine"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test prepares its texts in a cache of its own, beside its folder."""
    beside = tmp_path.with_name(f"{tmp_path.name}-beside")
    beside.mkdir()
    monkeypatch.setenv("GPTMINI_CACHE", str(new_cache(beside)))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n}. {WORDS}\n" for n in range(40)))
    return path


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals do what they do in a foreground shell, in this process and its children.

    nohup and background shells start the tests with SIGHUP or SIGINT ignored.
    """
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if hasattr(signal, "SIGHUP"):  # Windows lacks it
        defaults[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def gptmini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    """Runs a command line in a directory that holds its cache: (exit code, stdout, stderr)."""
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
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub on this machine, and an empty cache for it."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hub")
    hub = LocalHub()
    # These were read from the environment when huggingface_hub was imported.
    set_endpoint(monkeypatch, hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def start_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., tuple[list[int], str]]]:
    """Runs a command line in several ranks: (exit codes, what they said)."""
    if not hasattr(os, "fork"):
        pytest.skip("ranks are forks of their launcher")
    launcher = ROOT / "tests" / "promises" / "ranks_launcher.py"
    said = tmp_path_factory.mktemp("ranks") / "said.txt"
    with subprocess.Popen(
        [sys.executable, launcher],
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # not another checkout that is installed
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def start(size: int, *words: str, fault: str = "none") -> tuple[list[int], str]:
            said.write_text("")
            request = {"size": size, "words": words, "fault": fault, "said": str(said)}
            request["folder"] = os.getcwd()
            print(json.dumps(request), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            return json.loads(answer), said.read_text()

        yield start
        process.stdin.close()


@pytest.fixture
def tiny_encoding() -> tiktoken.Encoding:
    """A byte-level BPE of 256 bytes, three merges and an end-of-text token."""
    ranks = {bytes([n]): n for n in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    pattern = r"\s?\w+|\s+|[^\w\s]+"
    special = {"<|endoftext|>": 259}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"{n}. {WORDS}\n" for n in range(40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(["gptmini", "train", "--data", str(text), *SMALL], patch) == 0
    return folder / "runs" / "text"


@pytest.fixture
def run(trained: Path, gptmini) -> str:
    """In the directory of the test."""
    shutil.copytree(trained, "runs/text")
    return "runs/text"
