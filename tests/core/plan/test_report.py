"""Plans: their figures against those of the training that follows."""

import itertools
import json

import pytest

from gptmini import machine
from gptmini.plan import cost, report, timing
from gptmini.plan.timing import Machine
from gptmini.runs.directory import RunDirectory
from tests.support import SMALL, tiny

WORDS = ["--data", "text.txt", *SMALL]


def planned(gptmini, *words: str) -> dict:
    code, out, err = gptmini("size", *WORDS, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_plan_is_what_the_training_does(gptmini, text_file, tmp_path):
    found = planned(gptmini)
    assert not (tmp_path / "runs").exists()
    code, _, err = gptmini("train", *WORDS, "--out", "run")
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
    last = json.loads(run.metrics_file.read_text().splitlines()[-1])
    assert (found["steps"], found["tokens"]["seen"]) == (last["step"], last["tokens"])
    assert f"= {found['tokens']['epochs']:.1f} epochs" in err
    assert found["tokens"]["compute_optimal"] == 20 * count
    assert found["time"]["evaluations"] == 2


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
    assert 1 < found["steps"] < 300


def test_time_follows_from_the_operations_at_the_speed_of_a_product(monkeypatch):
    monkeypatch.setattr(timing, "measure_product_speed", lambda *_: 1e10)
    cpu = machine.pick_compute("cpu", "float32")
    config = tiny(train={"batch_size": 8, "optimizer": "adamw"}).with_tokenizer("byte", 257)
    flops = 8 * 16 * cost.count_training_flops(config.model, 16)
    assert timing.predict_seconds_per_step(config, cpu) == pytest.approx(flops / 5e9)
    muon = config.with_train(optimizer="muon")
    assert timing.predict_seconds_per_step(muon, cpu) > flops / 5e9


def test_the_speed_of_a_product_is_that_of_this_machine():
    cpu = machine.pick_compute("cpu", "float32")
    assert timing.measure_product_speed(32, 128, 64, cpu) > 1e6


def test_a_missing_text_is_named(gptmini):
    code, _, err = gptmini("size", "--data", "nothing.txt")
    assert code == 3
    assert "nothing.txt" in err


@pytest.mark.parametrize(
    ("number", "short"),
    [
        (0, "0 "),
        (999, "999 "),
        (1234, "1.23 k"),
        (4.56e9, "4.56 G"),
        (7.8e15, "7.80e+03 T"),
        (4.5e6, "4.50 M"),
    ],
)
def test_numbers_are_short(number, short):
    assert report.format_si(number) == short
