"""`gptmini inspect --out page.html` as it is typed."""

import json
import re
from pathlib import Path


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
