"""`gptmini serve` as it is typed."""

import re
import sys
from pathlib import Path


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
