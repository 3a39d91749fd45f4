"""Requests become texts, and events a response, without a server."""

import asyncio
from typing import Any

import pytest
import torch

from gptmini.errors import ConfigError
from gptmini.extras.serve.completions import DEFAULT_FIELDS, SAMPLE_SETTINGS, Completion
from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.scheduler import Scheduler, TokenEvent, TokenEvents
from gptmini.generate.engine import TorchEngine
from gptmini.generate.run import Run
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from tests.core.generate.samples import run_of
from tests.support import WORDS


def complete(run: Run, **fields: Any) -> Completion:
    return Completion(run, "small", Limits(max_waiting=8), fields)


@torch.inference_mode()
def generate(run: Run, completion: Completion) -> list[TokenEvents]:
    """Generate all texts of a completion, one after another; the events of each."""
    generated = []
    for request in completion.requests:
        engine = TorchEngine(run.model)
        events: TokenEvents = []
        scheduler = Scheduler(run, 1, 1, lambda deliveries, to=events: to.extend(deliveries[0][1]))
        while request.text.finish_reason is None:
            scheduler._step(engine, [request])
        generated.append(events)
    return generated


def test_bias_and_logit_bias_of_a_token_add_up():
    completion = complete(run_of(), bias={"a": -2, "b": 1}, logit_bias={"97": 5, "99": 0.5})
    biased = completion.requests[0].text.bias
    expected = torch.zeros(257)
    expected[torch.tensor([97, 98, 99])] = torch.tensor([3.0, 1.0, 0.5])
    assert torch.equal(biased, expected)


def test_usage_counts_a_prompt_once_however_many_texts_continue_it():
    run = run_of()
    completion = complete(run, prompt=["the ", "ab"], n=3, max_tokens=2, temperature=0)
    generate(run, completion)
    for text, n_reused in zip(completion.requests, (1, 4, 4, 0, 2, 2), strict=True):
        text.text.n_reused = n_reused  # only the first of a prompt says what was found before it
    assert completion.build_response([])["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_prompt_that_is_scored_keeps_its_last_space():
    ranks = bpe.learn_bpe([WORDS * 20], 290)
    tokenizer = create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, ranks, {"<|endoftext|>": 290})
    run = run_of(tokenizer=tokenizer)
    for max_tokens in (0, 1):
        scored = {"prompt": "the ", "echo": True, "max_tokens": max_tokens}
        (request,) = complete(run, logprobs=1, **scored).requests
        assert request.text.prompt_tokens == run.encode("the ")
        assert request.text.first_bias is None
        (request,) = complete(run, **scored).requests  # otherwise the first token brings it back
        assert request.text.prompt_tokens == run.encode("the")


def test_of_tokens_spelled_alike_the_likeliest_is_listed():
    names = {"<|endoftext|>": 256, "a": 257}  # and token 97 is an "a", too
    tokenizer = create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, bpe.learn_bpe([""], 256), names)
    completion = complete(run_of(tokenizer=tokenizer), prompt="x", logprobs=2)
    events = [
        TokenEvent("a", 97, -2.0, [(257, -0.5), (98, -1.0)], None),
        TokenEvent("a", 97, -0.5, [(97, -0.5), (257, -1.0)], None),
        TokenEvent("c", 99, -3.0, [(97, -0.5), (257, -1.0)], None),
    ]
    logprobs = completion.build_choice(0, events)["logprobs"]
    assert logprobs["token_logprobs"] == [-2.0, -0.5, -3.0]
    assert logprobs["top_logprobs"] == [{"a": -0.5, "b": -1.0}, {"a": -0.5}, {"a": -0.5, "c": -3.0}]


def test_a_client_loses_nothing_that_came_at_once_as_the_loop_was_held_up():
    completion = complete(run_of(), prompt="x", stream=True, max_tokens=4096)
    pieces = [[TokenEvent("a", number, 0.0, [], None)] for number in range(4096)]
    for piece in pieces:
        completion.requests[0].callback(piece)

    async def read_all() -> list[object]:
        return [(await completion.events.get())[1] for _ in pieces]

    assert asyncio.run(read_all()) == pieces
    assert completion.requests[0].text.finish_reason is None


def test_special_tokens_are_read_in_text_unless_a_request_says_no():
    run = run_of()
    prompt = "a<|endoftext|>b"
    (request,) = complete(run, prompt=prompt).requests
    assert request.text.prompt_tokens == [97, 256, 98]
    (request,) = complete(run, prompt=prompt, special=False).requests
    assert request.text.prompt_tokens == list(prompt.encode())


@pytest.mark.parametrize("special", [True, False])
def test_the_token_before_a_prompt_is_no_part_of_its_text(special):
    run = run_of()
    run.tokenizer.adds_bos = True
    fields: dict[str, Any] = {"special": special, "echo": True, "logprobs": 0, "max_tokens": 1}
    completion = complete(run, prompt=["ab", "ab"], **fields)
    text = completion.requests[0].text
    assert text.prompt_tokens == [256, 97, 98]
    events = [TokenEvent("", token, -1.0, [], None) for token in text.prompt_tokens]
    events.append(TokenEvent("c", 99, -1.0, [], "length"))
    choice = completion.build_choice(0, events)
    assert choice["text"] == "abc"
    (request,) = complete(run, prompt=[97, 98], **fields).requests
    assert request.text.prompt_tokens == [97, 98]


