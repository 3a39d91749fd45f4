"""Datasets of the Hub by name, from a Hub on this machine."""

import io
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="needs the extra data")
pytest.importorskip("huggingface_hub", reason="needs the extra hub")
import pyarrow
import pyarrow.parquet
from huggingface_hub import constants

from gptmini.config.settings import DataConfig
from gptmini.config.yamlfile import read_file
from gptmini.data.hub import HubName
from gptmini.data.hub_dataset import fetch_dataset, parse_dataset_name, pin_revision
from gptmini.data.text import find_text
from gptmini.errors import DataError
from tests.local_hub import LocalHub
from tests.support import SMALL, WORDS

NAME = "Somebody/stories"
BYTES = [*SMALL, "--set", "tokenizer.kind=byte"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr("time.sleep", lambda _: None)


def parquet(*texts: str, column: str = "text") -> bytes:
    table = pyarrow.table({column: list(texts), "id": list(range(len(texts)))})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, row_group_size=2)
    return buffer.getvalue()


def stories(word: str, count: int = 40) -> bytes:
    return parquet(*(f"{word} {number}: {WORDS}" for number in range(count)))


def files_of(path: str) -> list[str]:
    """The files that a name stands for, by their paths in the repository."""
    return [file.as_posix().split("/snapshots/")[1][41:] for file in fetch_dataset(path)]


def read(path: str) -> list[str]:
    source = find_text([path], DataConfig())
    return [chunk.text for chunk in source.iter_chunks()]


# -- what a name stands for ------------------------------------------------------------------------


def test_names_have_a_revision_and_a_pattern():
    for name, revision, pattern in (
        ("a/b", None, None),
        ("a/b", "refs/pr/1", "c/*.txt"),
        ("a/b", None, "é [1].csv"),
        ("squad", None, None),
        ("gpt2", "main", "x"),
    ):
        dataset = HubName(name, revision, pattern)
        assert parse_dataset_name(str(dataset)) == dataset
    for wrong in ("hf:", "hf:a/b:c:train", "hf:a b", "hf:/a", "hf:a/b@/c", "hf:../b", "hf:a/b/"):
        with pytest.raises(DataError, match=wrong):
            parse_dataset_name(wrong)


SHARDS = [f"data/train-0000{n}-of-00002.parquet" for n in range(2)]
HELD_OUT = ["data/validation-00000-of-00001.parquet", "data/test.parquet"]
# The files of a dataset, and what its name, or that with a pattern, stands for; a text is part of
# the error.
CHOICES = {
    "the shards of the training split": (
        [*SHARDS, *HELD_OUT, "README.md"],
        {
            "": SHARDS,
            "/data": SHARDS,
            "/data/validation*": HELD_OUT[:1],
            "/data/test.parquet": HELD_OUT[1:],
            "/*-of-*": [*SHARDS, *HELD_OUT[:1]],
            "/nothing": "nothing",
            "/*.md": "README.md",
        },
    ),
    "one format": (
        ["a.csv", "a.jsonl.gz", "a.txt", "b.JSONL", "b.ndjson", "picture.png", "code.py"],
        {"": ["a.jsonl.gz", "b.JSONL", "b.ndjson"], "/a.*": ["a.csv", "a.jsonl.gz", "a.txt"]},
    ),
    "splits are folders, and words": (
        ["train/0.txt", "dev/0.txt", "eval/0.txt", "test-set/train_1.txt", "a.zip"],
        {"/train": ["train/0.txt"], "/dev": ["dev/0.txt"], "": "test-set, train"},
    ),
    "no word is part of another": (
        ["contest.txt", "developer.txt", "trainer.txt", "x_valid.txt"],
        {"": ["contest.txt", "developer.txt", "trainer.txt"]},
    ),
    "only a test split": (["test.csv"], {"": ["test.csv"]}),
    "several folders": (
        ["de/train.csv", "en/1/train.csv", "en/2/train.csv", "train.csv"],
        {"": "/de", "/de": ["de/train.csv"], "/en": "/en/1", "/en/2/": ["en/2/train.csv"]}
        | {"/en/*": ["en/1/train.csv", "en/2/train.csv"]},
    ),
    "nothing to read": (["data.json", "data.tar.gz", "README.md"], {"": "data.tar.gz"}),
}


@pytest.mark.parametrize("layout", CHOICES)
def test_a_name_stands_for_files(local_hub: LocalHub, layout):
    names, choices = CHOICES[layout]
    local_hub.add(NAME, dict.fromkeys(names, b""), "dataset")
    for pattern, chosen in choices.items():
        if isinstance(chosen, list):
            assert files_of(f"hf:{NAME}{pattern}") == chosen
            continue
        with pytest.raises(DataError) as caught:
            fetch_dataset(f"hf:{NAME}{pattern}")
        assert chosen in str(caught.value)
        assert str(caught.value).startswith(f"hf:{NAME}: ")


def test_a_file_name_that_leaves_the_cache_is_not_read(gptmini, local_hub: LocalHub, tmp_path):
    (tmp_path / "secret.txt").write_text("secret " * 999)
    for name in (str(tmp_path / "secret.txt"), "../../../../secret.txt", "a/../../s.txt"):
        local_hub.add(NAME, {name: b"secret " * 999}, "dataset")
        expect_one_line(gptmini("train", f"hf:{NAME}/{name}", *BYTES), 5, "Invalid filename")


