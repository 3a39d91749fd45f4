"""A trained run for the commands that read one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import SMALL, WORDS


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"{n}. {WORDS}\n" for n in range(40)))
    words = [sys.executable, "-m", "gptmini", "train", "--data", str(text), *SMALL]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder / "runs" / "text"


@pytest.fixture
def run(trained: Path, gptmini) -> str:
    """In the directory of the test."""
    shutil.copytree(trained, "runs/text")
    return "runs/text"
