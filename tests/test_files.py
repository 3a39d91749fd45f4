import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptmini import files


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