def test_foreign_names_do_not_reach_the_terminal_raw(gptmini, local_hub: LocalHub):
    local_hub.add(NAME, {"\x1b[31m.json": b"", "\x07.png": b""}, "dataset")
    code, _, err = gptmini("train", f"hf:{NAME}", *BYTES)
    assert code == 3
    assert "\\x1b[31m.json" in err
    assert not {"\x1b", "\x07"} & set(err)


# -- reading ---------------------------------------------------------------------------------------


def test_the_text_is_that_of_the_files_in_order(local_hub: LocalHub):
    files = {
        "data/train-00001-of-00002.parquet": parquet("c"),
        "data/train-00000-of-00002.parquet": parquet("a", "b"),
        "more/train.jsonl": b'{"text": "d"}\n',
        "test.parquet": parquet("held out", column="body"),
    }
    local_hub.add(NAME, files, "dataset")
    assert read(f"hf:{NAME}/data") == ["a", "b", "c"]
    assert read(f"hf:{NAME}/*train*") == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match=r"test.parquet: .* data.text_key"):
        read(f"hf:{NAME}/test.parquet")


def test_only_what_is_read_is_downloaded_and_only_once(gptmini, local_hub: LocalHub):
    files = {f"{split}.parquet": stories(split) for split in ("train", "test")}
    local_hub.add(NAME, files, "dataset")
    for _ in range(2):
        code, _, err = gptmini("data", "prepare", "--data", f"hf:{NAME}", *BYTES[4:])
        assert code == 0, err
        assert len(local_hub.downloads("train.parquet")) == 1
        assert not local_hub.downloads("test.parquet")


# -- training --------------------------------------------------------------------------------------


def test_a_run_keeps_its_revision(gptmini, local_hub: LocalHub):
    """Cut off and resumed, it ends with its own bits, whatever is new."""
    files = {"train.parquet": stories("a"), "test.parquet": stories("b")}
    commit = local_hub.add(NAME, files, "dataset")
    command = ["train", "--data", f"hf:{NAME}/train*", *BYTES]
    command += ["--set", f"data.validation_path=hf:{NAME}/test.parquet"]
    assert gptmini(*command)[0] == 0
    settings = read_file(Path("runs/stories/config.yaml"))[0]["data"]
    assert settings["path"] == [f"hf:{NAME}@{commit}/train*"]
    assert settings["validation_path"] == [f"hf:{NAME}@{commit}/test.parquet"]
    last = Path("runs/stories/checkpoints/step-00000004")
    weights = (last / "model.safetensors").read_bytes()

    newer = local_hub.add(NAME, {name: stories("new") for name in files}, "dataset")
    local_hub.requests.clear()
    shutil.rmtree(last)  # as if it had been killed before
    code, _, err = gptmini(*command)
    assert code == 0, err
    assert f"hf:{NAME}@{commit}/train*: " in err
    assert (last / "model.safetensors").read_bytes() == weights
    assert local_hub.requests == []
    assert pin_revision(f"hf:{NAME}/train*", []) == f"hf:{NAME}@{newer}/train*"


def test_a_gated_dataset_costs_one_line_with_the_page_of_its_terms(gptmini, local_hub: LocalHub):
    local_hub.add(NAME, {"train.parquet": stories("a"), "README.md": b"#"}, "dataset")
    local_hub.statuses = {"resolve": (403, "GatedRepo")}
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), 3, "/datasets/Somebody/stories")


def expect_one_line(result: tuple[int, str, str], code: int, named: str) -> None:
    found, out, err = result
    (line,) = err.splitlines()
    assert (found, out) == (code, ""), err
    assert line.startswith(f"gptmini: hf:{NAME}: ")
    assert "; " in line
    assert named in line
    assert not Path("runs").exists()


def test_offline_a_dataset_without_its_list_of_files_is_refused(
    gptmini, local_hub: LocalHub, monkeypatch
):
    """The cache may have some of its files only, which would be another text."""
    names = [f"data/train-{n:05}-of-00002.parquet" for n in range(2)]
    local_hub.add(NAME, {name: stories(name) for name in names}, "dataset")
    local_hub.statuses = {"00001-of": (500, "")}
    assert gptmini("train", f"hf:{NAME}", *BYTES)[0] == 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), 5, "HF_HUB_OFFLINE")
    (listed,) = Path("hub").rglob("trees")
    shutil.rmtree(listed)
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), 5, "HF_HUB_OFFLINE")


def test_without_the_packages_the_extras_are_named_before_the_download(
    gptmini, local_hub: LocalHub, monkeypatch
):
    local_hub.add(NAME, {"train.parquet": stories("a")}, "dataset")
    for package, extra in (("pyarrow", "data"), ("huggingface_hub", "hub")):
        monkeypatch.setitem(sys.modules, package, None)
        code, _, err = gptmini("train", f"hf:{NAME}", *BYTES)
        assert code == 5
        assert f"hf:{NAME}" in err
        assert package in err
        assert f"[{extra}]" in err
    assert not local_hub.downloads("train.parquet")
