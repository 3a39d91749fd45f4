import gzip
import io
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptmini import files
from gptmini.config.settings import DataConfig
from gptmini.data.formats import warn_once
from gptmini.data.text import BUILTIN_CORPORA, Split, find_text, say_once, spool_stdin
from gptmini.errors import DataError
from tests.support import needs_posix

SPLITS: tuple[Split, ...] = ("training", "validation")


def texts(*paths: str, **options: object) -> list[str]:
    source = find_text(list(paths), DataConfig.model_validate(options))
    return [piece.text for piece in source.iter_chunks()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name in ("b.md", "a.txt", "sub/c.txt", "sub/deep/d.txt", ".hidden", ".git/x", "empty.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.stem * (name != "empty.txt"))
    return root


def test_folders_are_read_in_order_without_hidden_files(folder: Path):
    assert texts(str(folder)) == ["a", "b", "c", "d"]
    assert texts(f"{folder}/sub", str(folder / "b.md")) == ["c", "d", "b"]


def test_the_order_of_files_is_not_that_of_the_disk(tmp_path: Path, monkeypatch):
    walk = os.walk

    def walk_in_another_order(*given: Any, **options: Any) -> Iterator[Any]:
        for root, folders, names in walk(*given, **options):
            folders.sort(reverse=True)
            names.sort(reverse=True)
            yield root, folders, names

    monkeypatch.setattr(os, "walk", walk_in_another_order)
    paths = [f"{folder}/{name}" for folder in "abc" for name in "xyz"]
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    assert texts(str(tmp_path)) == paths
    assert texts(f"{tmp_path}/**") == paths


def test_globs_select_files(folder: Path):
    assert texts(f"{folder}/**/*.txt") == ["a", "c", "d"]
    assert texts(f"{folder}/*.md") == ["b"]
    (folder / "a[1].txt").write_text("not a pattern")
    assert texts(f"{folder}/a[1].txt") == ["not a pattern"]


def test_links_to_folders_are_not_followed(folder: Path):
    (folder / "sub" / "one").symlink_to(folder)
    (folder / "sub" / "two").symlink_to(folder)  # 2 ** 40 paths
    assert texts(str(folder)) == texts(f"{folder}/**") == ["a", "b", "c", "d"]
    assert texts(f"{folder}/**/sub/**/*.txt") == ["c", "d"]
    assert texts(f"{folder}/sub/one/*.md") == ["b"]  # a link that is named is followed


def test_links_that_lead_nowhere_are_skipped_in_folders(folder: Path):
    (folder / "self").symlink_to(folder / "self")
    (folder / "gone.txt").symlink_to(folder / "no such file")
    assert texts(str(folder)) == texts(f"{folder}/**") == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match="self: too many levels of symbolic links"):
        texts(f"{folder}/self")


def test_files_that_are_not_text_are_skipped_in_folders(folder: Path, capsys):
    (folder / "cover.jpg").write_bytes(b"\xff\xd8\xff\xe0\0")
    (folder / "sub" / "x.dat").write_bytes(b"a\0")
    for path, expected, count in [
        ("", ["a", "b", "c", "d"], "5 of 7 files read; skipped cover.jpg, x.dat"),
        ("/*", ["a", "b"], "3 of 4 files read; skipped cover.jpg"),
    ]:
        assert texts(f"{folder}{path}") == expected
        first, *each = capsys.readouterr().err.splitlines()
        assert first == f"warning: {folder}{path}: {count}"
        assert len(each) == count.count(".")
        problem = "binary data, not plain text; unpack it, or choose a text file"
        assert each[0] == f"  {folder}/cover.jpg: {problem}"
    with pytest.raises(DataError, match=r"cover.jpg: binary data, not plain text; unpack"):
        texts(str(folder / "cover.jpg"))
    with pytest.raises(DataError, match=r"no text in it, but .*jpg: binary data, not"):
        texts(f"{folder}/*.jpg")


UNREADABLE = {
    "desktop.ini": "text".encode("utf-16"),
    "events.jsonl": b'{"event": "a"}\n',
    "latin.c": "/* déjà vu */".encode("latin-1"),
    "numbers.csv": b"id,name\n1,one\n",
}


def test_what_stops_a_named_file_does_not_stop_its_folder(folder: Path, capsys):
    for name, content in UNREADABLE.items():
        (folder / name).write_bytes(content)
    assert texts(str(folder)) == ["a", "b", "c", "d"]
    warning, *skipped = capsys.readouterr().err.splitlines()
    assert warning == (
        f"warning: {folder}: 5 of 9 files read; skipped events.jsonl, numbers.csv, desktop.ini, "
        f"latin.c"
    )
    assert "events.jsonl:1: no field 'text' (it has: event); " in skipped[1]
    assert f"{folder}/latin.c > {folder}/latin-utf8.c; or mark" in skipped[2]
    with pytest.raises(DataError) as error:
        find_text([str(folder / name) for name in UNREADABLE], DataConfig())
    assert len(error.value.lines) == len(UNREADABLE)


def test_of_many_skipped_files_one_of_records_is_named(folder: Path, capsys):
    for number in range(10):
        (folder / f"{number}.jpg").write_bytes(b"\0")
    (folder / "events.jsonl").write_bytes(b'{"event": "a"}\n')
    assert texts(str(folder)) == ["a", "b", "c", "d"]
    warning, example = capsys.readouterr().err.splitlines()
    assert "5 of 16 files read; skipped events.jsonl, 0.jpg, 1.jpg" in warning
    assert warning.endswith("8.jpg and 1 more")
    assert "events.jsonl:1: no field 'text'" in example


def test_every_command_says_which_files_it_reads_and_once_why_not_the_others(folder: Path, capsys):
    def read_in_another_process() -> str:
        warn_once.cache_clear()
        say_once.cache_clear()
        texts(str(folder))
        texts(str(folder))
        return capsys.readouterr().err

    assert not read_in_another_process()
    (folder / "cover.jpg").write_bytes(b"\0")
    warning = f"warning: {folder}: 5 of 6 files read; skipped cover.jpg\n"
    assert read_in_another_process().startswith(f"{warning}  {folder}/cover.jpg: binary data, ")
    assert read_in_another_process() == warning


def test_a_warning_needs_no_cache(folder: Path, capsys, monkeypatch):
    monkeypatch.setenv("GPTMINI_CACHE", "/dev/null/x")
    (folder / "cover.jpg").write_bytes(b"\0")
    texts(str(folder))
    assert "5 of 6 files read; skipped cover.jpg" in capsys.readouterr().err


def test_a_file_that_is_read_twice_is_reported(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert texts(".", str(folder / "b.md")) == ["a", "b", "c", "d", "b"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {folder / 'b.md'}: read twice; ")


def test_runs_are_no_text(folder: Path, capsys):
    expected = texts(str(folder))
    for name in ("a/config.yaml", "a/request.yaml", "b/config.yaml", "b/checkpoints/step"):
        path = folder / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("no text")
    assert texts(str(folder)) == texts(f"{folder}/**") == expected
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "e.txt").write_text("chess")
    assert texts(str(folder)) == ["a", "b", "chess", "c", "d"]
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["e.html", "e.json", "e.tsv", "e.ipynb.gz"])
def test_markup_is_read_with_a_warning(folder: Path, capsys, name):
    content = b'{"text": "<p>e</p>"}'
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (folder / "sub" / name).write_bytes(packed)
    for _ in range(2):  # and one warning
        assert texts(str(folder / "sub")) == ["c", content.decode(), "d"]
    warning = "trained on with its markup; to avoid that, extract the text"
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"warning: {folder}/sub/{name}: {warning}"


def test_carriage_returns_change_the_digest(folder: Path):
    def digest(content: bytes) -> str:
        (folder / "a.txt").write_bytes(content)
        return find_text([str(folder / "a.txt")], DataConfig()).digest

    # these two were the hashes when CR was kept: the first stays valid, the second must not
    assert digest(b"one\ntwo\n").startswith("4ef6cb1ab957")
    assert not digest(b"one\r\ntwo").startswith("4e5aa637a183")


def test_unusable_paths_are_reported(tmp_path: Path, folder: Path):
    (tmp_path / "empty").mkdir()
    for path, words in [
        (str(tmp_path / "empty"), "no files found"),
        (f"{tmp_path}/*.rst", "no files found"),
        (str(tmp_path / "none.txt"), "no such file"),
        ("a\0b", "embedded null"),
        ("/dev/null", "not a regular file"),
        ("builtin:x", "choose builtin:stories, builtin:python-docs"),
    ]:
        with pytest.raises(DataError, match=words):
            texts(path)


@needs_posix
def test_what_is_no_file_is_skipped_in_folders(folder: Path, capsys):
    os.mkfifo(folder / "sub" / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    assert texts(str(folder)) == texts(f"{folder}/**") == ["a", "b", "c", "d"]
    said = capsys.readouterr().err
    assert said.count("5 of 7 files read; skipped ") == 2
    assert said.count("sub/fifo: not a regular file; pipe it in with --data -") == 2
    with pytest.raises(DataError, match="socket: not a regular file"):
        texts(str(folder / "socket"))


def test_a_missing_known_corpus_names_its_download(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        texts("data/tinyshakespeare.txt")
    assert error.value.lines == (
        "data/tinyshakespeare.txt: no such file or directory; get it with "
        "gptmini data fetch tinyshakespeare",
    )
    with pytest.raises(DataError, match=r"none\.txt: no such file or directory; check the path"):
        texts("data/none.txt")


def test_what_may_not_be_read_is_skipped_in_folders(folder: Path, monkeypatch, capsys):
    opened = files.open_regular
    walked = os.walk

    def refuse(path: Path) -> object:  # root could read what is only locked by its mode
        if path.name == "c.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    def refuse_folder(top: Path, onerror: Any) -> Iterator[Any]:
        for root, folders, names in walked(top):
            yield root, folders, names
            if "deep" in folders:
                folders.remove("deep")
                onerror(PermissionError(13, "Permission denied", str(Path(root, "deep"))))

    monkeypatch.setattr(files, "open_regular", refuse)
    monkeypatch.setattr(os, "walk", refuse_folder)
    assert texts(str(folder)) == ["a", "b"]
    first, *skipped = sorted(capsys.readouterr().err.splitlines(), reverse=True)
    assert first == f"warning: {folder}: 3 of 5 files read; skipped deep, c.txt"
    assert all("permission denied; check" in line for line in skipped)
    with pytest.raises(DataError, match=r"sub/c.txt: permission denied; check its permissions"):
        texts(str(folder / "sub" / "c.txt"))


def test_a_file_that_vanishes_or_changes_is_reported(folder: Path):
    source = find_text([str(folder)], DataConfig())
    (folder / "b.md").write_text("another text")
    with pytest.raises(DataError, match=r"b.md: changed while being read"):
        list(source.iter_chunks())
    (folder / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a.txt: no such file"):
        _ = source.digest


@pytest.mark.parametrize("name", BUILTIN_CORPORA)
def test_builtin_corpora_have_many_documents(name):
    pieces = list(find_text([name], DataConfig()).iter_chunks())
    assert sum(piece.starts_document for piece in pieces) > 50
    assert sum(len(piece.text) for piece in pieces) > 300_000


def test_the_digest_depends_on_content_kind_order_and_options(folder: Path):
    def digest(*paths: Path, **options: object) -> str:
        settings = DataConfig.model_validate(options)
        return find_text([str(path) for path in paths], settings).digest

    a, b = folder / "a.txt", folder / "b.md"
    a.write_text('{"text": "a"}')
    first = digest(a, b)
    assert first == digest(a, b, validation=0.5, split="documents")
    os.utime(a, (0, 0))
    assert first == digest(a, b)
    moved = folder / "moved.txt"
    moved.write_bytes(a.read_bytes())
    assert first == digest(moved, b)
    moved.rename(folder / "a.jsonl")
    others = [digest(b, a), digest(a), digest(a, b, separator="\n"), digest(a, b, text_key="x")]
    others += [digest(a, b, errors="replace"), digest(folder / "a.jsonl", b)]
    source = replace(find_text([str(a), str(b)], DataConfig()), validation=0.1)
    by_document = replace(source, settings=DataConfig(split="documents"))
    others += [each.hash_split(split) for each in (source, by_document) for split in SPLITS]
    a.write_text("A")
    others.append(digest(a, b))
    assert len({first, *others}) == 12


def test_the_side_of_a_document_does_not_depend_on_the_others(tmp_path: Path):
    path = tmp_path / "a.txt"
    words = [f"document {n}" for n in range(1000)]

    def sides(documents: list[str]) -> list[list[str]]:
        path.write_text("|".join(documents))
        settings = {"separator": "|", "split": "documents"}
        source = find_text([str(path)], DataConfig.model_validate(settings))
        parts = [replace(source, validation=0.2).iter_splits([split]) for split in SPLITS]
        return [[piece.text for _, piece in part] for part in parts]

    training, validation = sides(words)
    assert sorted(training + validation) == sorted(words)
    assert 150 < len(validation) < 250
    fewer = sides(words[::-3])
    assert set(fewer[0]) <= set(training)
    assert set(fewer[1]) <= set(validation)


def test_standard_input_becomes_a_temporary_file(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"typed in")))
    (tmp_path / "cache").mkdir()
    with spool_stdin(["a", "-"], tmp_path / "cache") as paths:
        assert paths[0] == "a"
        assert texts(paths[1]) == ["typed in"]
    assert list((tmp_path / "cache").iterdir()) == []
