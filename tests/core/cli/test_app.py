"""What every command shares: errors, help, exit codes, closed streams, threads."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import typer.core

from gptmini import __version__, console
from gptmini.cli import app, generate
from gptmini.machine import catch_signals
from tests.support import needs_posix

DIGITS = "9" * 5000  # more than Python converts
ERRORS = [
    (["train", "nothere"], 2, "nothere: no such configuration or text"),
    (["train", "nothere.yaml"], 2, "nothere.yaml: no such file"),
    (["train", "--set", "train.steps=2", "train.seed=1"], 2, "each setting needs --set before it"),
    (["train", "--attention", "gqa:3"], 2, "gqa:3: 4 heads (n_head) cannot share 3 KV heads; use"),
    (["train", "--attention", f"gqa:{DIGITS}"], 2, "9...'"),
    (["train", "--steps", "0"], 2, "--steps: must be at least 1, not 0"),
    (["train", "--set", "data.weights=[1,2]"], 2, "data.weights: 2 weights for 1 paths"),
    (
        ["train", "--set", "tokenizer.vocab_size=999"],
        2,
        "tokenizer.vocab_size: only kind bpe has a choice",
    ),
    (["train", "--set", "model.vocab_size=9"], 2, "model.vocab_size: 9"),
    (["train", "--data", "builtin:x"], 3, "choose builtin:stories"),
    (["train", "--step", "3"], 2, "--steps); see"),  # not base.step
    (["train", "--grad-clip", "9"], 2, "--set train.grad_clip=VALUE"),
    (["train", "--data", "nanogpt.py", "--out", "nanogpt.py"], 2, "nanogpt.py: a file, not a dir"),
    (["generate", "--samples=0"], 2, "--samples"),
    (["generate", "--top-k", "9"], 2, "option: --top-k; use --set sample.top_k=VALUE"),
    (["train", "--data", "a.txt", "b.txt", "c.txt"], 2, "repeat --data before each text, or quote"),
    (["generate", "--prompt", "It", "was", "so"], 2, "put the text after --prompt"),
    (["settings", "foo"], 2, "foo: no such setting; see gptmini settings, or"),
    (["trian"], 2, "'train'"),
    (["tokenizer", "tran"], 2, "gptmini tokenizer --help"),
    (["inspect", "--mask", f"window:{DIGITS}"], 2, "9...: unknown mask; use causal, or window:N"),
    (["tokenizer", "decode", "byte", "257"], 3, "257: not a token; use numbers from 0 to 256"),
    (["train", "--data", "none.txt"], 3, "none.txt: no such file or directory; check the path"),
    (["generate"], 4, "runs: no run here"),
    (["generate", "nothere"], 4, "nothere: no run here"),
]


@pytest.mark.parametrize(("words", "code", "line"), ERRORS)
def test_errors_are_one_line_with_a_remedy(gptmini, words, code, line):
    Path("nanogpt.py").write_text("n_layer = 2\n")
    found, out, err = gptmini(*words)
    assert (found, out) == (code, "")
    assert line in err
    assert err.startswith("gptmini: ")
    assert err.count("\n") == 1
    assert "; " in err or "must be" in err or "id you mean" in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_shell_completes_commands_and_options(gptmini, monkeypatch):
    monkeypatch.setenv("_GPTMINI_COMPLETE", "complete_bash")
    for typed, completed in (("gptmini gen", "generate"), ("gptmini train --st", "--steps")):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        assert gptmini() == (0, f"{completed}\n", "")


def test_before_torch_is_loaded_threads_are_set_and_a_wrong_run_or_text_is_named(tmp_path: Path):
    commands = ["generate nothere", "evaluate nothere", "train nothere.txt --data nothere.txt"]
    check = (
        "import os, sys\n"
        "from gptmini.cli.app import main\n"
        f"for number, words in enumerate({commands}, 2):\n"
        "    sys.argv = ['gptmini', *words.split(), '--threads', str(number)]\n"
        "    try: main()\n"
        "    except SystemExit as end:\n"
        "        print(end.code > 1, os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    answers = [f"True {number} False\n" for number in range(2, 5)]
    assert done.stdout == "".join(answers), done.stderr
    assert done.stderr.count("\n") == len(commands)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_wait_asleep_unless_the_user_says_how(gptmini, monkeypatch, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is restored
        if name not in given:
            monkeypatch.delenv(name)
    assert gptmini("--version")[0] == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_an_internal_error_is_one_line_and_a_traceback_only_with_debug(gptmini, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(generate, "resolve_run", broken)
    code, _, err = gptmini("generate")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("gptmini: internal error: ZeroDivisionError()")
    assert "--debug" in err
    for words in (["--debug", "generate"], ["generate", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["gptmini", *words])
        with pytest.raises(ZeroDivisionError):
            app.main()


@pytest.mark.usefixtures("default_signals")
def test_a_library_that_catches_its_own_failures_swallows_no_signal(gptmini, monkeypatch):
    cleaned = []

    def work(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception as error:
            raise RuntimeError("the compiler failed") from error
        finally:
            signal.raise_signal(signal.SIGTERM)  # of a terminal that closes
            cleaned.append(True)

    monkeypatch.setattr(generate, "resolve_run", work)
    assert gptmini("generate") == (143, "", "gptmini: stopped by SIGTERM\n")
    assert cleaned == [True]


@pytest.mark.usefixtures("default_signals")
def test_after_a_library_that_catches_everything_the_second_signal_counts(gptmini, monkeypatch):
    def work(*_: object) -> None:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        with catch_signals() as received:
            signal.raise_signal(signal.SIGTERM)
        assert received.stop == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(generate, "resolve_run", work)
    assert gptmini("generate") == (143, "", "gptmini: stopped by SIGTERM\n")


@pytest.mark.slow
@needs_posix
@pytest.mark.usefixtures("default_signals")
def test_sigterm_ends_training_whenever_it_comes(tmp_path: Path, text_file: Path):
    """At ten moments from Enter to the first step: the command ends, and can be typed again."""
    settings = {"train.compile": "on", "train.steps": 100_000}
    words = [f"--set={key}={value}" for key, value in settings.items()]
    words += ["--data", str(text_file), "--set=model.n_layer=2", "--set=model.context_length=32"]
    command = [sys.executable, "-m", "gptmini", "train", *words, "--out"]

    def begin(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, str(tmp_path / name)], stderr=subprocess.PIPE, text=True)

    def end(process: subprocess.Popen[str]) -> str:
        process.terminate()
        return process.communicate(timeout=100)[1]

    started = time.perf_counter()
    with begin("whole") as whole:
        assert whole.stderr is not None
        next(line for line in whole.stderr if line.split()[1:2] == ["1/100000"])
        seconds = time.perf_counter() - started
        end(whole)
    for moment in range(10):
        with begin("stopped") as process:
            time.sleep(seconds * (moment + 0.5) / 10)
            said = end(process)
        is_caught = process.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM" in said
        assert is_caught or (process.returncode, said) == (-signal.SIGTERM, ""), (moment, said)


def test_control_characters_are_shown_not_obeyed():
    assert (
        console.escape_control_characters("a\x1b[31mé\n\t\x07東\x9b")
        == "a\\x1b[31mé\n\t\\x07東\\x9b"
    )
    ordinary = "\u3000l\u00a0homme\u202f! \u200d"
    assert console.escape_control_characters(ordinary + "\r\n") == ordinary + "\n"
    assert console.escape_control_characters("a\u202eb\u2028c") == "a\\u202eb\\u2028c"


def test_a_name_in_a_table_ends_no_line_and_turns_no_text():
    table = console.format_table([["run", "size"], ["a\x1b[2J\nb\tc\u202ed\u2028", "1"]])
    assert table.splitlines()[1:] == ["a\\x1b[2J\\nb\\tc\\u202ed\\u2028     1"]


def test_a_page_of_a_deleted_folder_says_so(gptmini, monkeypatch, run: str):
    loaded = [name for name in sys.modules if name.startswith("gptmini.extras.")]
    for name in ("gptmini.extras", "gptmini.extras.page", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = gptmini("inspect", run, "--prompt", "the", "--out", "a.html")
    assert code == 5
    assert err.splitlines()[-1].startswith("gptmini: pages: gptmini/extras")


def test_the_version(gptmini):
    assert gptmini("--version") == (0, f"gptmini {__version__}\n", "")


def test_help_lists_train_and_generate_first(gptmini):
    commands = re.findall(r"^  ([a-z]+)  ", gptmini("--help")[1].partition("Commands:")[2], re.M)
    assert commands[:2] == ["train", "generate"]
    assert commands[2:8] == ["chat", "score", "evaluate", "inspect", "runs", "settings"]
    assert commands[-2:] == ["data", "tokenizer"]


def test_help_is_terse_and_at_80_columns_whole(gptmini, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def check(group: typer.core.TyperGroup, *words: str) -> None:
        for name, command in group.commands.items():
            text = gptmini(*words, name, "--help")[1]
            assert text.startswith(f"Usage: gptmini {' '.join([*words, name])} ")
            assert max(map(len, text.splitlines())) <= 80
            listed = re.findall(r"^  (?:-\w, )?(--[\w-]+|[A-Z|]+)(?: |$)", text, re.M)
            assert len(listed) == len(command.params) + 1, text  # --help is one more
            assert not re.search(r"\.\.\.$", text.partition("Commands:")[2], re.M), text
            if isinstance(command, typer.core.TyperGroup):
                check(command, *words, name)
            helps = [command.help.partition("\n")[0], *(param.help for param in command.params)]
            assert [line for line in helps if len(line.split()) > 12] == []

    check(typer.main.get_command(app.app))
    headings = re.findall(r"^(\w.*):$", gptmini("generate", "--help")[1], re.M)
    assert headings == ["Arguments", "What to write", "How to sample", "Options"]


@pytest.mark.parametrize("words", ["settings", "--help", "train --help", "tokenizer info byte"])
def test_output_that_nobody_reads_ends_a_command_quietly(words, tmp_path: Path):
    """With the exit code that a shell gives to what SIGPIPE ends, or 0 for a stream of text."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "gptmini", *words.split()]
    done = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, check=False, cwd=tmp_path
    )
    os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == (0 if words == "settings" else 141)


@needs_posix
@pytest.mark.parametrize(
    ("words", "closed", "printed"),
    [
        ("tokenizer encode byte", "<&-", "\n"),
        ("settings train.steps", ">&-", ""),
        ("settings nothing", "2>&-", ""),
    ],
)
def test_closed_streams_are_empty_ones(words, closed, printed):
    command = f"'{sys.executable}' -m gptmini {words} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    code = 2 if "nothing" in words else 0
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


@needs_posix
def test_a_closed_pipe_is_not_an_error(gptmini, run: str):
    command = f"'{sys.executable}' -m gptmini generate {run} --max-new-tokens 4000 | head -c 5"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout) == 5
