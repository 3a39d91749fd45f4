import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gptmini import files
from gptmini.errors import CheckpointError, ConfigError, MachineError


def test_only_regular_files_are_opened(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert files.read_regular(tmp_path / "link") == b"content"
    os.mkfifo(tmp_path / "fifo")
    # in a process of its own: an open that waits for a writer cannot be interrupted otherwise
    check = "import sys; from gptmini import files; files.read_regular(sys.argv[1])"
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        words = [sys.executable, "-c", check, str(path)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
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
    partial.parent.mkdir()
    write(partial)  # left by a process that was killed
    with files.atomic_output(out) as partial:
        assert not partial.exists()
        write(partial)
        assert not out.exists()
    assert list(out.parent.iterdir()) == [out]
    assert (out / "file" if kind == "folder" else out).read_bytes() == b"content"
    with pytest.raises(ConfigError, match=r"--out .*out: already exists; choose another name"):
        files.atomic_output(out).__enter__()


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_path_without_a_name_is_an_output_that_exists(name: str):
    with pytest.raises(ConfigError, match="already exists; choose another name"):
        files.atomic_output(Path(name)).__enter__()


def test_of_two_writers_of_an_output_the_second_is_told(tmp_path: Path):
    out = tmp_path / "out"
    with files.atomic_output(out) as partial:
        with pytest.raises(
            MachineError, match="out: another process is writing it; choose another"
        ):
            files.atomic_output(out).__enter__()
        partial.write_bytes(b"first")
    assert out.read_bytes() == b"first"


def test_a_failed_output_is_named_as_the_user_named_it(tmp_path: Path):
    out = tmp_path / "out"
    full = OSError("4096 requested and 328 written")  # as numpy reports a full disk
    with pytest.raises(MachineError) as caught, files.atomic_output(out):
        raise full
    (line,) = caught.value.lines
    assert line.startswith(f"{out}: could not be written (no space left on device), ")
    assert line.endswith(" bytes free; choose another place with --out")
    with pytest.raises(CheckpointError) as other, files.atomic_output(out) as partial:
        raise CheckpointError(f"{partial / 'file'}: damaged")
    assert other.value.lines == (f"{out / 'file'}: damaged",)
    with pytest.raises(FileNotFoundError), files.atomic_output(out):  # of what is read meanwhile
        (tmp_path / "none").read_bytes()
    long = tmp_path / ("x" * 250)  # with what stands before it, too long for a file system
    with pytest.raises(MachineError, match="x: could not be written"):
        files.atomic_output(long).__enter__()
    with pytest.raises(OSError, match="name too long") as too_long:
        files.atomic_write_bytes(long, b"")
    assert too_long.value.filename == str(long)
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_where_only_folders_cannot_be_synced(tmp_path, monkeypatch):
    """Some network drives and FUSE."""
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    files.atomic_write_bytes(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    monkeypatch.setattr(files, "sync", lambda _: os.fsync(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.sync_directory(tmp_path)


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(OSError, match="no space") as raised:
        files.atomic_write_bytes(tmp_path / "file", b"a")
    assert raised.value.filename == str(tmp_path / "file")


def test_the_cache_is_where_the_desktop_keeps_caches(tmp_path):
    script = "from gptmini import files; print(files.get_cache_folder())"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    del environment["GPTMINI_CACHE"]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True
    )
    assert done.stdout == f"{tmp_path / 'gptmini'}\n"


def test_an_output_with_a_name_that_is_not_utf8_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"caf\\udce9': not UTF-8; choose another name"):
        files.atomic_output(tmp_path / "caf\udce9").__enter__()
