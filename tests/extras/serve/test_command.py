"""`gptmini serve` as it is typed."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest


def test_without_the_packages_of_the_server_the_extra_is_named(gptmini, monkeypatch):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").touch()
    monkeypatch.delitem(sys.modules, "gptmini.extras.serve.server", raising=False)
    monkeypatch.delattr("gptmini.extras.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = gptmini("serve", "runs/a")
    assert code == 5
    assert re.search(r"serve: \w+ is not installed; run pip install -e '\.\[serve\]' in", err)


def test_the_queue_grows_with_the_rows(gptmini, run, monkeypatch):
    server = pytest.importorskip("gptmini.extras.serve.server", reason="needs the extra serve")
    served = []

    def note(app: Any, listening: Any) -> None:
        served.append((app.limits.max_rows, app.limits.max_waiting))
        listening.close()

    monkeypatch.setattr(server, "serve", note)
    code, _, err = gptmini("serve", run, "--port", "0", "--max-rows", "2")
    assert code == 0, err
    assert served == [(2, 16)]
