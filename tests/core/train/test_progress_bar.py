"""What people see while a run trains."""

import re
import time

import pytest

from gptmini.train.progress_bar import TrainingProgressBar


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch) -> type[Clock]:
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


TRAINED = {"train_loss": 1.81524, "lr": 0.002, "tokens_per_second": 22346.2, "grad_norm": 1.0}
EVALUATED = {"val_loss": 1.74213, "val_bpb": 2.51311, "sample": "A\n\tdoor\x1b[31m. " + "中文" * 30}


def test_training_in_a_pipe_prints_lines_with_percent_and_time_left(clock, capsys):
    progress = TrainingProgressBar(60, 600)
    for _ in range(20):
        clock.now += 0.1827
        progress.advance(1.81524, 600)
    progress.show(TRAINED)
    progress.show(EVALUATED)
    progress.show(EVALUATED)  # what was said once is known
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "step  80/600  13%  loss 1.8152  lr 2.0e-03  22,346 tok/s  1:35 left",
        "step  80/600  13%  val 1.7421  2.513 bits per byte, lower is better",
        "step  80/600  13%  val 1.7421  2.513 bits per byte",
    ]


def test_a_log_file_gets_a_line_every_ten_seconds_at_most(clock, capsys):
    progress = TrainingProgressBar(0, 100)
    for _ in range(100):
        clock.now += 0.75
        progress.advance(1.81524, 100)
        progress.show(TRAINED)
    steps = [int(line[5:8]) for line in capsys.readouterr().err.splitlines()]
    assert steps == [1, 15, 29, 43, 57, 71, 85, 99, 100]  # 14 steps take 10.5 seconds


def test_the_time_left_follows_the_plan(clock, capsys):
    progress = TrainingProgressBar(0, 10)
    for steps in (10, 10, 93):
        clock.now += 60
        progress.advance(1.81524, steps)
    progress.show(TRAINED)  # 90 steps of a minute
    progress.advance(1.81524, 4)
    progress.show(TRAINED)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("tok/s  1h30m left")
    assert last == "step 4/4 100%  loss 1.8152  lr 2.0e-03  22,346 tok/s"


def test_a_line_fits_80_columns(clock, capsys):
    progress = TrainingProgressBar(0, 100_000)
    clock.now = 1.0
    progress.advance(1.81524, 100_000)
    progress.show(TRAINED | {"train_loss": 10.5, "tokens_per_second": 1_234_567.0} | EVALUATED)
    assert all(len(line) <= 80 for line in capsys.readouterr().err.splitlines())


def test_training_on_a_terminal_shows_the_same_facts_in_a_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = TrainingProgressBar(60, 600)
    for _ in range(3):
        clock.now += 1.0
        progress.advance(1.81524, 600)
        progress.show(TRAINED)
    err = capsys.readouterr().err
    rates = "loss 1.8152  lr 2.0e-03  22,346 tok/s"
    assert re.search(rf"\rstep  62/600  10%  {rates} \|.*\|", err)  # too early to say how long
    assert re.search(rf"\rstep  63/600  10%  {rates}  8:57 left \|.*\|", err)
    progress.advance(1.7, 600)  # between two lines of metrics
    progress.show(EVALUATED)
    err = capsys.readouterr().err
    assert "step  64/600  11%  val 1.7421  2.513 bits per byte, lower is better\n" in err
    assert f"\x1b[2mA↵ door\\x1b[31m. {'中文' * 13}\x1b[0m\n" in err  # of 70 columns
    assert re.search(r"step  64/600  11%  loss 1.7000  lr 2.0e-03  22,346 tok/s", err)
    progress.close()
