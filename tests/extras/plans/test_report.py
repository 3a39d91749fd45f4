"""Plans: their figures against those of the training that follows."""

import itertools
import json

import pytest

from gptmini.extras.plans import report
from gptmini.plan.timing import Machine
from gptmini.runs.directory import RunDirectory
from tests.support import SMALL

WORDS = ["--data", "text.txt", *SMALL]


def planned(gptmini, *words: str) -> dict:
    code, out, err = gptmini("size", *WORDS, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_plan_is_what_the_training_does(gptmini, text_file, tmp_path):
    steps = ("--steps", "5")  # the last evaluation comes before its turn
    found = planned(gptmini, *steps)
    assert not (tmp_path / "runs").exists()
    code, _, err = gptmini("train", *WORDS, *steps, "--out", "run")
    assert code == 0, err
    run = RunDirectory(tmp_path / "run")
    checkpoint = run.load_newest()
    count = sum(tensor.numel() for tensor in checkpoint.model.values())
    assert found["parameters"]["all"] == count
    assert sum(n for part, n in found["parameters"].items() if part != "all") == count
    assert found["memory"]["weights"] == pytest.approx(4 * count, rel=0.02)
    state = sum(tensor.nbytes for tensor in checkpoint.optimizer.values())
    assert found["memory"]["optimizer"] == pytest.approx(state, rel=0.01)
    assert found["micro_batch_size"] == run.load_config().train.micro_batch_size
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    last = lines[-1]
    assert (found["steps"], found["tokens"]["seen"]) == (last["step"], last["tokens"])
    assert f"reading the text {found['tokens']['epochs']:.1f} times" in err
    assert found["tokens"]["compute_optimal"] == 20 * count
    assert found["time"]["evaluations"] == sum("val_loss" in line for line in lines) == 3


def test_variants_are_reckoned_side_by_side(gptmini, text_file):
    rows = {row["variant"]: row for row in planned(gptmini, "--attention", "gqa:2")["cache"]}
    assert list(rows) == ["mha", "gqa:2", "mqa"]
    assert rows["mha"]["bytes_per_token"] == 4 * rows["mqa"]["bytes_per_token"]
    assert rows["gqa:2"]["bytes"] == 16 * rows["gqa:2"]["bytes_per_token"]
    window = planned(gptmini, "--attention", "window:4")["cache"][0]
    assert window["bytes"] == 4 * window["bytes_per_token"]


def test_what_does_not_fit_is_said_and_not_tried(gptmini, text_file, monkeypatch):
    monkeypatch.setattr(Machine, "get_total_memory", lambda _: 1 << 10)
    monkeypatch.setattr(report, "_estimate_time", lambda *_: pytest.fail("tried"))
    code, out, _ = gptmini("size", *WORDS)
    assert code == 0
    assert "does not fit in the memory of this machine, cpu" in out
    code, _, err = gptmini("size", *WORDS, "--minutes", "3", "--accelerator", "h100")
    assert (code, "remove --accelerator" in err) == (2, True)


def test_people_can_read_it(gptmini, text_file):
    code, out, _ = gptmini("size", *WORDS)
    assert code == 0
    heads = [line.split("  ")[0] for line in out.splitlines() if line[0] != " "]
    assert heads == ["parameters", "compute", "memory", "KV cache", "data", "time"]
    assert max(map(len, out.splitlines())) <= 80


def test_minutes_are_planned_as_train_plans_them(gptmini, text_file, monkeypatch):
    """By a clock that goes on by 10 ms whenever it is read, so that a pass takes as much."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: 0.01 * next(ticks))
    words = ["--data", "text.txt", "--set", "model.context_length=16", "--minutes", "0.1"]
    code, out, err = gptmini("size", *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert 1 < found["steps"] < 600


def test_a_run_that_begins_from_another_is_planned_with_its_model(gptmini, text_file, tmp_path):
    assert gptmini("train", *WORDS)[0] == 0
    (tmp_path / "other.txt").write_text("apples and pears and the fox\n" * 60)
    words = ["--from", "runs/text/", "--data", "other.txt", "--steps", "2", "--json"]
    code, out, _ = gptmini("size", *words)
    assert code == 0
    weights = RunDirectory(tmp_path / "runs" / "text").load_best().model.values()
    assert json.loads(out)["parameters"]["all"] == sum(tensor.numel() for tensor in weights)
    assert not (tmp_path / "runs" / "other-from-text").exists()


def test_a_missing_text_is_named(gptmini):
    code, _, err = gptmini("size", "--data", "nothing.txt")
    assert code == 3
    assert "nothing.txt" in err
