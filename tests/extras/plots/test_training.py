"""Pictures of runs."""

import json
import sys
from pathlib import Path

import pytest

from gptmini.extras.plots import plots, training
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


def test_a_picture_has_the_runs_and_their_curves(runs):
    Path("runs/a").rename("runs/<b>$a$")
    code, out, err = runs("plot", "runs/<b>$a$", "runs/b", "--out", "both.svg")
    assert (code, out) == (0, "both.svg\n"), err
    assert "<svg" in Path("both.svg").read_text()
    logged = {name: list(read_metrics(Path(name) / "metrics.jsonl")) for name in ("runs/b",)}
    axis = plots.draw_training(logged).axes[0]
    assert axis.get_title() == "loss (nats per token)"
    assert axis.get_legend().get_texts()[-1].get_text() == "runs/b, validation"


def test_by_default_the_picture_goes_into_the_newest_run(runs):
    code, out, _ = runs("plot")
    assert (code, out) == (0, "runs/b/plot.png\n")
    assert Path("runs/b/plot.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = runs("plot", "--out", "a.txt")
    assert (code, "ends in .png, .pdf, .svg" in err) == (2, True)


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
    assert (code, out, err) == (0, "runs/a/plot.png\n", "")
    assert Path("runs/a/plot.png").read_bytes().startswith(b"\x89PNG")
    assert runs("plot", "runs/a", "runs/b", "--out", "two.png")[0] == 0


def test_without_matplotlib_one_line_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = runs("plot")
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert "pictures: matplotlib is not installed; run pip install 'gptmini[plot]'" in err


def test_lines_that_lack_figures_are_left_out(runs):
    with Path("runs/a/metrics.jsonl").open("a") as file:
        for line in ({"step": 4}, {"step": 4, "train_loss": 1.0, "val_loss": 0.1}):
            file.write(json.dumps(line) + "\n")
    code, out, err = runs("plot", "runs/a", "--out", "a.png")
    assert (code, out) == (0, "a.png\n"), err


def test_losses_of_different_tokenizers_are_drawn_in_bits_per_byte(runs, text_file):
    assert runs(*TRAIN, "--out", "runs/c", "--set", "tokenizer.kind=char")[0] == 0
    drawn = []
    for names in (["runs/a", "runs/b"], ["runs/a", "runs/c"]):
        logged = {name: list(read_metrics(Path(name) / "metrics.jsonl")) for name in names}
        drawn.append(plots.draw_training(logged, training._compares_in_bits(logged)).axes[0])
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
