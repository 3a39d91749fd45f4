"""`gptmini export --to html`: what it writes, refuses, and lets nobody run."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gptmini.errors import ConfigError, DataError
from gptmini.extras.page import export
from gptmini.extras.page.export import build_page
from gptmini.generate.run import load_run
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.tokenizers import CharTokenizer
from gptmini.train.evaluate_run import load_corpus
from tests.extras.page.samples import random_run
from tests.samples import run_of
from tests.support import HOSTILE, bpe_file


def test_a_run_becomes_one_file(gptmini, tmp_path):
    run_of(tmp_path / "runs" / "my-0.2")
    code, out, _ = gptmini("export", "--to", "html")
    assert (code, out) == (0, "runs/my-0.2.html\n")
    first = Path("runs/my-0.2.html").read_bytes()
    assert b"{{" not in first
    assert b"bfloat16" in first
    assert gptmini("export", "runs/my-0.2", "--to", "html", "--out", "page.html")[0] == 0
    assert Path("page.html").read_bytes() == first
    words = ("export", "runs/my-0.2", "--to", "html", "--weights", "int8")
    assert gptmini(*words)[0] == 0
    assert len(Path("runs/my-0.2.html").read_bytes()) < len(first)
    code, _, err = gptmini("export", "runs/my-0.2", "--to", "html", "--weights", "f16")
    assert code == 2
    assert "--weights f16" in err


def test_nothing_of_a_run_becomes_markup_or_script(visit):
    tokenizer = CharTokenizer("</script>\u2028\u00e9<")
    name = HOSTILE.replace("/", "\u2215")
    run = random_run("gpt2", tokenizer, {"stop": ["</script><script>alert(2)</script>"]}, name)
    page = build_page(run, prompt=HOSTILE).decode()
    assert page.count("<script") == page.count("</script") == 4
    tab = visit(page.encode())
    assert tab.evaluate("opened.data.prompt.length") == len(HOSTILE)
    assert tab.evaluate("opened.data.sample.stop") == run.config.sample.stop
    assert tab.evaluate("document.querySelectorAll('script').length") == 4
    assert tab.evaluate("document.images.length") == 0


def test_the_policy_allows_only_the_page_itself(visit):
    page = build_page(random_run()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy
    assert "http" not in re.sub(r'http-equiv="|http://www.w3.org/2000/svg', "", page)
    (nonce, *others) = set(re.findall(r"nonce-([^']+)'", policy))
    assert others == []
    other = build_page(random_run("gpt2")).decode()
    assert nonce not in other
    planted = page.replace("<main>", "<main><script>document.title = 'planted'</script>")
    button = """<button id="planted" onclick="document.title = 'planted'"></button>"""
    tab = visit(planted.replace("<main>", f"{button}<main>").encode())
    tab.evaluate("() => document.getElementById('planted').click()")
    assert tab.title() != "planted"
    assert len(visit.wrong) >= 2  # the console names what it refused
    markup = (
        """() => { try { document.body.innerHTML = "<b>" } catch (error) { return error.name } }"""
    )
    assert tab.evaluate(markup) == "TypeError"  # even the page's own script may not write markup
    visit.wrong.clear()


def test_the_better_precision_that_fits_is_chosen(monkeypatch, tmp_path):
    run = random_run()
    size = export.estimate_size(run, "bfloat16")
    assert export.choose_precision(run) == "bfloat16"
    scripts = sum(path.stat().st_size for path in export.FOLDER.glob("*.[jch]*"))
    assert size == pytest.approx(len(build_page(run)) - scripts, abs=20_000)
    with monkeypatch.context() as large:
        large.setattr(type(run.tokenizer), "to_json", lambda self: " " * 1_000_000)
        assert export.estimate_size(run, "bfloat16") == pytest.approx(size + 1e6, abs=1e4)
    monkeypatch.setattr(export, "MAX_PAGE_BYTES", size - 1)
    assert export.choose_precision(run) == "int8"
    with pytest.raises(ConfigError, match="gptmini serve"):
        build_page(run, "bfloat16")
    monkeypatch.setattr(export, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(ConfigError, match=str(run.path)):
        build_page(run, export.choose_precision(run))


def test_a_tokenizer_that_the_page_cannot_run_is_refused_by_name():
    tokenizer = BpeTokenizer.from_dict(json.loads(bpe_file(kind="strange")))
    with pytest.raises(DataError, match="strange"):
        build_page(random_run(tokenizer=tokenizer))


def test_a_page_opens_on_held_out_text(gptmini, run, visit, monkeypatch):
    assert gptmini("export", run, "--to", "html", "--out", "page.html")[0] == 0
    trained = load_run(Path(run), "cpu", "float32")
    tab = visit(Path("page.html").read_bytes())
    opening = tab.evaluate("getText()")
    held_out = load_corpus(trained).validation[0]
    text = trained.tokenizer.decode(held_out.read(0, len(held_out)).tolist())
    assert opening in text
    assert export.OPENING_LENGTH // 2 < len(opening) <= export.OPENING_LENGTH
    assert "never read it" in tab.locator("#top").inner_text()
    texts = {"wn.\n\nOne.\n\n" + SEA: SEA.removesuffix(" and the"), "short": "short"}
    for text, expected in texts.items():
        corpus = SimpleNamespace(validation=[Tokens(text)])
        monkeypatch.setattr(export, "load_corpus", lambda *_, corpus=corpus: corpus)
        assert export.find_opening(random_run()) == expected


SEA = (
    "The sea was calm and the sky was grey that day. "
    "Nobody had climbed the hill for a hundred years and the"
)


class Tokens(bytes):
    """Held-out text of bytes."""

    def __new__(cls, text: str) -> "Tokens":
        return super().__new__(cls, text.encode())

    def read(self, start: int, count: int) -> Any:
        return np.frombuffer(self[start : start + count], np.uint8)
