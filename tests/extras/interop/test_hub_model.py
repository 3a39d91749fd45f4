"""Models of the Hub by name, from a Hub on this machine."""

import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="needs the extra hub")
from huggingface_hub import constants, file_download
from safetensors.torch import load, save

from gptmini.data.hub import HubName
from gptmini.extras.interop import hub_model
from gptmini.extras.interop.export import export_run
from gptmini.extras.interop.hub_model import parse_model_name
from gptmini.extras.interop.huggingface import INDEX_FILE
from gptmini.extras.interop.import_model import choose_run_name, import_model
from gptmini.generate.run import load_run
from gptmini.runs.directory import RunDirectory
from tests.local_hub import NO_ENDPOINT, LocalHub, set_endpoint
from tests.samples import run_of
from tests.support import prose

NAME = "Somebody/Tiny-1M"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr("time.sleep", lambda _: None)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small model as its author publishes them, with some that nobody needs."""
    folder = tmp_path_factory.mktemp("published")
    run_of(folder / "run")
    export_run(folder / "run", folder / "hf")
    files = {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}
    extras = ("pytorch_model.bin", "modeling_tiny.py", "onnx/model.safetensors", "training.pt")
    return files | dict.fromkeys(extras, b"x" * 99)


def weights_of(path: Path) -> list[list[float]]:
    model = load_run(path, "cpu", "float32").model
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_imported_by_name(gptmini, local_hub: LocalHub, published, tmp_path):
    commit = local_hub.add(NAME, published)
    code, out, err = gptmini("import", NAME)
    assert (code, out) == (0, "")
    assert err.startswith(f"hf:{NAME}: revision {commit}\n")
    assert "runs/Tiny-1M: 0.1 M parameters" in err
    (tmp_path / "folder").mkdir()
    for name, content in published.items():
        if "/" not in name:
            (tmp_path / "folder" / name).write_bytes(content)
    import_model(tmp_path / "folder", tmp_path / "direct")
    assert weights_of(Path("runs/Tiny-1M")) == weights_of(tmp_path / "direct")
    # Nothing was downloaded that the import does not read.
    (snapshot,) = (tmp_path / "hub").glob("models--*/snapshots/*")
    assert files_in(snapshot) == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        "model.safetensors",
    }


def test_a_run_remembers_the_commit_that_it_was_imported_from(
    gptmini, local_hub: LocalHub, published, tmp_path
):
    commit = local_hub.add(NAME, published)
    source = f"hf:{NAME}@{commit}"
    assert gptmini("import", NAME)[0] == 0
    local_hub.add(NAME, published | {"README.md": b"a later commit"})
    assert load_run("runs/Tiny-1M", "cpu").state["source"] == source
    # A fine-tuned run says it, too, also after it has been resumed.
    Path("my.txt").write_text(prose())
    tuning = ("train", "--from", "runs/Tiny-1M", "--data", "my.txt", "--out", "runs/tuned")
    for steps in ("1", "2"):
        code, _, err = gptmini(*tuning, "--steps", steps, "--set", "train.batch_size=1")
        assert code == 0, err
    listed = json.loads(gptmini("runs", "--json")[1])["runs"]
    assert {run["path"]: run["source"] for run in listed} == {
        "runs/Tiny-1M": source,
        "runs/tuned": source,
    }
    rows = gptmini("runs")[1].splitlines()
    assert rows[1].endswith(f"from {source}")
    # A source is a name that can be imported again, though there is a newer commit.
    assert gptmini("import", source, "--out", "runs/again")[0] == 0
    assert RunDirectory(Path("runs/again")).read_newest_state()["source"] == source
    # So is the path of a folder, from wherever the command is called.
    (tmp_path / "folder").mkdir()
    for name, content in published.items():
        if "/" not in name:
            (tmp_path / "folder" / name).write_bytes(content)
    assert gptmini("import", "folder", "--out", "runs/from-folder")[0] == 0
    state = RunDirectory(Path("runs/from-folder")).read_newest_state()
    assert state["source"] == str(tmp_path / "folder")


def test_what_the_cache_holds_needs_no_network(
    gptmini, local_hub: LocalHub, published, monkeypatch
):
    local_hub.add(NAME, published)
    assert gptmini("import", NAME)[0] == 0
    before = len(local_hub.downloads("resolve"))
    assert gptmini("import", f"hf:{NAME}", "--out", "runs/again")[0] == 0
    assert len(local_hub.downloads("resolve")) == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    local_hub.requests.clear()
    assert gptmini("import", NAME, "--out", "runs/offline")[0] == 0
    assert local_hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_endpoint(monkeypatch, NO_ENDPOINT)  # an unreachable Hub is no worse
    assert gptmini("import", NAME, "--out", "runs/unreachable")[0] == 0


def test_shards_are_those_of_the_index(gptmini, local_hub, published, tmp_path):
    local_hub.add(NAME, published)
    assert gptmini("import", NAME, "--out", "runs/whole")[0] == 0
    tensors = load(published["model.safetensors"])
    shards = {name: f"model-{n % 3}.safetensors" for n, name in enumerate(tensors)}
    files = published | {INDEX_FILE: json.dumps({"weight_map": shards}).encode()}
    for shard in set(shards.values()):
        files[shard] = save({name: tensors[name] for name in tensors if shards[name] == shard})
    local_hub.add(NAME, files)  # transformers, too, prefers the one file to the index
    assert gptmini("import", NAME, "--out", "runs/both")[0] == 0
    assert not local_hub.downloads("model-0")
    del files["model.safetensors"]
    local_hub.add(NAME, files | {"consolidated.safetensors": b"x"})
    assert gptmini("import", NAME)[0] == 0
    assert weights_of(Path("runs/Tiny-1M")) == weights_of(Path("runs/whole"))
    assert not local_hub.downloads("consolidated")
    local_hub.add(NAME, {name: files[name] for name in files if name != "model-0.safetensors"})
    code, _, err = gptmini("import", NAME, "--out", "runs/other")
    assert code == 4
    assert f"model-0.safetensors: missing there, though {INDEX_FILE} names it" in err


def test_a_revision_is_a_branch_a_tag_or_a_commit(gptmini, local_hub, published):
    first = local_hub.add(NAME, published)
    second = local_hub.add(NAME, published | {"README.md": b"new"})
    local_hub.add(NAME, published, revision="refs/pr/1")
    for revision, commit in (("main", second), (first, first)):
        code, _, err = gptmini("import", f"{NAME}@{revision}", "--out", f"runs/{revision}")
        assert code == 0
        assert f"revision {commit}\n" in err
    assert gptmini("import", f"{NAME}@refs/pr/1")[0] == 0
    code, _, err = gptmini("import", f"{NAME}@v2", "--out", "runs/v2")
    assert code == 4
    assert f"hf:{NAME}: no such model of revision v2" in err


def test_a_gguf_file_is_imported_if_it_is_named_or_the_only_one(gptmini, local_hub, tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    run_of(tmp_path / "runs" / "my")
    export_run(tmp_path / "runs" / "my", tmp_path / "my.gguf", to="gguf", weights="f32")
    gguf_file = (tmp_path / "my.gguf").read_bytes()
    commit = local_hub.add(NAME, {"tiny-f32.gguf": gguf_file})
    assert gptmini("import", NAME, "--out", "runs/only")[0] == 0
    state = RunDirectory(Path("runs/only")).read_newest_state()
    assert state["source"] == f"hf:{NAME}@{commit}/tiny-f32.gguf"
    local_hub.add(NAME, {"tiny-f32.gguf": gguf_file, "tiny-q8_0.gguf": b"x", "README.md": b""})
    assert gptmini("import", f"{NAME}/tiny-f32.gguf")[0] == 0
    assert Path("runs/tiny-f32/config.yaml").exists()
    assert not local_hub.downloads("q8_0")
    for source, problem in (
        (
            NAME,
            f"has 2 GGUF files; choose one, as in hf:{NAME}/tiny-f32.gguf (it has tiny-f32.gguf",
        ),
        (f"{NAME}/q4.gguf", "has no file q4.gguf; it has tiny-f32.gguf, tiny-q8_0.gguf"),
    ):
        code, _, err = gptmini("import", source, "--out", "runs/none")
        assert code == 4
        assert err.splitlines()[-1].startswith(f"gptmini: hf:{NAME}: {problem}")


def test_what_exists_here_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "my-hf").mkdir(parents=True)
    assert parse_model_name("runs/my-hf") is None
    for name in ("hf:a/b", "hf:a/b@v1", "hf:a/b@v1/c/d.gguf", "hf:a/b/D.GGUF", "hf:gpt2"):
        assert str(parse_model_name(name)) == name
    assert choose_run_name(parse_model_name("hf:a/b/D.GGUF")) == "D"
    assert parse_model_name("hf:runs/my-hf") == HubName("runs/my-hf", None, None)
    assert parse_model_name("hf:gpt2@main") == HubName("gpt2", "main", None)
    assert parse_model_name("a/b@refs/pr/3") == HubName("a/b", "refs/pr/3", None)
    assert parse_model_name("a/b@v1/c/d.gguf") == HubName("a/b", "v1", "c/d.gguf")
    for path in (
        "nowhere",
        "./a/b",
        "/a/b",
        "a/b/c",
        "models/a.gguf",
        "models/a.GGUF",
        "../a",
        "a/",
        "C:\\a",
        "",
    ):
        assert parse_model_name(path) is None
    for name in ("hf:", "hf:a/b/c", "hf:a b/c", "hf:/a/b", "hf:a/b@", "hf:../b"):
        with pytest.raises(Exception, match=r"not a name on the Hub; write hf:OWNER/NAME"):
            parse_model_name(name)


# What the Hub answers, by a part of the path; the exit code; a part of the line.
FAULTS = {
    "gated": ({"resolve": (401, "GatedRepo")}, 4, f"127.0.0.1:{{port}}/{NAME}"),
    "private": ({"/api/": (404, "RepoNotFound")}, 4, "HF_TOKEN"),
    "listed, but gone": ({"resolve": (404, "EntryNotFound")}, 4, "404"),
    "too many requests": ({"/api/": (429, "")}, 5, "429"),
    "broken later": ({"model.saf": (500, "")}, 5, "500"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_of_the_hub_costs_one_line(gptmini, local_hub, published, fault):
    statuses, code, named = FAULTS[fault]
    local_hub.add(NAME, published)
    local_hub.statuses = statuses
    named = named.format(port=local_hub.http.server_port)
    expect_one_line(gptmini("import", NAME), code, named)
    local_hub.statuses = {}
    assert gptmini("import", NAME)[0] == 0


def expect_one_line(result: tuple[int, str, str], code: int, named: str) -> None:
    """One line, the right exit code, and no half of a run."""
    found, out, err = result
    *before, line = err.splitlines()
    assert (found, out) == (code, ""), err
    assert line.startswith(f"gptmini: hf:{NAME}: ")
    assert "; " in line
    assert named in line
    assert len(line) < 300
    assert all(": revision " in each for each in before), err
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_repository_without_weights_to_import_names_the_remedy(gptmini, local_hub, published):
    no_weights = {name: published[name] for name in published if "safetensors" not in name}
    local_hub.add(NAME, no_weights)
    remedy = "write them with transformers' save_pretrained"
    expect_one_line(gptmini("import", NAME), 4, remedy)
    local_hub.add(NAME, {"README.md": b"an adapter"})
    expect_one_line(
        gptmini("import", NAME), 4, "has no weights in safetensors or GGUF (it has READ"
    )
    assert not local_hub.downloads("pytorch_model")


def test_a_full_disk_costs_one_line(gptmini, local_hub, published, tmp_path, monkeypatch):
    local_hub.add(NAME, published)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(file_download, "http_get", fail)
        code, _, err = gptmini("import", NAME)
    assert code == 5
    assert err.splitlines()[-1].startswith(f"gptmini: {tmp_path / 'hub'}: ")
    assert not list(Path("runs").iterdir())
    assert not list((tmp_path / "hub").rglob("*.incomplete"))
    assert gptmini("import", NAME)[0] == 0


@pytest.mark.usefixtures("default_signals")
def test_a_signal_ends_a_download_and_leaves_nothing(
    gptmini, local_hub, published, tmp_path, monkeypatch
):
    local_hub.add(NAME, published)
    write = file_download.http_get

    def stop(url: str, *arguments: object, **options: object) -> None:
        write(url, *arguments, **options)
        if url.endswith("model.safetensors"):
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(file_download, "http_get", stop)
        code, _, err = gptmini("import", NAME)
    assert (code, err.splitlines()[-1]) == (143, "gptmini: stopped by SIGTERM")
    assert not list(Path("runs").iterdir())
    assert not list((tmp_path / "hub").rglob("*.incomplete"))
    assert gptmini("import", NAME)[0] == 0


def test_without_network_and_cache_the_remedy_is_named(gptmini, local_hub, published, monkeypatch):
    local_hub.add(NAME, published)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = "HF_HUB_OFFLINE"
    expect_one_line(gptmini("import", NAME), 5, line)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    local_hub.statuses = {"model.safetensors": (500, "")}  # the rest is in the cache then
    assert gptmini("import", NAME)[0] == 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expect_one_line(gptmini("import", NAME), 5, line)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_endpoint(monkeypatch, NO_ENDPOINT)
    expect_one_line(gptmini("import", NAME), 5, "http://127.0.0.1:1")


def test_a_cache_of_another_program_is_enough(gptmini, local_hub, published, monkeypatch, tmp_path):
    """transformers downloads file by file, and the cache then has no list of files."""
    local_hub.add(NAME, published)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        file_download.hf_hub_download(NAME, name)
    assert not list((tmp_path / "hub").rglob("trees"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert gptmini("import", NAME)[0] == 0


def test_without_the_package_the_extra_is_named(gptmini, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    expect_one_line(gptmini("import", NAME), 5, "huggingface_hub")


def test_what_cannot_be_imported_is_refused_before_its_weights_come(
    gptmini, local_hub, published, monkeypatch
):
    def refuse(code: int, named: str, files: dict[str, bytes]) -> None:
        local_hub.add(NAME, files)
        found, _, err = gptmini("import", NAME)
        assert found == code
        assert named in err.splitlines()[-1]
        assert not any(line.endswith(("safetensors", "gguf")) for line in local_hub.requests)

    refuse(4, "gemma", published | {"config.json": b'{"model_type": "gemma"}'})
    without = {name: file for name, file in published.items() if name != "tokenizer.json"}
    refuse(3, "tokenizer.json", without)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "gguf", None)
        refuse(5, "[gguf]", {"a.gguf": b"x"})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    local_hub.requests.clear()
    refuse(5, "[hub]", published)
    assert not local_hub.requests


def test_an_existing_run_is_refused_before_the_download(gptmini, local_hub, published):
    local_hub.add(NAME, published)
    Path("runs/Tiny-1M").mkdir(parents=True)
    assert gptmini("import", NAME)[0] == 2
    assert local_hub.requests == []


def test_the_settings_files_are_those_that_reading_a_folder_takes():
    """A file that `huggingface.py` begins to read must be downloaded, too."""
    source = Path(hub_model.__file__).with_name("huggingface.py").read_text()
    reading = source[: source.index("# -- writing")]
    for name in hub_model.SETTINGS_FILES:
        assert f'"{name}"' in reading
    named = {word for word in reading.split('"') if word.endswith((".json", ".jinja"))}
    assert named - {hub_model.INDEX_FILE} == set(hub_model.SETTINGS_FILES)
