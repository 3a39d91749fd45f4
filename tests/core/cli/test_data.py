"""`gptmini data prepare` and `fetch`; errors of the commands that need no model."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import SMALL


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["tokenizer", "encode", "none", "x"], 3, "none: no such tokenizer"),
        (["tokenizer", "encode", "runs/none", "x"], 3, "tokenizer.json: no such file"),
        (["tokenizer", "encode", "bpe", "x"], 3, "bpe: learned from a text; give a run"),
        (["tokenizer", "encode", "byte", "\udcff"], 3, "not valid UTF-8 at position 0; convert"),
        (["tokenizer", "decode", "byte", "-1"], 2, "-1"),
        (["tokenizer", "info", "byte", "--data", "none.txt"], 3, "none.txt: no such file"),
        (["tokenizer", "train", "x", "--out", "t.json", "--vocab-size", "9"], 2, "--vocab-size"),
        (["tokenizer"], 2, "see gptmini tokenizer --help"),
        (["data", "fetch", "x"], 3, "choose tinyshakespeare or"),
        (["data", "prepare", "--data", "none.txt"], 3, "none.txt: no such file"),
    ],
)
def test_errors_are_one_line_with_a_remedy(gptmini, words, code, line):
    exit_code, out, err = gptmini(*words)
    assert (exit_code, out) == (code, "")
    assert line in err
    assert err.startswith("gptmini: ")
    assert err.count("\n") == 1


def test_train_uses_what_prepare_has_prepared(gptmini, text_file: Path, tmp_path: Path):
    code, out, _ = gptmini("data", "prepare", "--data", str(text_file), *SMALL)
    assert code == 0
    assert out.startswith(
        f"  text      {text_file}: {text_file.stat().st_size / 1000:.3g} kB cut into "
    )

    def find_times() -> dict[str, int]:
        cache = (tmp_path / "cache").iterdir()
        return {path.name: path.lstat().st_mtime_ns for path in cache}

    before = find_times()
    assert out in gptmini("train", "--data", str(text_file), *SMALL)[2]
    assert find_times() == before


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_preparing_leaves_nothing(tmp_path: Path, monkeypatch, number, code):
    monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "gptmini", "data", "prepare", "--data", "-"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        while not list(tmp_path.glob("cache/.tmp-*")):
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=500)
    assert process.returncode == code
    assert err.decode().startswith("gptmini: stopped by ")
    assert list((tmp_path / "cache").iterdir()) == []
