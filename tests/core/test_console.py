"""What people see while a run trains, and texts on a terminal."""

import re
import threading
import time

import pytest

from gptmini import console
from gptmini.console import TrainingProgressBar


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
    progress = TrainingProgressBar(60, 600)
    for _ in range(20):
        clock.now += 0.1827
        progress.advance(1.81524)
    progress.show(TRAINED)
    progress.show(EVALUATED)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "step  80/600  13%  loss 1.8152  lr 2.0e-03  22,346 tok/s  1:35 left",
        "step  80/600  13%  val 1.7421  2.513 bits/byte",
    ]


def test_the_time_left_follows_the_plan(clock, capsys):
    progress = TrainingProgressBar(0, 10)
    for _ in range(3):
        clock.now += 60
        progress.advance(1.81524)
    progress.set_steps(93, 1.0)
    progress.show(TRAINED)  # 90 steps of a minute
    progress.set_steps(3, 1.0)
    progress.show(TRAINED)
    longer, first, shorter, last = capsys.readouterr().err.splitlines()
    assert longer == "  now 93 steps, to fit 1 minute"
    assert shorter == "  now 3 steps, to fit 1 minute"
    assert first.endswith("tok/s  1h30m left")
    assert last == "step 3/3 100%  loss 1.8152  lr 2.0e-03  22,346 tok/s"


def test_a_line_fits_80_columns(clock, capsys):
    progress = TrainingProgressBar(0, 100_000)
    clock.now = 1.0
    progress.advance(1.81524)
    progress.show(TRAINED | {"train_loss": 10.5, "tokens_per_second": 1_234_567.0} | EVALUATED)
    assert all(len(line) <= 80 for line in capsys.readouterr().err.splitlines())


def test_training_on_a_terminal_shows_the_same_facts_in_a_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = TrainingProgressBar(60, 600)
    clock.now = 1.0
    progress.advance(1.81524)
    progress.show(TRAINED)
    assert re.search(
        r"\rstep  61/600  10%  loss 1.8152  lr 2.0e-03  22,346 tok/s  8:59 left \|.*\|",
        capsys.readouterr().err,
    )
    progress.advance(1.7)  # between two lines of metrics
    progress.show(EVALUATED)
    err = capsys.readouterr().err
    assert "step  62/600  10%  val 1.7421  2.513 bits/byte\n" in err
    assert re.search(r"step  62/600  10%  loss 1.7000  lr 2.0e-03  22,346 tok/s", err)
    progress.close()


def test_only_a_change_of_more_than_2_percent_gets_a_line(clock, capsys):
    progress = TrainingProgressBar(0, 1000)
    for steps in (1010, 1020, 1021, 1030, 1200):
        progress.set_steps(steps, 0.5)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "  now 1,021 steps, to fit 0.5 minutes",
        "  now 1,200 steps, to fit 0.5 minutes",
    ]


def test_a_header_is_wrapped_on_a_terminal_only(monkeypatch, capsys):
    line = "  model     " + "one-two three " * 10 + "end"
    console.say_header(line)
    assert capsys.readouterr().err == f"{line}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    console.say_header(line)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("  model     one-two")
    assert len(rest) == 2
    assert all(re.match(" {12}(one-two|three|end)", each) for each in rest)
    assert " ".join([first, *rest]).split() == line.split()
    assert max(map(len, [first, *rest])) < 80
    console.say_header("  data      " + "中文 " * 20)
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("中文") for line in lines] == [13, 7]
    for words in ("中文" * 40, "中" * 30 + " word" * 30, "e\u0301" * 40 + " word" * 30):
        console.say_header(f"  data      {words}")
        lines += capsys.readouterr().err.splitlines()
        assert lines[-1]
    assert max(map(console.measure_width, lines)) < 80
    assert sum(line.count("中") for line in lines) == 20 + 40 + 30


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 step"), (1.0, "1 step"), (0.5, "0.5 steps"), (1200, "1,200 steps")]
)
def test_amounts_agree_with_their_noun(number, text):
    assert console.format_count(number, "step") == text


def test_control_characters_reach_a_terminal_only_if_raw(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.stream_to_stdout(["a\x1b[2J", "\n"])
    console.stream_to_stdout(["a\x1b[2J", "\n"], raw=True)
    assert capsys.readouterr().out == "a\\x1b[2J\na\x1b[2J\n"


class Ended(threading.Event):
    """Work that ends after some waits for it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 1
        self.waits += 1
        return self.waits > 3


def test_long_work_counts_its_seconds_on_a_line_of_its_own(capsys):
    console._show_seconds("compiling", Ended())
    shown = capsys.readouterr().err
    first = next(text for text in shown.split("\r") if text.strip())
    assert first == "compiling ... 1 s"
    assert shown.endswith("\r")  # the line is removed


def test_short_work_shows_nothing(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_interactive", lambda: True)
    for _ in range(2):
        with console.show_elapsed("reading"):
            pass

    @console.show_elapsed("adding")
    def add(one: int, other: int) -> int:
        return one + other

    assert add(1, 2) == add(2, 1) == 3
    with pytest.raises(KeyError), console.show_elapsed("failing"):
        raise KeyError
    assert capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if "_show_seconds" in thread.name]


def test_words_of_printed_commands_are_quoted_for_the_users_shell(monkeypatch):
    assert console.quote("it's") == """'it'"'"'s'"""
    monkeypatch.setattr(console, "IS_WINDOWS", True)
    words = [r"C:\runs\my-run_1.0", "my run", "R&D", "it's"]
    assert [console.quote(word) for word in words] == [words[0], '"my run"', '"R&D"', '"it\'s"']


def test_columns_are_aligned_on_a_terminal_where_some_characters_take_two():
    texts = ("", "abc", "中文", "。", "😀", "e\u0301", "a\u200db")
    assert [console.measure_width(text) for text in texts] == [0, 3, 4, 2, 2, 1, 2]
    rows = [["run", "text", "n"], ["中文", "é", "5"], ["a", "日本語です", "12"]]
    assert console.format_table(rows).splitlines() == [
        "run   text         n",
        "中文  é            5",
        "a     日本語です  12",
    ]


def test_a_strangers_text_reaches_no_terminal_unescaped(capsys):
    console.say("a file \x1b[31m\x07.txt")
    console.warn("its template says \x1b]0;owned\x07")
    assert capsys.readouterr().err == (
        "a file \\x1b[31m\\x07.txt\nwarning: its template says \\x1b]0;owned\\x07\n"
    )