SETTINGS: dict[str, Any] = {
    "temperature": 0.25,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 11,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "bias": {"a": 1.0},
    "ban": ["b"],
    "stop": ["x", "y"],
    "start": "z",
    "overflow": "stop",
}


def test_each_setting_of_sample_is_a_field_and_null_leaves_it_or_turns_it_off():
    assert SETTINGS.keys() == SAMPLE_SETTINGS
    run = run_of(sample={**SETTINGS, "seed": 5})
    for key, value in SETTINGS.items():
        other = complete(run_of(), prompt="a", **{key: value}).sample
        assert getattr(other, key) == value, key
        if key != "seed":  # without one it is a random number
            kept = None if key in ("top_k", "top_p", "min_p") else value
            assert getattr(complete(run, prompt="a", **{key: None}).sample, key) == kept, key
        assert getattr(complete(run, prompt="a", seed=5).sample, key) == (
            5 if key == "seed" else value
        )


def test_null_in_a_field_is_as_good_as_leaving_it_out():
    plain = complete(run_of(), seed=1, prompt="")
    for key in DEFAULT_FIELDS:
        other = complete(run_of(), **{"seed": 1, "prompt": "", key: None})
        assert other.sample == plain.sample, key
        assert (other.stream, other.include_usage) == (False, False), key
        (request,), (expected,) = other.requests, plain.requests
        assert request.text.prompt_tokens == expected.text.prompt_tokens, key
        assert (request.n_logprobs, request.score_prompt) == (None, False), key


BIASES = {f"{number % 257:0{number // 257 + 3}}": 1 for number in range(1025)}
AT_LIMITS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 8}, {"n": 9}),
    ({"n": 1}, {"n": 0}),
    ({"prompt": ["a"] * 8}, {"prompt": ["a"] * 9}),
    ({"prompt": ["a"] * 2, "n": 4}, {"prompt": ["a"] * 3, "n": 3}),
    ({"prompt": "a" * 16}, {"prompt": "a" * 17}),
    ({"prompt": ["a", [0, 256]]}, {"prompt": ["a", [257]]}),
    ({"prompt": [256]}, {"prompt": [0, -1]}),
    ({"max_tokens": 4096}, {"max_tokens": 4097}),
    ({"max_tokens": 1}, {"max_tokens": 0}),
    ({"max_tokens": 0, "echo": True}, {"max_tokens": -1, "echo": True}),
    ({"logprobs": 20}, {"logprobs": 21}),
    ({"logprobs": 0}, {"logprobs": -1}),
    ({"logit_bias": {"256": 100}}, {"logit_bias": {"257": 100}}),
    ({"logit_bias": {"0": -100}}, {"logit_bias": {"0": -100.5}}),
    ({"logit_bias": {"0": 100.0}}, {"logit_bias": {"0": 100.5}}),
    ({"logit_bias": dict(list(BIASES.items())[:1024])}, {"logit_bias": BIASES}),
    ({"stop": ["x"] * 16}, {"stop": ["x"] * 17}),
    ({"ban": ["a"] * 1024}, {"ban": ["a"] * 1025}),
    ({"stream_options": {}}, {"stream_options": {"include_usage": None}}),
    ({"prompt": [97]}, {"prompt": [True]}),
    ({"prompt": "a"}, {"prompt": []}),
    ({"model": "a"}, {"model": 4}),
    ({"special": False}, {"special": 0}),
]


@pytest.mark.parametrize(("allowed", "refused"), AT_LIMITS, ids=range(len(AT_LIMITS)))
def test_limits_are_where_they_are_said_to_be(allowed, refused):
    run = run_of()
    complete(run, **allowed)
    with pytest.raises(ConfigError) as error:
        complete(run, **refused)
    name = error.value.lines[0].partition(":")[0]
    assert name.replace("sample.", "").replace("max_new_", "max_") in {*refused, "n"}


@pytest.mark.parametrize(
    ("fields", "n_values"),
    [
        ({"n": 2, "max_tokens": 5, "logprobs": 2}, 2 * 5 * 3),
        ({"prompt": ["a", "b"], "max_tokens": 5}, 2 * 5),
        ({"prompt": ["ab", "c"], "n": 2, "max_tokens": 5, "logprobs": 0, "echo": True}, 20 + 2 * 3),
        ({"prompt": "ab", "max_tokens": 0, "logprobs": 1, "echo": True}, 2 * (1 + 2)),
    ],
    ids=range(4),
)
def test_the_values_of_a_response_are_counted(fields, n_values):
    run = run_of()
    Completion(run, "small", Limits(max_values=n_values), fields)
    with pytest.raises(ConfigError, match="max_tokens: over"):
        Completion(run, "small", Limits(max_values=n_values - 1), fields)
