"""`gptmini inspect --out page.html` as it is typed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gptmini.extras.page import export


def test_inspect_writes_the_page_which_opens_on_the_prompt(gptmini, run):
    code, out, err = gptmini("inspect", run, "--prompt", "the <b>", "--out", "a.html")
    assert code == 0, err
    assert "layer" in out  # the terminal's own view of it
    page = Path("a.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data)["prompt"] == "the <b>"


def test_a_text_that_does_not_fit_the_context_is_refused(gptmini, run):
    code, _, err = gptmini("inspect", run, "--prompt", "x" * 99, "--out", "a.html")
    assert code == 2
    assert "--prompt" in err


@pytest.mark.parametrize(
    ("words", "out", "options"),
    [
        (["export", "--to", "html"], "runs/text.html", (None,)),
        (["export", "--to", "html", "--weights", "int8"], "runs/text.html", ("int8",)),
        (["export", "--to", "html", "--out", "a b"], "a b", (None,)),
        (["inspect", "--prompt", "the", "--out", "a.HTML"], "a.HTML", ("the",)),
    ],
)
def test_each_option_reaches_the_page(gptmini, run, monkeypatch, words, out, options):
    exported: list[tuple[Any, ...]] = []

    def note(run: Any, *arguments: Any, **named: Any) -> export.ExportedPage:
        exported.append((run.path, run.weights, *arguments, *named.values()))
        return export.ExportedPage(1234, "int8", "the end")

    monkeypatch.setattr(export, "export_page", note)
    code, printed, err = gptmini(words[0], run, *words[1:])
    assert code == 0, err
    assert exported == [(Path(run), "float32", Path(out), *options)]
    if words[0] == "export":
        assert printed == f"{out}\n"
        assert "1,234 bytes, weights in int8" in err
        assert re.search(r"it opens on 7 held-out characters of .*text\.txt\n", err)
