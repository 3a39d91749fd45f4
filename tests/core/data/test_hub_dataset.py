"""Datasets of the Hub by name, from a Hub on this machine."""

import io
import json
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
from gptmini.data.hub_dataset import find_dataset_files, parse_dataset_name, pin_revision
from gptmini.data.sources import find_source
from gptmini.errors import DataError
from tests.local_hub import NO_ENDPOINT, LocalHub, set_endpoint
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


def card(*configs: dict) -> bytes:
    return f"---\nlicense: mit\nlanguage:\n- no\nconfigs: {json.dumps(configs)}\n---\n# A".encode()


def files_of(path: str) -> list[str]:
    return [file.name for file in find_dataset_files(path).files]


def read(path: str) -> list[str]:
    source = find_source([path], DataConfig())
    return [chunk.text for chunk in source.iter_chunks()]


# -- what a name stands for ------------------------------------------------------------------------


def test_names_have_a_revision_and_three_parts():
    parsed = parse_dataset_name("hf:a/b@refs/pr/1:c::text")
    assert (parsed.name, parsed.revision, parsed.parts) == ("a/b", "refs/pr/1", ":c::text")
    assert parse_dataset_name("hf:squad").name == "squad"
    for wrong in ("hf:", "hf:a/b/c", "hf:a/b:c:d:e:f", "hf:a b", "hf:/a", "hf:a/b@:c", "hf:../b"):
        with pytest.raises(DataError, match=r"not a dataset; write hf:OWNER/NAME, and after it"):
            parse_dataset_name(wrong)


