"""Conversations that outgrow the context of their model."""

from pathlib import Path
from typing import Any

import pytest

from gptmini.cli.chat import drop_oldest_turns
from gptmini.generate.run import Run
from tests.samples import CHAT_TOKENIZER, run_of

SYSTEM = {"role": "system", "content": "ab"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("chat") / "run", CHAT_TOKENIZER, context_length=100)


def converse(n_turns: int) -> list[dict[str, Any]]:
    messages = []
    for number in range(n_turns):
        messages.append({"role": "user", "content": f"q{number}"})
        messages.append({"role": "assistant", "content": f"a{number}"})
    return messages[:-1]


def count(run: Run, messages: list[dict[str, Any]]) -> int:
    return len(run.encode(run.render_chat(messages), special=True))


@pytest.mark.parametrize(("first", "max_new_tokens"), [([], 10), ([SYSTEM], 5000)])
def test_the_oldest_turns_are_dropped_whole(run, first, max_new_tokens):
    room = min(max_new_tokens, 50)
    dropped = set()
    for n_turns in range(1, 9):
        messages = first + converse(n_turns)
        kept = drop_oldest_turns(run, messages, max_new_tokens)
        assert count(run, kept) + room <= 100
        n_dropped = len(messages) - len(kept)
        assert n_dropped % 2 == 0
        assert kept == first + messages[len(first) + n_dropped :]
        if n_dropped:  # one turn less would have been too little
            more = first + messages[len(first) + n_dropped - 2 :]
            assert count(run, more) + room > 100
        dropped.add(n_dropped)
    assert 0 in dropped
    assert len(dropped) > 3


def test_the_last_message_stays_however_long(run):
    last = {"role": "user", "content": "long " * 100}
    assert drop_oldest_turns(run, [SYSTEM, *converse(2), last], 10) == [SYSTEM, last]


def test_a_conversation_says_once_that_it_forgets(tmp_path, gptmini, monkeypatch):
    run_of(tmp_path / "run", CHAT_TOKENIZER, context_length=100)
    asked = iter([*["Why " * 5] * 6, "quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    rendered: list[list[dict[str, Any]]] = []
    render = Run.render_chat
    monkeypatch.setattr(
        Run, "render_chat", lambda run, said: rendered.append(said[:]) or render(run, said)
    )
    code, _, said = gptmini("chat", "run", "--max-new-tokens", "8")
    assert code == 0
    assert said.count("its oldest turns are forgotten") == 1
    assert len(rendered[-1]) < 11
    assert rendered[-1][-1]["content"] == "Why " * 5


def test_a_single_message_is_answered(tmp_path, gptmini):
    run = run_of(tmp_path / "run", CHAT_TOKENIZER, context_length=100)
    messages = [{"role": "user", "content": "Why?"}]
    settings = {"max_new_tokens": 8, "temperature": 0.5, "seed": 3}
    (expected,) = run.start([run.encode_chat(messages)], **settings).finish()
    words = ["--prompt", "Why?", "--max-new-tokens", "8", "--temperature", "0.5", "--seed", "3"]
    code, out, _ = gptmini("chat", "run", *words, "--weights", "float32")
    assert (code, out) == (0, f"{expected.text}\n")


@pytest.mark.parametrize("words", [[], ["--prompt", "Hi"]])
def test_a_run_without_a_chat_template_says_so(tmp_path: Path, gptmini, words):
    run_of(tmp_path / "other")
    code, out, said = gptmini("chat", "other", *words)
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert "not learnt to answer; use: gptmini generate other --prompt TEXT" in said
