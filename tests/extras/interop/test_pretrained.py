"""Pushing an export to the Hub."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.samples import run_of

hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")


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
