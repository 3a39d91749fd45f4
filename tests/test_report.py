"""Pictures and reports of runs."""

import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import SMALL

from gptmini.evidence import plots, report
from gptmini.runs.log import metrics

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
        if tag not in ("img", "input", "meta"):
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
    assert (code, "ends in .png, .pdf, .svg, .html" in err) == (2, True)


def test_runs_without_an_evaluation_are_refused(runs):
    Path("runs/b/metrics.jsonl").write_text("")
    code, _, err = runs("plot", "runs/none")
    assert (code, "no run here" in err) == (4, True)
    code, _, err = runs("plot", "runs/a", "runs/b")
    assert code == 4
    assert err == "gptmini: runs/b: no evaluation logged yet; train it further with gptmini train\n"


def test_without_matplotlib_the_report_has_no_pictures(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = runs("plot")
    assert (code, out) == (0, "runs/b/plot.html\n")
    assert err.count("\n") == 1
    assert "runs/b/plot.png: not drawn; pictures: matplotlib is missing" in err
    page = Page()
    page.feed(Path("runs/b/plot.html").read_text())
    assert not page.sources
    assert page.words["pre"]
    code, _, err = runs("plot", "--out", "a.png")
    assert (code, "pip install matplotlib" in err) == (5, True)


def test_a_carriage_return_survives_the_page(runs):
    last = json.loads(Path("runs/a/metrics.jsonl").read_text().splitlines()[-1])
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"sample": "one\r\ntwo\r"}) + "\n")
    assert runs("plot", "runs/a", "--out", "a.html")[0] == 0
    assert "<pre>one&#13;\ntwo&#13;</pre>" in Path("a.html").read_text()


def test_lines_that_lack_figures_are_left_out(runs):
    with Path("runs/a/metrics.jsonl").open("a") as file:
        for line in (
            {"step": 4},
            {"step": 4, "train_loss": 1.0, "val_loss": 0.1},
            {"step": 4, "tokens": "many", "seconds": None, "val_loss": [1], "val_bpb": 1e999},
            {"step": 4, "tokens": 10**400, "lr": 1, "sample": 5, "peak_memory": "x"},
        ):
            file.write(json.dumps(line) + "\n")
    code, out, err = runs("plot", "runs/a", "--out", "a.html")
    assert (code, out) == (0, "a.html\n"), err
    code, _, err = runs("compare", "runs/a", "--json")
    assert code == 0, err


def test_losses_of_different_tokenizers_are_drawn_in_bits_per_byte(runs, text_file):
    assert runs(*TRAIN, "--out", "runs/c", "--set", "tokenizer.kind=char")[0] == 0
    drawn = []
    for names in (["runs/a", "runs/b"], ["runs/a", "runs/c"]):
        logged = {name: list(metrics(Path(name) / "metrics.jsonl")) for name in names}
        drawn.append(report._curves(logged).axes[0])
    nats, bits = drawn
    assert nats.get_title() == "loss (nats per token)"
    assert bits.get_title() == "loss (bits per byte)"
    values = [line["val_bpb"] for line in logged["runs/c"] if "val_bpb" in line]
    assert bits.lines[-1].get_ydata().tolist() == values
    assert len(bits.lines) == 2  # no training losses, which are nats per token


def test_the_axis_of_the_losses_has_enough_ticks():
    pytest.importorskip("matplotlib")
    lines = [
        {"step": n, "tokens": 64 * n, "train_loss": loss, "val_loss": loss}
        for n, loss in enumerate((4.9, 3.8, 3.1), 1)
    ]
    figure = plots.training({"runs/名": lines})
    figure.canvas.draw()
    low, high = figure.axes[0].get_ylim()
    assert sum(low <= tick <= high for tick in figure.axes[0].get_yticks()) >= 4
    assert figure.axes[2].get_xlabel() == "tokens seen (millions; 64 per step)"
