"""Lines and texts on a terminal."""

import os
import threading

import pytest

from gptmini import console


@pytest.mark.parametrize(("number", "text"), [(1.0, "1 step"), (1200, "1,200 steps")])
def test_amounts_agree_with_their_noun(number, text):
    assert console.format_count(number, "step") == text


def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.stream_to_stdout(["a\x1b[2J", "\n"])
    assert capsys.readouterr().out == "a\\x1b[2J\n"


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


def test_a_terminal_that_tells_no_width_shows_the_seconds_too(monkeypatch):
    pty = pytest.importorskip("pty")
    terminal, ours = pty.openpty()  # of no columns
    with open(ours, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        console._show_seconds("compiling", Ended())
        assert b"compiling ... 1 s" in os.read(terminal, 1000)
    os.close(terminal)


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
    rows = [["run", "text", "n"], ["中文", "é", "5"], ["a", "日本語です", "12"]]
    assert console.format_table(rows).splitlines() == [
        "run   text         n",
        "中文  é            5",
        "a     日本語です  12",
    ]


def test_foreign_text_reaches_no_terminal_unescaped(capsys):
    console.say("a file \x1b[31m\x07.txt\nerror: none of ours")
    console.warn("its template says \x1b]0;owned\x07")
    assert capsys.readouterr().err == (
        "a file \\x1b[31m\\x07.txt\\nerror: none of ours\n"
        "warning: its template says \\x1b]0;owned\\x07\n"
    )


def test_an_excerpt_ends_on_a_terminal_of_any_width(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_interactive", lambda: True)
    for columns in ("2", "9"):
        monkeypatch.setenv("COLUMNS", columns)
        console.say_excerpt("word\u4e2d\u4e2d and more")
    assert capsys.readouterr().err.splitlines() == ["  ", "  word"]