LAYOUTS = {
    "by folder data": (
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["data/validation-00000-of-00001.parquet", "README.md", "x.csv"],
    ),
    "any name": (["b/0.parquet", "train.parquet"], ["dev.parquet", "b/test/0.parquet"]),
    "words": (["my_training-set.parquet", "trainer.parquet"], ["valid_1.parquet"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_file_names_say_the_split(local_hub: LocalHub, layout):
    training, others = LAYOUTS[layout]
    local_hub.add(NAME, dict.fromkeys(training + others, b""), "dataset")
    assert files_of(f"hf:{NAME}") == sorted(training)
    assert files_of(f"hf:{NAME}:train") == sorted(training)
    (held_out,) = files_of(f"hf:{NAME}:validation")
    assert held_out == others[0]


def test_the_card_says_configurations_and_splits(local_hub: LocalHub):
    names = ["en/a/1.parquet", "en/2.parquet", "de/1.parquet", "de/dev.parquet", "v-1.parquet"]
    described = card(
        {"config_name": "en", "data_files": [{"split": "train", "path": ["en/**", "en/*"]}]},
        {"config_name": "de", "data_dir": "de", "default": True},
        {"config_name": "flat", "data_files": {"validation": "./v-*.parquet"}},
        {"config_name": "none", "data_files": "*.csv"},
        {"config_name": "all", "data_files": "*.parquet"},
    )
    local_hub.add(NAME, dict.fromkeys(names, b"") | {"README.md": described}, "dataset")
    assert files_of(f"hf:{NAME}:en") == ["en/2.parquet", "en/a/1.parquet"]
    assert files_of(f"hf:{NAME}") == ["de/1.parquet"]  # the default
    assert files_of(f"hf:{NAME}:de:validation") == ["de/dev.parquet"]
    assert files_of(f"hf:{NAME}:flat") == ["v-1.parquet"]  # its only split
    assert files_of(f"hf:{NAME}:all") == ["v-1.parquet"]  # a star stays in its folder
    assert find_dataset_files(f"hf:{NAME}:flat:body").column == "body"
    assert find_dataset_files(f"hf:{NAME}:::body").column == "body"
    with pytest.raises(
        DataError,
        match=r"hf:Somebody/stories: has no 'fr'; its configurations are en, de, flat, all, "
        r"default, the splits of default train, validation",
    ):
        find_dataset_files(f"hf:{NAME}:fr:train")


def test_several_configurations_are_listed(local_hub: LocalHub):
    described = card(
        *({"config_name": f"c{n}", "data_files": f"{n}.parquet"} for n in range(12)),
        {"config_name": "splits", "data_files": {"a": "1.parquet", "b": "2.parquet"}},
    )
    names = [f"{n}.parquet" for n in range(12)]
    local_hub.add(NAME, dict.fromkeys(names, b"") | {"README.md": described}, "dataset")
    with pytest.raises(
        DataError,
        match=r"has several configurations; choose one, as in hf:Somebody/stories:c0 \(it has c0, "
        r".*, c9 and 3 more\)",
    ):
        find_dataset_files(f"hf:{NAME}")
    with pytest.raises(DataError, match=r"has several splits; choose one, .* \(it has a, b\)"):
        find_dataset_files(f"hf:{NAME}:splits")


def test_other_formats_are_read_from_the_conversion_of_the_hub(local_hub: LocalHub):
    local_hub.add(NAME, {"data.jsonl": b"{}", "README.md": b"# No settings"}, "dataset")
    line = r"has no Parquet files, and the Hub has not converted it; download its files, and name"
    with pytest.raises(DataError, match=line):
        find_dataset_files(f"hf:{NAME}")
    converted = [
        *("en/train/0000.parquet", "en/train/0001.parquet", "en/test/0000.parquet"),
        "de/partial-train/0000.parquet",
    ]
    files = dict.fromkeys(converted, b"")
    commit = local_hub.add(NAME, files, "dataset", "refs/convert/parquet")
    assert files_of(f"hf:{NAME}:en") == converted[:2]
    assert files_of(f"hf:{NAME}:de") == ["de/partial-train/0000.parquet"]
    assert pin_revision(f"hf:{NAME}:en", []) == f"hf:{NAME}@{commit}:en"
    with pytest.raises(DataError, match=r"has no Parquet files; download its files"):
        find_dataset_files(f"hf:{NAME}@main")


@pytest.mark.parametrize(
    "readme",
    [
        b"---\nconfigs: [1]\n---\n",
        b"---\nconfigs: [{data_files: [{split: a}]}]\n---\n",
        b"---\nconfigs: [{data_files: {a: 1}}]\n---\n",
        b"---\nconfigs: [\n---\n",
        b"---\n- 1\n---\n",
        b"---\nconfigs: \xff\n---\n",
    ],
)
def test_a_damaged_card_is_named(local_hub: LocalHub, readme):
    local_hub.add(NAME, {"README.md": readme, "train.parquet": b""}, "dataset")
    with pytest.raises(DataError, match=r"hf:Somebody/stories: README.md: .*; download its files"):
        find_dataset_files(f"hf:{NAME}")


# -- reading ---------------------------------------------------------------------------------------


def test_the_text_is_that_of_the_files_in_order(local_hub: LocalHub):
    files = {
        "data/train-00001-of-00002.parquet": parquet("c"),
        "data/train-00000-of-00002.parquet": parquet("a", "b"),
        "test.parquet": parquet("held out", column="body"),
    }
    local_hub.add(NAME, files, "dataset")
    assert read(f"hf:{NAME}") == ["a", "b", "c"]
    assert read(f"hf:{NAME}:test:body") == ["held out"]
    line = (
        r"hf:Somebody/stories: test.parquet has no column 'tset' \(it has: body, id\); name one of "
        r"these last, as in hf:Somebody/stories:body"
    )
    with pytest.raises(DataError, match=line):
        read(f"hf:{NAME}:test:tset")
    with pytest.raises(DataError, match=r"test.parquet has no column 'text'"):
        read(f"hf:{NAME}:test")


def test_only_what_is_read_is_downloaded_and_only_once(gptmini, local_hub: LocalHub):
    files = {f"{split}.parquet": stories(split) for split in ("train", "test")}
    local_hub.add(NAME, files, "dataset")
    assert gptmini("data", "prepare", "--data", f"hf:{NAME}", *BYTES[4:])[0] == 0
    assert len(local_hub.downloads("train.parquet")) == 1
    assert not local_hub.downloads("test.parquet")
    local_hub.requests.clear()
    shutil.rmtree(next(Path("hub").glob("datasets--*/blobs")))  # the tokens are there
    assert gptmini("data", "prepare", "--data", f"hf:{NAME}", *BYTES[4:])[0] == 0
    assert not local_hub.downloads(".parquet")


def test_content_and_column_are_the_identity_not_the_place(local_hub: LocalHub):
    def digest(path: str) -> str:
        return find_source([path], DataConfig()).digest

    files = {"train.parquet": stories("one")}
    local_hub.add(NAME, files, "dataset")
    first = digest(f"hf:{NAME}")
    local_hub.add("Other/copy", files, "dataset")
    local_hub.add(NAME, files | {"README.md": b"new"}, "dataset")
    assert digest(f"hf:{NAME}") == digest("hf:Other/copy") == first
    assert digest(f"hf:{NAME}:train:id") != first
    local_hub.add(NAME, {"train.parquet": stories("two")}, "dataset")
    assert digest(f"hf:{NAME}") != first
    assert not local_hub.downloads(".parquet")


# -- training --------------------------------------------------------------------------------------


def test_a_run_keeps_its_revision(gptmini, local_hub: LocalHub):
    """Cut off and resumed, by either command, it ends with its own bits, whatever is new."""
    files = {"train.parquet": stories("a"), "test.parquet": stories("b")}
    commit = local_hub.add(NAME, files, "dataset")
    command = ["train", "--data", f"hf:{NAME}:train", *BYTES, "--no-sample"]
    command += ["--set", f"data.validation_path=hf:{NAME}:test"]
    assert gptmini(*command)[0] == 0
    settings = read_file(Path("runs/stories/config.yaml"))[0]["data"]
    assert settings["path"] == [f"hf:{NAME}@{commit}:train"]
    assert settings["validation_path"] == [f"hf:{NAME}@{commit}:test"]
    last = Path("runs/stories/checkpoints/step-00000004")
    weights = (last / "model.safetensors").read_bytes()

    newer = local_hub.add(NAME, {name: stories("new") for name in files}, "dataset")
    local_hub.requests.clear()
    for resume in (command, ["train", "runs/stories", "--no-sample"]):
        shutil.rmtree(last)  # as if it had been killed before
        code, _, err = gptmini(*resume)
        assert code == 0, err
        assert f"hf:{NAME}@{commit}:train: " in err
        assert (last / "model.safetensors").read_bytes() == weights
    assert gptmini("evaluate", "runs/stories")[0] == 0
    assert local_hub.requests == []
    code, _, err = gptmini(*command, "--out", "runs/new")
    assert code == 0
    assert f"hf:{NAME}@{newer}:train: " in err
    assert (Path("runs/new") / last.relative_to("runs/stories")).exists()


def test_a_run_resumes_without_network(gptmini, local_hub: LocalHub, monkeypatch):
    local_hub.add(NAME, {"train.parquet": stories("a")}, "dataset")
    command = ["train", f"hf:{NAME}", *BYTES, "--no-sample"]
    assert gptmini(*command, "--steps", "2")[0] == 0
    set_endpoint(monkeypatch, NO_ENDPOINT)
    assert gptmini(*command, "--steps", "3")[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert gptmini(*command)[0] == 0
    assert gptmini(*command, "--out", "runs/offline")[0] == 0  # the newest in the cache


# What the Hub answers, by a part of the path; the exit code; a part of the line.
FAULTS = {
    "gated": ({"resolve": (403, "GatedRepo")}, 3, "/datasets/Somebody/stories, then set HF_TOKEN"),
    "private": (
        {"/api/": (401, "RepoNotFound")},
        3,
        "no such dataset on the Hub, or a private one",
    ),
    "too many requests": ({"/api/": (429, "")}, 5, "too many requests (429); wait a few minutes"),
    "broken": ({"train.parquet": (502, "")}, 5, "the Hub answers 502; try again later"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_of_the_hub_costs_one_line(gptmini, local_hub: LocalHub, fault):
    statuses, code, named = FAULTS[fault]
    local_hub.add(NAME, {"train.parquet": stories("a"), "README.md": b"#"}, "dataset")
    local_hub.statuses = statuses
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), code, named)


def expect_one_line(result: tuple[int, str, str], code: int, named: str) -> None:
    found, out, err = result
    (line,) = err.splitlines()
    assert (found, out) == (code, ""), err
    assert line.startswith(f"gptmini: hf:{NAME}: ")
    assert "; " in line
    assert named in line
    assert not Path("runs").exists()


def test_bytes_with_another_hash_are_not_read(gptmini, local_hub: LocalHub):
    local_hub.add(NAME, {"train.parquet": stories("a")}, "dataset")
    local_hub.spoiled.add("train.parquet")
    named = "train.parquet: damaged on its way, and deleted: its SHA-256 is not"
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), 3, named)
    local_hub.spoiled.clear()
    assert gptmini("train", f"hf:{NAME}", *BYTES, "--no-sample")[0] == 0


def test_a_connection_that_breaks_is_taken_up(gptmini, local_hub: LocalHub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    local_hub.add(NAME, {"train.parquet": stories("a")}, "dataset")
    local_hub.cuts["train.parquet"] = [150]
    assert gptmini("data", "prepare", "--data", f"hf:{NAME}", *BYTES[4:])[0] == 0
    assert local_hub.downloads("train.parquet")[1].endswith(" bytes=100-")


def test_offline_a_dataset_without_its_list_of_files_is_refused(
    gptmini, local_hub: LocalHub, monkeypatch
):
    """The cache may have some of its files only, which would be another text."""
    names = [f"data/train-{n:05}-of-00002.parquet" for n in range(2)]
    local_hub.add(NAME, {name: stories(name) for name in names}, "dataset")
    local_hub.statuses = {"00001-of": (500, "")}
    assert gptmini("train", f"hf:{NAME}", *BYTES)[0] == 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = "not in the cache, or not all of it, and HF_HUB_OFFLINE is set; run once without it"
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), 5, line)
    (listed,) = Path("hub").rglob("trees")
    shutil.rmtree(listed)
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    line = "the cache does not say which files it has; run once with a network"
    expect_one_line(gptmini("train", f"hf:{NAME}", *BYTES), 5, line)


def test_a_wrong_name_costs_one_line_before_anything_is_loaded(gptmini):
    code, out, err = gptmini("train", "--data", "hf:a b/c", *BYTES)
    assert (code, out) == (3, "")
    assert err.startswith("gptmini: hf:a b/c: not a dataset; write hf:OWNER/NAME, and after it ")


def test_without_the_packages_the_extras_are_named_before_the_download(
    gptmini, local_hub: LocalHub, monkeypatch
):
    local_hub.add(NAME, {"train.parquet": stories("a")}, "dataset")
    for package, extra in (("pyarrow", "data"), ("huggingface_hub", "hub")):
        monkeypatch.setitem(sys.modules, package, None)
        code, _, err = gptmini("train", f"hf:{NAME}", *BYTES)
        line = f"{package} is not installed; run pip install -e '.[{extra}]' in gptmini's checkout"
        assert code == 5
        assert err.startswith(f"gptmini: hf:{NAME}: {line}")
    assert not local_hub.downloads("train.parquet")
