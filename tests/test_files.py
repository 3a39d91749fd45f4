import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptmini import files
from gptmini.errors import ConfigError


def test_only_regular_files_are_opened(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert files.read_regular(tmp_path / "link") == b"content"
    os.mkfifo(tmp_path / "fifo")
    # in a process of its own: an open that waits for a writer cannot be interrupted otherwise
    check = "import sys; from gptmini import files; files.read_regular(sys.argv[1])"
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        words = [sys.executable, "-c", check, str(path)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert f"not a regular file: '{path}'" in ended.stderr
    with pytest.raises(IsADirectoryError):
        files.read_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.read_regular(tmp_path / "none")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_output_appears_when_it_is_complete(tmp_path: Path, kind):
    out = tmp_path / "new" / "out"

    def write(path: Path) -> None:
        if kind == "folder":
            path.mkdir()
            path = path / "file"
        path.write_bytes(b"content")

    with pytest.raises(RuntimeError), files.atomic_output(out) as partial:
        write(partial)
        raise RuntimeError
    assert list(out.parent.iterdir()) == []
    write(partial)  # left by a process that was killed
    with files.atomic_output(out) as partial:
        assert not partial.exists()
        write(partial)
        assert not out.exists()
    assert list(out.parent.iterdir()) == [out]
    assert (out / "file" if kind == "folder" else out).read_bytes() == b"content"
    with pytest.raises(ConfigError, match=r"--out .*out: already exists; choose another name"):
        files.atomic_output(out).__enter__()
