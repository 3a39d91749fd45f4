"""Starting from the name of a pretrained model: imported once, and said so; and pushing one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gptmini.extras.interop.export import export_run
from gptmini.runs.directory import RunDirectory
from tests.local_hub import LocalHub
from tests.samples import run_of
from tests.support import prose

hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")

WORDS = ("--prompt", "It", "--max-new-tokens", "2")


@pytest.fixture
def published(tmp_path: Path) -> dict[str, bytes]:
    run = run_of(tmp_path / "trained", attention={"variant": "gqa", "n_kv_head": 2})
    export_run(run, tmp_path / "out", cache=tmp_path)
    return {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_generate_and_train_import_a_name_once(gptmini, local_hub: LocalHub, published):
    local_hub.add("openai-community/gpt2", published)
    local_hub.add("Owner/Tiny", published)
    for words, where in ((("generate", "Owner/Tiny", *WORDS), "runs/Tiny"),):
        code, _, err = gptmini(*words)
        assert code == 0, err
        assert f"importing it as {where}" in err
        count = len(local_hub.requests)
        code, _, err = gptmini(*words)
        assert code == 0, err
        assert f"imported before, as {where}" in err
        assert len(local_hub.requests) == count
    Path("my.txt").write_text(prose())
    once = ("--steps", "1", "--set", "train.batch_size=1")
    code, _, err = gptmini("train", "--from", "gpt2", "--data", "my.txt", *once)
    assert code == 0, err
    assert "openai-community/gpt2" in err
    assert RunDirectory(Path("runs/my-from-gpt2")).load_config().base.run == "runs/gpt2"


def test_a_folder_and_a_file_are_imported(gptmini, tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    run_of(tmp_path / "runs" / "my", attention={"qk_norm": False}, activation="swiglu")
    for words in (("export",), ("export", "--to", "gguf")):
        assert gptmini(*words)[0] == 0
    for source, where in (("my-hf", "my-hf-imported"), ("my-f16.gguf", "my-f16")):
        for _ in range(2):
            code, _, err = gptmini("generate", f"runs/{source}", *WORDS)
            assert code == 0, err
            assert f"runs/{where}" in err
        assert (Path("runs") / where / "config.yaml").exists()


def test_a_checkpoint_of_nanogpt_or_litgpt_is_refused_by_its_name(gptmini, tmp_path):
    for name in ("out/ckpt.pt", "checkpoints/Owner/Tiny/lit_model.pth"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"PK\3\4")
        for source in (name, str(Path(name).parent)):
            for words in (("import", source), ("generate", source, *WORDS)):
                code, _, err = gptmini(*words)
                assert code == 4
                assert f"{name}: a pickle" in err


def test_another_run_of_that_name_is_not_taken(gptmini, tmp_path, local_hub, published):
    local_hub.add("Owner/Tiny", published)
    run_of(tmp_path / "runs" / "Tiny")
    code, _, err = gptmini("generate", "Owner/Tiny", *WORDS)
    assert code == 4
    assert "runs/Tiny" in err
    code, _, err = gptmini("generate", "run/Tiny", *WORDS)  # misspelled
    assert code == 4
    assert "did you mean runs/Tiny?" in err


def test_an_export_is_pushed(gptmini, tmp_path, monkeypatch):
    run_of(tmp_path / "runs" / "my")
    calls = []

    def note(*names, **settings):
        calls.append((names, settings))
        return SimpleNamespace(commit_url="https://hub/commit/1")

    monkeypatch.setattr(hub, "create_repo", note)
    monkeypatch.setattr(hub, "upload_folder", note)
    code, _, err = gptmini("export", "--push", "me/my")
    assert code == 0, err
    assert "https://hub/commit/1" in err
    assert calls[0] == (("me/my",), {"repo_type": "model", "private": True, "exist_ok": True})
    assert calls[1] == ((), {"repo_id": "me/my", "folder_path": Path("runs/my-hf")})
    for words in (("--push", "my"), ("--push", "me/my", "--to", "html")):
        code, _, err = gptmini("export", *words)
        assert code == 2
        assert "--push" in err
