"""`gptmini generate` as it is used, and misused."""

import io
import json
import sys
from pathlib import Path

import pytest

from gptmini import console
from gptmini.cli.options import MAX_INPUT_BYTES

FEW = ["--max-new-tokens", "6"]


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_prompt_from_anywhere_gives_the_same_text(gptmini, run, monkeypatch):
    code, expected, _ = gptmini("generate", "--prompt", "the é", *FEW)
    assert code == 0
    for end in ("", "\n", "\r\n"):  # as an editor or `echo` ends a file
        Path("prompt.txt").write_bytes(f"the é{end}".encode())
        assert gptmini("generate", "--prompt-file", "prompt.txt", *FEW)[1] == expected
        give(monkeypatch, f"the é{end}".encode())
        assert gptmini("generate", "--prompt-file", "-", *FEW)[1] == expected
    Path("prompt.txt").write_text("the é\n\n")
    with_break = gptmini("generate", "--prompt", "the é\n", *FEW)[1]
    assert gptmini("generate", "--prompt-file", "prompt.txt", *FEW)[1] == with_break


def test_a_terminal_is_told_which_limit_ended_the_texts(gptmini, run, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for words, is_limit in ([], True), (["--stop", " "], False):
        code, _, err = gptmini("generate", "--prompt", "the", "--samples", "2", *FEW, *words)
        assert (code, "stopped at --max-new-tokens 6\n" in err) == (0, is_limit), err


def test_several_samples_are_the_same_in_any_batch(gptmini, run):
    words = ["generate", "--prompt", "the ", "--samples", "5", *FEW]
    code, out, _ = gptmini(*words)
    assert code == 0
    assert out.count("--- ") == 5
    assert gptmini(*words, "--batch-size", "2")[1] == out
    code, text, _ = gptmini("generate", "--prompt", "the ", *FEW)
    assert out.startswith("--- 1\n" + text)


def test_json_holds_samples_speed_and_engine(gptmini, run):
    words = ["generate", run, "--prompt", "the ", "--samples", "3", "--json", *FEW]
    code, out, err = gptmini(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [sample["number"] for sample in found["samples"]] == [0, 1, 2]
    for sample in found["samples"]:
        assert sample["finish_reason"] in ("length", "document")
        assert len(sample["tokens"]) == len(sample["logprobs"]) > 0
        assert all(logprob <= 0 for logprob in sample["logprobs"])
    assert found["tokens_per_second"] > 0
    assert 0 < found["time_to_first_token"] < 60
    assert found["engine"] in ("compiled", "torch")


def test_options_reach_the_sampler_and_override_set(gptmini, run):
    greedy = ["generate", "--prompt", "a", "--temperature", "0", "--max-new-tokens", "60"]
    text = gptmini(*greedy)[1][1:-1]
    place = text.index(text[7:9])
    assert gptmini(*greedy, "--stop", text[7:9])[1] == "a" + text[:place] + "\n"
    assert gptmini(*greedy, "--set", 'sample.bias={"=": 100}')[1] == "a" + "=" * 60 + "\n"
    breaks = ["--set", r'sample.bias={"\n": 100}']
    assert gptmini(*greedy, *breaks, "--stop", r"\n")[1] == "a\n"
    penalties = ["--set", "sample.repetition_penalty=5", "--set", "sample.max_new_tokens=1"]
    other = gptmini(*greedy, *penalties)[1]
    assert len(set(other)) > len(set(text))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "standard input: not UTF-8 at byte 0"),
        (b"x" * (MAX_INPUT_BYTES + 1), "standard input: over 16 MiB"),
    ],
)
def test_standard_input_that_cannot_be_a_prompt(gptmini, run, monkeypatch, data, message):
    give(monkeypatch, data)
    code, out, err = gptmini("generate", run, "--prompt-file", "-")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert message in err
    give(monkeypatch, data)
    assert gptmini("score", "--file", "-")[0] == 3


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt", "\udc80"], 3, "character 0 is not valid Unicode"),
        (["--prompt-file", "nothere"], 5, "nothere: no such file"),
        (["--prompt", "x" * 30, "--set", "sample.overflow=error"], 2, "do not fit the context"),
        (["--set", "train.lr=1"], 2, "only sampling settings apply here; write sample.KEY=VALUE"),
        (["--set", "sample.temprature=1"], 2, "no such setting; did you mean"),
        (["--draft", "nothere"], 4, "nothere: no run here"),
        (["-i", "--json"], 2, "--json: cannot be combined with --interactive"),
        (["-i", "--samples", "2"], 2, "--samples: cannot be combined with --interactive"),
    ],
)
def test_impossible_requests_fail_in_one_line(gptmini, run, words, code, message):
    found, out, err = gptmini("generate", run, *words)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["runs/txt"], "runs/txt: no run here; did you mean runs/text?"),
        (["runs/text/checkpoints"], "no run here; did you mean runs/text?"),
        (["runs/text", "--draft", "tex"], "tex: no run here; did you mean runs/text?"),
        (["a\nb " + "c" * 5000], "...: no run here; train one with gptmini train"),
    ],
)
def test_what_is_not_a_run_is_answered_with_what_was_meant(gptmini, run, monkeypatch, words, hint):
    monkeypatch.setitem(sys.modules, "gptmini.generate.run", None)  # torch would be loaded for it
    code, out, err = gptmini("generate", *words)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert hint in err


