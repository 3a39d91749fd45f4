"""Pictures and reports of runs."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import SMALL

TRAIN = ["train", "--data", "text.txt", *SMALL]


class Page(HTMLParser):
    """Checks that tags close in order, and collects sources and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.words: dict[str, list[str]] = {}

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.sources += [attributes[key] for key in ("src", "href") if key in attributes]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)


@pytest.fixture
def runs(gptmini, text_file: Path):
    """Two trained runs, and the command line."""
    pytest.importorskip("matplotlib")
    text_file.write_text(text_file.read_text().replace("fox", "<b>&fox</b>"))
    assert gptmini(*TRAIN, "--out", "runs/a")[0] == 0
    assert gptmini(*TRAIN, "--out", "runs/b", "--attention", "mqa")[0] == 0
    return gptmini


def test_a_report_is_one_file_without_scripts(runs, tmp_path):
    code, out, err = runs("plot", "runs/a", "runs/b", "--out", "both.html")
    assert (code, out) == (0, "both.html\n"), err
    text = (tmp_path / "both.html").read_text()
    page = Page()
    page.feed(text)
    assert not page.open
    assert len(page.sources) == 3  # the curves, and the attention of each
    for source in page.sources:
        kind, data = re.fullmatch(r"data:image/(svg\+xml|png);base64,(.*)", source).groups()
        start = {"svg+xml": b"<?xml", "png": b"\x89PNG"}[kind]
        assert base64.b64decode(data).startswith(start)
    assert "<script" not in text
    cells = page.words["td"]
    assert cells[0] == "runs/a"
    assert "mqa 4:1" in cells


def test_a_report_shows_the_logged_samples(runs, tmp_path):
    import json

    assert runs("plot", "runs/a", "--out", "a.html")[0] == 0
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    samples = [line["sample"] for line in lines if "sample" in line]
    assert len(samples) == 2
    page = Page()
    page.feed((tmp_path / "a.html").read_text())
    assert page.words["pre"] == [sample for sample in reversed(samples) if sample]


def test_by_default_picture_and_report_go_into_the_newest_run(runs):
    code, out, _ = runs("plot")
    assert (code, out) == (0, "runs/b/plot.png\nruns/b/plot.html\n")
    assert Path("runs/b/plot.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = runs("plot", "--out", "a.txt")
    assert (code, "ends in .png" in err) == (2, True)


def test_runs_without_an_evaluation_are_refused(runs):
    Path("runs/b/metrics.jsonl").write_text("")
    code, _, err = runs("plot", "runs/none")
    assert (code, "no run here" in err) == (4, True)
    code, _, err = runs("plot", "runs/a", "runs/b")
    assert code == 4
    assert err == "gptmini: runs/b: no evaluation logged yet; train it further with gptmini train\n"
