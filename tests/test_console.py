"""What people see while a run trains, and texts on a terminal."""

import re
import time

import pytest

from gptmini import console
from gptmini.console import TrainingProgress


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch) -> type[Clock]:
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


TRAINED = {"train_loss": 1.81524, "lr": 0.002, "tokens_per_second": 22346.2, "grad_norm": 1.0}
EVALUATED = {"val_loss": 1.74213, "val_bpb": 2.51311}


def test_training_in_a_pipe_prints_lines_with_percent_and_time_left(clock, capsys):
    progress = TrainingProgress(60, 600)
    for _ in range(20):
        clock.now += 0.1827
        progress.advance()
    progress.show(TRAINED)
    progress.show(EVALUATED)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "step  80/600  13%  loss 1.8152  lr 2.0e-03  22,346 tok/s  1:35 left",
        "step  80/600  13%  val 1.7421  2.513 bits/byte",
    ]


def test_the_time_left_follows_the_plan_and_counts_steps_made_again(clock, capsys):
    progress = TrainingProgress(0, 10)
    for _ in range(4):
        clock.now += 60
        progress.advance()
    progress.back_to(2)
    clock.now += 60
    progress.advance()
    progress.plan(93)
    progress.show(TRAINED)  # 90 steps of a minute
    progress.plan(3)
    progress.show(TRAINED)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("tok/s  1h30m left")
    assert last == "step 3/3 100%  loss 1.8152  lr 2.0e-03  22,346 tok/s"


def test_a_line_fits_80_columns(clock, capsys):
    progress = TrainingProgress(0, 100_000)
    clock.now = 1.0
    progress.advance()
    progress.show(TRAINED | {"train_loss": 10.5, "tokens_per_second": 1_234_567.0} | EVALUATED)
    assert all(len(line) <= 80 for line in capsys.readouterr().err.splitlines())


def test_training_on_a_terminal_shows_the_same_facts_in_a_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = TrainingProgress(60, 600)
    clock.now = 1.0
    progress.advance()
    progress.show(TRAINED)
    assert re.search(
        r"\rstep  61/600  10%  loss 1.8152  lr 2.0e-03  22,346 tok/s  8:59 left \|.*\|",
        capsys.readouterr().err,
    )
    progress.show(TRAINED | EVALUATED)
    assert "step  61/600  10%  val 1.7421  2.513 bits/byte\n" in capsys.readouterr().err
    progress.close()


def test_control_characters_reach_a_terminal_only_if_raw(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.stream_to_stdout(["a\x1b[2J", "\n"])
    console.stream_to_stdout(["a\x1b[2J", "\n"], raw=True)
    assert capsys.readouterr().out == "a\\x1b[2J\na\x1b[2J\n"
