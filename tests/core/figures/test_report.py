"""Pictures and reports of runs."""

import json
import sys
from pathlib import Path

import pytest

from gptmini.figures import plots, report
from gptmini.runs.log import read_metrics
from tests.support import SMALL, data_of

TRAIN = ["train", "--data", "text.txt", *SMALL]


@pytest.fixture
def runs(gptmini, text_file: Path):
    """Two trained runs, and the command line."""
    pytest.importorskip("matplotlib")
    text_file.write_text(text_file.read_text().replace("fox", "<b>&fox</b>"))
    assert gptmini(*TRAIN, "--out", "runs/a")[0] == 0
    assert gptmini(*TRAIN, "--out", "runs/b", "--attention", "mqa")[0] == 0
    return gptmini


def parts_of(name: str) -> dict[str, list]:
    """The parts of a page by their kinds."""
    parts: dict[str, list] = {}
    for part in data_of(Path(name).read_bytes())["parts"]:
        parts.setdefault(part["type"], []).append(part)
    return parts


def test_a_page_has_the_runs_and_their_curves(runs):
    code, out, err = runs("plot", "runs/a", "runs/b", "--out", "both.html")
    assert (code, out) == (0, "both.html\n"), err
    parts = parts_of("both.html")
    (table,), (charts,) = parts["table"], parts["charts"]
    assert [dict(zip(table["head"], row, strict=True))["run"] for row in table["rows"]] == [
        "runs/a",
        "runs/b",
    ]
    assert "mqa 4:1" in table["rows"][1]
    loss, lr, *_ = charts["items"]
    logged = list(read_metrics(Path("runs/b/metrics.jsonl")))
    lines = {line["name"]: line["points"] for line in loss["series"]}
    assert lines["runs/b, validation"] == [
        [line["tokens"] / 1e6, line["val_loss"]] for line in logged if "val_loss" in line
    ]
    assert [y for _, y in lr["series"][1]["points"]] == [
        line["lr"] for line in logged if "lr" in line
    ]


def test_a_page_shows_the_logged_samples(runs):
    assert runs("plot", "runs/a", "--out", "a.html")[0] == 0
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    samples = [line["sample"] for line in lines if "sample" in line]
    assert len(samples) == 2
    (shown,) = parts_of("a.html")["samples"]
    assert [text for _, text in shown["items"]] == samples[::-1]


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
    parts = parts_of("runs/a/plot.html")
    assert parts.keys() == {"table", "charts"}
    assert "not evaluated yet" in parts["table"][0]["rows"][0]
    series = parts["charts"][0]["items"][0]["series"]
    points = {one["name"]: len(one["points"]) for one in series}
    assert points == {"runs/a, validation": 0, "runs/a, training": 1}
    assert runs("plot", "runs/a", "runs/b", "--out", "two.html")[0] == 0


def test_without_matplotlib_there_is_still_a_page(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = runs("plot")
    assert (code, out) == (0, "runs/b/plot.html\n")
    assert err.count("\n") == 1
    assert "runs/b/plot.png: not drawn; pictures: matplotlib is not installed" in err
    assert parts_of("runs/b/plot.html")["charts"]
    code, _, err = runs("plot", "--out", "a.png")
    assert (code, "pip install -e '.[plot]'" in err) == (5, True)


def test_any_character_survives_the_page(runs):
    last = json.loads(Path("runs/a/metrics.jsonl").read_text().splitlines()[-1])
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"sample": "one\r\ntwo\r</pre>\u2028\0"}) + "\n")
    assert runs("plot", "runs/a", "--out", "a.html")[0] == 0
    (shown,) = parts_of("a.html")["samples"]
    assert shown["items"][0][1] == "one\r\ntwo\r</pre>\u2028\0"


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


def test_the_axis_of_the_losses_has_enough_ticks():
    pytest.importorskip("matplotlib")
    lines = [
        {"step": n, "tokens": 64 * n, "train_loss": loss, "val_loss": loss}
        for n, loss in enumerate((4.9, 3.8, 3.1), 1)
    ]
    figure = plots.draw_training({"runs/名": lines})
    figure.canvas.draw()
    low, high = figure.axes[0].get_ylim()
    assert sum(low <= tick <= high for tick in figure.axes[0].get_yticks()) >= 4
    assert figure.axes[2].get_xlabel() == "tokens seen (millions; 64 per step)"
