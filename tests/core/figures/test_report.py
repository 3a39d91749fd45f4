"""Pictures and reports of runs."""

import base64
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gptmini.console import escape_control_characters
from gptmini.figures import plots, report
from gptmini.runs.log import read_metrics
from tests.support import SMALL

TRAIN = ["train", "--data", "text.txt", *SMALL]


@pytest.fixture
def runs(gptmini, text_file: Path):
    """Two trained runs, and the command line."""
    pytest.importorskip("matplotlib")
    text_file.write_text(text_file.read_text().replace("fox", "<b>&fox</b>"))
    assert gptmini(*TRAIN, "--out", "runs/a")[0] == 0
    assert gptmini(*TRAIN, "--out", "runs/b", "--attention", "mqa")[0] == 0
    return gptmini


class Page(HTMLParser):
    """The texts of a page by their tags, as a browser finds them, and its pictures."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.pictures: list[str] = []
        self._tags: list[str] = []
        self.feed(Path(path).read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            data = str(dict(attrs)["src"]).removeprefix("data:image/svg+xml;base64,")
            self.pictures.append(base64.b64decode(data).decode())
        elif tag != "meta":
            self._tags.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._tags:
            self.texts[self._tags[-1]][-1] += data


def test_a_page_has_the_runs_their_curves_and_samples(runs):
    code, out, err = runs("plot", "runs/a", "runs/b", "--out", "both.html")
    assert (code, out) == (0, "both.html\n"), err
    page = Page("both.html")
    assert page.texts["h1"] == ["runs/a, runs/b"]
    (picture,) = page.pictures
    assert ">runs/b, validation</text>" in picture
    assert ">loss (nats per token)</text>" in picture
    logged = list(read_metrics(Path("runs/a/metrics.jsonl")))
    samples = [line["sample"] for line in logged if "sample" in line]
    assert len(samples) == 2
    expected = ["\n" + escape_control_characters(sample) for sample in samples[::-1]]
    assert page.texts["pre"][:2] == expected


def test_what_runs_say_is_text_and_never_markup(runs):
    hostile = "<img src=x onerror=alert(1)><script>alert(1)</script>\r</pre>\0\u2028&amp;$x$"
    Path("runs/a").rename("runs/<b>$a$")
    last = json.loads(Path("runs/<b>$a$/metrics.jsonl").read_text().splitlines()[-1])
    with Path("runs/<b>$a$/metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"sample": hostile}) + "\n")
    code, _, err = runs("plot", "runs/<b>$a$", "--out", "a.html")
    assert code == 0, err
    page = Page("a.html")
    assert page.texts.keys().isdisjoint({"script", "b"})
    assert len(page.pictures) == 1
    assert page.texts["h1"] == ["runs/<b>$a$"]
    shown = "<img src=x onerror=alert(1)><script>alert(1)</script></pre>\\x00\\u2028&amp;$x$"
    assert page.texts["pre"][0] == f"\n{shown}"
    assert ">runs/&lt;b&gt;$a$, validation</text>" in page.pictures[0]


def test_by_default_picture_and_report_go_into_the_newest_run(runs):
    code, out, _ = runs("plot")
    assert (code, out) == (0, "runs/b/plot.png\nruns/b/plot.html\n")
    assert Path("runs/b/plot.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = runs("plot", "--out", "a.txt")
    assert (code, "ends in .png, .pdf, .svg, .html" in err) == (2, True)


def test_a_run_that_has_logged_nothing_is_refused(runs):
    Path("runs/b/metrics.jsonl").write_text("")
    code, _, err = runs("plot", "runs/none")
    assert (code, "no run here" in err) == (4, True)
    code, _, err = runs("plot", "runs/a", "runs/b")
    assert (code, err) == (4, "gptmini: runs/b: nothing logged yet; train it with gptmini train\n")


def test_a_run_that_has_just_begun_is_drawn(runs):
    first = Path("runs/a/metrics.jsonl").read_text().splitlines(keepends=True)[0]
    assert "train_loss" in first
    assert "val_loss" not in first
    Path("runs/a/metrics.jsonl").write_text(first + first[:20])  # the next is being written
    for name in ("checkpoints", "best.json"):
        Path("runs/a", name).rename(Path("runs/a", f"no {name}"))
    code, out, err = runs("plot", "runs/a")
    assert (code, out, err) == (0, "runs/a/plot.png\nruns/a/plot.html\n", "")
    assert Path("runs/a/plot.png").read_bytes().startswith(b"\x89PNG")
    assert runs("plot", "runs/a", "runs/b", "--out", "two.html")[0] == 0


def test_without_matplotlib_one_line_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = runs("plot")
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert "pictures: matplotlib is not installed; run pip install -e '.[plot]'" in err


def test_lines_that_lack_figures_are_left_out(runs):
    with Path("runs/a/metrics.jsonl").open("a") as file:
        for line in ({"step": 4}, {"step": 4, "train_loss": 1.0, "val_loss": 0.1}):
            file.write(json.dumps(line) + "\n")
    code, out, err = runs("plot", "runs/a", "--out", "a.html")
    assert (code, out) == (0, "a.html\n"), err


def test_losses_of_different_tokenizers_are_drawn_in_bits_per_byte(runs, text_file):
    assert runs(*TRAIN, "--out", "runs/c", "--set", "tokenizer.kind=char")[0] == 0
    drawn = []
    for names in (["runs/a", "runs/b"], ["runs/a", "runs/c"]):
        logged = {name: list(read_metrics(Path(name) / "metrics.jsonl")) for name in names}
        drawn.append(plots.draw_training(logged, report._compares_in_bits(logged)).axes[0])
    nats, bits = drawn
    assert nats.get_title() == "loss (nats per token)"
    assert bits.get_title() == "loss (bits per byte)"
    values = [line["val_bpb"] for line in logged["runs/c"] if "val_bpb" in line]
    assert bits.lines[-1].get_ydata().tolist() == values
    assert len(bits.lines) == 2  # no training losses, which are nats per token


def test_axes_within_a_decade_and_beyond_have_enough_ticks():
    pytest.importorskip("matplotlib")
    for factor in (0.9, 0.1):
        lines = [
            {"step": n, "tokens": 64 * n, "train_loss": 4.9, "grad_norm": factor**n}
            for n in range(1, 5)
        ]
        figure = plots.draw_training({"runs/名": lines})
        figure.canvas.draw()
        axis = figure.axes[3]
        low, high = axis.get_ylim()
        assert sum(low <= tick <= high for tick in axis.get_yticks()) >= 4
