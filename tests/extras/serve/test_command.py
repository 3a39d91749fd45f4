"""`gptmini serve` as it is typed."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gptmini.generate import run as loading
from tests.samples import run_of


def test_without_the_packages_of_the_server_the_extra_is_named(gptmini, monkeypatch):
    Path("runs/a/checkpoints").mkdir(parents=True)
    Path("runs/a/config.yaml").touch()
    monkeypatch.delitem(sys.modules, "gptmini.extras.serve.server", raising=False)
    monkeypatch.delattr("gptmini.extras.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = gptmini("serve", "runs/a")
    assert code == 5
    assert re.search(r"serve: \w+ is not installed; run pip install 'gptmini\[serve\]'", err)


def test_without_the_folder_of_the_server_no_package_is_named(gptmini, monkeypatch):
    Path("runs/a/checkpoints").mkdir(parents=True)
    Path("runs/a/config.yaml").touch()
    monkeypatch.setitem(sys.modules, "gptmini.extras.serve.server", None)
    monkeypatch.delattr("gptmini.extras.serve.server", raising=False)
    code, _, err = gptmini("serve", "runs/a")
    assert code == 5
    assert "gptmini/extras/serve/server is not in this copy; restore it" in err


PLAIN = {
    "load": ("auto", "bfloat16"),
    "listen": ("127.0.0.1", 8000),
    "key": "",
    "rows and queue": (32, 256),
}
OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--device", "cpu", "--weights", "int8"], {"load": ("cpu", "int8")}),
    (["--host", "::1", "--port", "0"], {"listen": ("::1", 0)}),
    (["--max-rows", "1024"], {"rows and queue": (1024, 8192)}),
    (["GPTMINI_API_KEY", " a key\n"], {"key": "a key"}),
]


@pytest.mark.parametrize(("words", "changed"), OPTIONS, ids=" ".join)
def test_each_option_reaches_the_server(gptmini, tmp_path, monkeypatch, words, changed):
    server = pytest.importorskip("gptmini.extras.serve.server", reason="needs the extra serve")
    folder = run_of(tmp_path / "run").path
    listen, create, load = server.listen, server.Server, loading.load_run
    seen: dict[str, Any] = {}

    def note_load(path: Path, *options: Any, **_: Any) -> Any:
        seen["load"] = options
        return load(path, "cpu")

    def note_listen(*address: Any) -> Any:
        seen["listen"] = address
        return listen("127.0.0.1", 0)

    def note_server(run: Any, limits: Any, key: str, hosts: list[str] | None, page: Any) -> Any:
        assert (run.path, hosts) == (folder, ["127.0.0.1", "localhost", "::1"])
        seen.update({"key": key, "rows and queue": (limits.max_rows, limits.max_waiting)})
        return create(run, limits, key, hosts, page)

    monkeypatch.setattr(loading, "load_run", note_load)
    monkeypatch.setattr(server, "listen", note_listen)
    monkeypatch.setattr(server, "Server", note_server)
    monkeypatch.setattr(server, "serve", lambda app, listening: listening.close())
    if words[:1] == ["GPTMINI_API_KEY"]:
        monkeypatch.setenv(*words)
        words = []
    code, _, err = gptmini("serve", str(folder), *words)
    assert code == 0, err
    assert seen == PLAIN | changed


@pytest.mark.parametrize(
    "words", [["--port", "65536"], ["--max-rows", "0"], ["--max-rows", "1025"]]
)
def test_options_beyond_their_limits_are_refused(gptmini, words):
    code, _, err = gptmini("serve", *words)
    assert (code, words[0] in err) == (2, True)
