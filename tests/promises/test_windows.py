"""Commands on a machine that is much like Windows; see windows_like.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, SMALL, prose

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pretends on Linux only")

TRAIN = ["train", "--data", "text.txt", "--set", "tokenizer.kind=byte", *SMALL]
COMMANDS = [
    [*TRAIN, "--out", "run"],
    [*TRAIN, "--out", "run", "--steps", "8"],  # resumes, and deletes old checkpoints
    ["train", "attention/mqa", *TRAIN[1:], "--out", "mqa"],
    ["generate", "run", "--prompt", "Übéra ✓"],
    ["generate", "run", "--prompts", "prompts.jsonl", "--out", "texts.jsonl"],
    ["evaluate", "run"],
    ["score", "run", "--file", "text.txt", "--json"],
    ["convert", "run", "--attention", "gqa:2", "--out", "converted"],
    [*TRAIN, "--from", "run", "--out", "tuned"],
    ["export", "run", "--out", "exported"],
    ["import", "exported", "--out", "imported"],
    ["data", "prepare", "--data", "text.txt", "--out", "tokens", "--set", "tokenizer.kind=byte"],
    ["tokenizer", "train", "text.txt", "--vocab-size", "300", "--out", "t.json"],
    ["size", *SMALL, "--set", "tokenizer.kind=byte"],
    ["plot", "run"],
]


def run_as_on_windows(folder: Path, commands: list[list[str]]) -> tuple[list[int], str, str]:
    words = [sys.executable, "-m", "tests.promises.windows_like", str(folder)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "cp1252",  # of a pipe there
        "GPTMINI_CACHE": str(folder / "cache"),
        "PATH": str(Path(sys.executable).parent),  # without a compiler
    }
    done = subprocess.run(
        [*words, json.dumps(commands)], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    said = done.stderr.decode("utf-8")
    assert done.returncode == 0, said
    return json.loads(said.splitlines()[-1]), done.stdout.decode("utf-8"), said


def test_every_command_runs_where_open_files_cannot_be_replaced(tmp_path: Path):
    (tmp_path / "text.txt").write_text(prose())
    (tmp_path / "prompts.jsonl").write_text('"It"\n"was"\n')
    codes, out, said = run_as_on_windows(tmp_path, COMMANDS)
    assert codes == [0] * len(COMMANDS), said
    assert "Übéra ✓" in out  # not `?`, which is all that cp1252 has for it
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps[-1] == "step-00000008"
