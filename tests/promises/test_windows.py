"""Commands on a machine that is much like Windows; see windows_like.py."""

import shutil
import sys
from pathlib import Path

import pytest

from gptmini.cli.app import app
from tests.promises.commands import COMMANDS, TRAIN, run_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pretends on Linux only")

WINDOWS = "tests.promises.windows_like"
ENVIRONMENT = {
    "PYTHONIOENCODING": "cp1252",  # of a pipe there
    "PATH": str(Path(sys.executable).parent),  # without a compiler
}
EVALUATE = ["evaluate", "run", "--data", "text.txt"]
# As LLVM's for Windows: it refuses -fPIC, and would link a second OpenMP.
CLANG = """#!/bin/sh
for word; do
  case $word in -fPIC | -fopenmp) echo "error: unsupported option '$word'" >&2; exit 1;; esac
done
PATH=/usr/bin:/bin exec {compiler} -fPIC -O0 "$@" -O0
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], str, str]:
    """A folder in which every command has run; exit codes, stdout and stderr."""
    folder = tmp_path_factory.mktemp("windows")
    return folder, *run_in(WINDOWS, folder, [*COMMANDS, EVALUATE], **ENVIRONMENT)


def test_every_command_runs_where_open_files_cannot_be_replaced(done):
    folder, codes, out, said = done
    assert codes == [0] * len([*COMMANDS, EVALUATE]), said
    assert "Übéra ✓" in out  # not `?`, which is all that cp1252 has for it
    assert '"object":"text_completion"' in out.replace(" ", "")  # the server has answered
    steps = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert steps[-1] == "step-00000008"
    assert said.count("warning: clang++: not found; generating with PyTorch") == 1


def test_a_damaged_token_file_is_written_again(done):
    folder, *_ = done
    damaged = sorted((folder / "cache").glob("*.tokens"))
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1])
    codes, _, said = run_in(WINDOWS, folder, [EVALUATE], **ENVIRONMENT)
    assert codes == [0], said


def test_no_command_is_left_out():
    commands = [*app.registered_commands]
    names = {each.name or each.callback.__name__ for each in commands if each.callback}
    assert names <= {words[0] for words in COMMANDS}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_engine_compiles_with_llvms_compiler(tmp_path: Path):
    folder = tmp_path / "llvm"
    folder.mkdir()
    compiler = folder / "clang++"
    compiler.write_text(CLANG.format(compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    commands = [[*TRAIN, "--out", "run"], ["generate", "run", "--json", "--prompt", "It"]]
    path = f"{folder}:{ENVIRONMENT['PATH']}"
    codes, out, said = run_in(WINDOWS, tmp_path, commands, **(ENVIRONMENT | {"PATH": path}))
    assert codes == [0, 0], said
    assert '"engine": "compiled"' in out, said
    assert [each.suffix for each in (tmp_path / "cache" / "native").iterdir()] == [".dll"]
