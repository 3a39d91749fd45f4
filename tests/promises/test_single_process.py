"""Commands with a PyTorch without torch.distributed; see single_process.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, SMALL, prose

TRAIN = ["train", "--data", "text.txt", "--set", "tokenizer.kind=byte", *SMALL, "--out", "run"]
COMMANDS = [
    TRAIN,
    [*TRAIN, "--steps", "8"],  # resumes
    ["generate", "run", "--prompt", "It was"],
    ["evaluate", "run"],
    ["score", "run", "--text", "It was"],
    ["inspect", "run", "--prompt", "It was"],
]
SIZE = ["size", *SMALL, "--set", "tokenizer.kind=byte"]


def run_in(folder: Path, commands: list[list[str]], **environment: str) -> tuple[list[int], str]:
    """Run commands in one process; return their exit codes and stderr."""
    (folder / "text.txt").write_text(prose(600))
    variables = {"PYTHONPATH": str(ROOT), "GPTMINI_CACHE": str(folder / "cache")} | environment
    module = "tests.promises.single_process"
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), json.dumps(commands)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1]), done.stderr


def test_a_single_process_needs_no_torch_distributed(tmp_path: Path):
    commands = [*COMMANDS, SIZE]
    codes, said = run_in(tmp_path, commands)
    assert codes == [0] * len(commands), said


def test_several_processes_are_refused_in_one_line(tmp_path: Path):
    torchrun = dict.fromkeys(("LOCAL_RANK", "RANK", "MASTER_PORT"), "1")
    torchrun |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    codes, said = run_in(tmp_path, [TRAIN], **torchrun)
    assert codes != [0]
    assert "this PyTorch lacks torch.distributed; start a single process" in said