def test_a_stdout_of_ascii_only_gets_question_marks(gptmini, run, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert gptmini("generate", run, "--prompt", "é€", *FEW)[0] == 0
    assert printed.getvalue().startswith(b"??")


def test_nul_and_special_text_in_a_prompt_are_text(gptmini, run):
    code, out, _ = gptmini("generate", "--prompt", "<|endoftext|>", *FEW)
    assert code == 0
    assert out.startswith("<|endoftext|>")
    assert out != gptmini("generate", "--prompt", "<|endoftext|>", "--special", *FEW)[1]
    Path("nul").write_bytes(b"a\0b")
    assert gptmini("generate", "--prompt-file", "nul", *FEW)[1].startswith("a\0b")


# -- a conversation --------------------------------------------------------------------------------


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Type these lines, then Ctrl-D."""
    left = iter(lines)

    def typed(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)


def test_an_empty_line_continues_and_a_new_line_starts_over(gptmini, run, monkeypatch):
    greedy = [run, "--temperature", "0", *FEW]
    converse(monkeypatch, "the ", "", "a")
    code, out, err = gptmini("generate", "-i", *greedy)
    assert code == 0
    assert "Ctrl-C" in err
    first = gptmini("generate", "--prompt", "the ", *greedy)[1]
    both = gptmini("generate", "--prompt", first[:-1], *greedy)[1]
    third = gptmini("generate", "--prompt", "a", *greedy)[1]
    assert out == first + both.removeprefix(first[:-1]) + third


def test_a_prompt_typed_again_gives_another_text_unless_there_is_a_seed(gptmini, run, monkeypatch):
    hot = [run, "--temperature", "3", "--max-new-tokens", "8"]
    converse(monkeypatch, "a", "a")
    talk = gptmini("generate", "-i", *hot)[1]
    samples = gptmini("generate", "--prompt", "a", "--samples", "2", *hot)[1]
    assert talk == samples.replace("--- 1\n", "").replace("--- 2\n", "")
    assert samples.count("--- ") == 2
    once = gptmini("generate", "--prompt", "a", "--seed", "7", *hot)[1]
    converse(monkeypatch, "a", "a")
    assert gptmini("generate", "-i", "--seed", "7", *hot)[1] == once * 2
    assert talk != gptmini("generate", "--prompt", "a", *hot)[1] * 2


@pytest.mark.parametrize("word", ["exit", "quit "])
def test_exit_and_quit_end_a_conversation(gptmini, run, monkeypatch, word):
    converse(monkeypatch, word, "a")
    assert gptmini("generate", run, "-i")[:2] == (0, "")


def test_ctrl_c_ends_the_text_and_not_the_conversation(gptmini, run, monkeypatch):
    converse(monkeypatch, "the ", "a")
    stream_to_stdout, calls = console.stream_to_stdout, []

    def interrupted(texts):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        stream_to_stdout(texts)

    monkeypatch.setattr(console, "stream_to_stdout", interrupted)
    assert gptmini("generate", run, "--interactive", "--max-new-tokens", "4")[0] == 0
    assert len(calls) == 3  # a text, the end of its line, and the text of the second prompt


def test_wrong_settings_when_generating(gptmini, run):
    for words, line in [
        (["--temperature", "-1"], "--temperature: must be at least 0, not -1"),
        (["--set", "sample.top_k=0"], "--set sample.top_k: "),
        (["--max-new-tokens", "-1"], "--max-new-tokens: "),
        (["--stop", ""], "--stop"),
        (["--set", "sample.bias=e"], "--set sample.bias: "),
        (["--set", "sample.bias={e: nan}"], "sample.bias.e: must be a valid number"),
        (["--set", "sample.ban=[é]"], "sample.ban: 'é' is not one token"),
        (["--samples", "0"], "--samples: must be at least 1; see gptmini generate --help"),
        (["--samples", "x"], "--samples: must be a valid integer; see"),
        (["--weights", "int4"], "--weights int4: not supported"),
        (["--prompt-file", "x"], "--prompt: cannot be combined with --prompt-file"),
        (["-i"], "--prompt: cannot be combined with --interactive"),
        (["--device", "gpu"], "device gpu: unknown; use auto, cpu, cuda, mps or xpu"),
    ]:
        code, out, err = gptmini("generate", run, "--prompt", "The ", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert line in err
