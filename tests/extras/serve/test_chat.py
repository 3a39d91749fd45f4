"""Requests with messages, without a server."""

from typing import Any

import pytest

from gptmini.errors import ConfigError
from gptmini.extras.serve.chat import OWN_FIELDS, SHARED_FIELDS, ChatCompletion
from gptmini.extras.serve.completions import NULL_TURNS_OFF
from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.scheduler import TokenEvent
from gptmini.generate.run import Run
from tests.samples import CHAT_TOKENIZER, run_of

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    sample = {"top_p": 0.9, "min_p": 0.1}
    return run_of(tmp_path_factory.mktemp("chat") / "run", CHAT_TOKENIZER, sample)


def ask(run: Run, **fields: Any) -> ChatCompletion:
    return ChatCompletion(run, "chat", Limits(max_waiting=8, max_tokens=50), fields)


def test_messages_become_the_prompt_of_their_template(run):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    for content in ("Hi", parts):
        completion = ask(run, messages=[{"role": "user", "content": content}], n=2)
        prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert [request.text.prompt for request in completion.requests] == [prompt] * 2
        special = run.tokenizer.special_tokens["<|im_start|>"]
        assert completion.requests[0].text.prompt_tokens.count(special) == 2


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_as_long_as_was_asked_for_or_as_the_limit(run, key):
    assert ask(run, messages=HI, **{key: 7}).sample.max_new_tokens == 7
    assert ask(run, messages=HI).sample.max_new_tokens == 50
    assert ask(run, messages=HI).sample.overflow == "stop"
    with pytest.raises(ConfigError, match="max_tokens: must be at most 50"):
        ask(run, messages=HI, **{key: 51})


def test_the_default_length_leaves_room_for_all_log_probabilities(run):
    limits = Limits(max_waiting=64, max_tokens=4096)
    for n in (1, 4, 64):
        fields = {"messages": HI, "n": n, "logprobs": True, "top_logprobs": 20}
        sample = ChatCompletion(run, "chat", limits, fields).sample
        assert sample.max_new_tokens == min(4096, (1 << 18) // (21 * n))
    for n in (0, "4", True):
        with pytest.raises(ConfigError, match=r"^n: "):
            ask(run, messages=HI, n=n)


def test_null_turns_a_setting_off_and_leaves_the_end_of_an_answer(run):
    off = dict.fromkeys(("top_k", "top_p", "min_p"))
    sample = ask(run, messages=HI, overflow=None, seed=None, **off).sample
    assert {key: getattr(sample, key) for key in off} == off
    assert sample.overflow == "stop"


def test_a_token_is_described_with_its_bytes(run):
    completion = ask(run, messages=HI, logprobs=True, top_logprobs=1)
    tokens = [*run.encode("H"), *run.encode("é")[:1], *run.encode("<|im_end|>", special=True)]
    events = [TokenEvent("", token, -1.0, [(tokens[0], -0.5)], None) for token in tokens]
    described = completion.build_choice(0, events)["logprobs"]["content"]
    top = [{"token": "H", "logprob": -0.5, "bytes": [72]}]
    name = "<|im_end|>"
    assert described == [
        {"token": "H", "logprob": -1.0, "bytes": [72], "top_logprobs": top},
        {"token": "bytes:\\xc3", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": top},
        {"token": name, "logprob": -1.0, "bytes": [*name.encode()], "top_logprobs": top},
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "messages: must be a list of messages"),
    ({"messages": []}, "messages: must be a list of messages"),
    ({"messages": "Hi"}, "messages: must be a list of messages"),
    ({"messages": ["Hi"]}, r"messages\[0\]: must be an object"),
    ({"messages": [*HI, {"role": "robot", "content": ""}]}, r"messages\[1\].role: must be one of"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\].content: must be text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
    ({"messages": [{"role": "user", "content": "a b " * 99}]}, "^messages: [0-9]+ tokens, but the"),
    ({"messages": [{**HI[0], "audio": {"id": "a"}}]}, r"messages\[0\].audio: not supported"),
    ({"messages": [{**HI[0], "tool_calls": [{"id": "a"}]}]}, r"messages\[0\].tool_calls: not supp"),
    ({"messages": [{**HI[0], "refusal": "no"}]}, r"messages\[0\].refusal: not supported"),
    ({"messages": [{**HI[0], "weight": 0}]}, r"messages\[0\].weight: not supported"),
    ({"messages": [{**HI[0], "content": None}]}, r"messages\[0\].content: must be text"),
    ({"messages": [{**HI[0], "content": [{"type": "text", "text": "a", "n": 1}]}]}, "parts of"),
    ({"messages": HI, "tools": []}, "tools: not supported; leave it out"),
    ({"messages": HI, "prompt": "a"}, "prompt: not supported; leave it out"),
    ({"messages": HI, "logprobs": 3}, "logprobs: must be true or false"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs: has no effect without logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs: must be 0 to 20"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format: only text"),
    ({"messages": HI, "temperature": -1}, "temperature"),
    ({"messages": HI, "max_tokens": "7"}, "max_"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_request_is_named(run, fields, message):
    with pytest.raises(ConfigError, match=message):
        ask(run, **fields)


def test_null_in_a_field_is_as_good_as_leaving_it_out(run):
    plain = ask(run, messages=HI, seed=1)
    for key in (SHARED_FIELDS | OWN_FIELDS) - {"messages", "seed", *NULL_TURNS_OFF}:
        other = ask(run, **{"messages": HI, "seed": 1, key: None})
        assert other.sample == plain.sample, key
        assert [each.n_logprobs for each in other.requests] == [None], key
        assert not other.stream, key
    empty = {"name": "Ann", "refusal": None, "annotations": [], "reasoning_content": ""}
    assert ask(run, messages=[HI[0] | empty]).prompt_tokens == plain.prompt_tokens
    part = {"type": "text", "text": "Hi", "image_url": None}
    assert ask(run, messages=[{"role": "user", "content": [part]}]).prompt_tokens == (
        plain.prompt_tokens
    )


def test_fields_reach_the_completion(run):
    fields = {"temperature": 0.25, "stop": ["x"], "ban": ["a"], "overflow": "slide"}
    whole = ask(run, messages=HI, **fields, logprobs=True, top_logprobs=20, n=8)
    assert {key: getattr(whole.sample, key) for key in fields} == fields
    assert [each.n_logprobs for each in whole.requests] == [20] * 8
    assert [each.text.number for each in whole.requests] == list(range(8))
    both = ask(run, messages=HI, max_tokens=3, max_completion_tokens=4)
    assert both.sample.max_new_tokens == 4
    stream = ask(run, messages=HI, stream=True, stream_options={"include_usage": True})
    assert (stream.stream, stream.include_usage) == (True, True)
