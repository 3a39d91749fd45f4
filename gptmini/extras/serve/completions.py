"""OpenAI's completions format: turn the JSON of a request into texts, and events into a response.

The fields are checked by hand rather than by a pydantic model. Most of them need a message of their
own ("logit_bias: 5 is not a token"), so a model would be the same checks as validators; and the
settings of `sample` have a model already, which checks theirs.
"""

import asyncio
import secrets
import time
from functools import partial
from typing import Any

import torch

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError, shorten
from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.scheduler import Request, TokenEvents
from gptmini.generate.run import Run
from gptmini.generate.sequence import Sequence, build_token_bias

# Fields besides the settings of `sample`; null stands for the default.
DEFAULT_FIELDS: dict[str, Any] = {
    "model": None,
    "prompt": "",
    "n": 1,
    "user": "",
    "max_tokens": 16,
    "logprobs": None,
    "logit_bias": {},
    "echo": False,
    "stream": False,
    "stream_options": {},
    "special": True,
}
SAMPLE_SETTINGS = SampleConfig.model_fields.keys() - {"max_new_tokens"}
NULL_TURNS_OFF = {"top_k", "top_p", "min_p"}
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
FINISH_REASONS = {"length": "length", "context": "length", "stop": "stop", "document": "stop"}


class TooLongError(ConfigError):
    """A prompt that does not fit the model's context."""


class Completion:
    """A request that was checked, and its response as it grows."""

    def __init__(self, run: Run, name: str, limits: Limits, data: dict[str, Any]) -> None:
        """Check `data`, the JSON of the request; ConfigError or DataError names a wrong field."""
        fields = _check_fields(data)
        n = fields["n"]
        n_logprobs = fields["logprobs"]
        echo = fields["echo"]
        # Without new tokens a prompt is only scored. One token is drawn all the same, as only a
        # draw makes the scheduler run the prompt; it is not shown.
        is_zero = type(fields["max_tokens"]) is int and fields["max_tokens"] == 0
        self._n_hidden = 1 if echo and is_zero else 0
        settings = {key: fields[key] for key in fields.keys() & SAMPLE_SETTINGS}
        settings |= dict.fromkeys(data.keys() & (NULL_TURNS_OFF - fields.keys()))
        settings.setdefault("seed", secrets.randbits(63))
        settings["max_new_tokens"] = self._n_hidden or fields["max_tokens"]
        self.sample = run.build_sample_config(settings)
        _require(
            self.sample.max_new_tokens <= limits.max_tokens,
            f"max_tokens: must be at most {limits.max_tokens}; continue in another request",
        )
        self.stream = fields["stream"]
        self.include_usage = fields["stream_options"].get("include_usage", False)
        prompts = _parse_prompts(fields["prompt"], run.tokenizer.vocab_size)
        max_texts = limits.max_waiting
        _require(len(prompts) * n <= max_texts, f"n: at most {max_texts} texts per request")
        bias = _build_bias(run, self.sample, fields["logit_bias"])
        self._score_prompt = echo and n_logprobs is not None
        texts: list[Sequence] = []
        for prompt in prompts:
            for number in range(n):
                text = run.create_text(
                    number, prompt, self.sample, bias, fields["special"], self._score_prompt
                )
                if text.context_start:
                    n_tokens = len(text.prompt_tokens)
                    raise TooLongError(
                        f"prompt: {n_tokens:,} tokens, but the model's context has "
                        f"{text.context_length:,}"
                    )
                texts.append(text)
        self._first_of_each_prompt = texts[::n]
        self.prompt_tokens = sum(len(text.prompt_tokens) for text in self._first_of_each_prompt)
        n_tokens = len(texts) * self.sample.max_new_tokens
        if self._score_prompt:
            n_tokens += n * self.prompt_tokens
        n_values = n_tokens * (1 + (n_logprobs or 0))
        _require(
            n_values <= limits.max_values,
            f"max_tokens: over {limits.max_values:,} tokens and log-probabilities in a request; "
            "lower max_tokens, n or logprobs",
        )
        # Filled by the callbacks, in the event loop: the index of a text and its events. Needs no
        # limit of its own, as a response has at most `max_values`, streamed or not.
        self.events: asyncio.Queue[tuple[int, TokenEvents | Exception]] = asyncio.Queue()
        receive = lambda index, events: self.events.put_nowait((index, events))
        self._tokenizer = run.tokenizer
        self._special = {number: name for name, number in run.tokenizer.special_tokens.items()}
        self.requests = [
            Request(text, n_logprobs, self._score_prompt, partial(receive, index))
            for index, text in enumerate(texts)
        ]
        # The prompts, until the first events bring them.
        self._unsent_echoes = [text.prompt if echo else "" for text in texts]

        self._common_fields: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "model": name,
            "created": int(time.time()),
        }

    def cancel(self) -> None:
        """Cancel all texts that have not ended."""
        for request in self.requests:
            if request.text.finish_reason is None:
                request.text.finish_reason = "gone"

    def build_response(self, choices: list[dict[str, Any]], usage: bool = True) -> dict[str, Any]:
        """Build the response, or one chunk of its stream."""
        response = self._common_fields | {"choices": choices}
        if not usage:
            return response
        n_generated = sum(len(request.text.tokens) - self._n_hidden for request in self.requests)
        n_reused = sum(text.n_reused for text in self._first_of_each_prompt)
        response["usage"] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": n_generated,
            "total_tokens": self.prompt_tokens + n_generated,
            "prompt_tokens_details": {"cached_tokens": n_reused},
        }
        return response

    def build_choice(self, index: int, events: TokenEvents) -> dict[str, Any]:
        """Build what these events add to a text."""
        request = self.requests[index]
        echo = self._unsent_echoes[index]
        self._unsent_echoes[index] = ""
        finish_reason = FINISH_REASONS.get(events[-1].finish_reason or "")
        if self._n_hidden:
            finish_reason = "length"
            events = events[: -self._n_hidden]
        return {
            "index": index,
            "text": echo + "".join(event.characters for event in events),
            "logprobs": self._build_logprobs(request, events),
            "finish_reason": finish_reason,
        }

    def _build_logprobs(self, request: Request, events: TokenEvents) -> dict[str, Any] | None:
        if request.n_logprobs is None:
            return None
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for event in events:
            name = self._spell_token(event.token)
            top: dict[str, float] | None = None
            if event.logprob is not None:
                # Of tokens spelled alike the likeliest counts, and it comes first, so that clients
                # who compare a token with the likeliest one do not take it for that.
                top = {}
                for token, value in [*event.top_logprobs, (event.token, event.logprob)]:
                    top.setdefault(self._spell_token(token), value)
            tokens.append(name)
            token_logprobs.append(event.logprob)
            top_logprobs.append(top)
        return {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs}

    def _spell_token(self, token: int) -> str:
        """Spell a token; part of a character as OpenAI writes it: bytes:\\xe2\\x80."""
        if token in self._special:
            return self._special[token]
        spelling = self._tokenizer.decode_token(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)


def _check_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Check the fields besides the settings of `sample`; fill in their defaults."""
    given = {key: value for key, value in data.items() if value is not None}
    for key in given.keys() - DEFAULT_FIELDS.keys() - SAMPLE_SETTINGS:
        raise ConfigError(f"{shorten(key)}: no such field; leave it out")
    fields = DEFAULT_FIELDS | given
    n = fields["n"]
    n_logprobs = fields["logprobs"]
    stream_options = fields["stream_options"]
    # `type(...) is int`, as a bool is an int to isinstance.
    _require(type(n) is int and n > 0, "n: must be a whole number from 1 on")
    _require(
        n_logprobs is None or (type(n_logprobs) is int and 0 <= n_logprobs <= MAX_LOGPROBS),
        f"logprobs: must be 0 to {MAX_LOGPROBS}",
    )
    for key in ("echo", "stream", "special"):
        _require(isinstance(fields[key], bool), f"{key}: must be true or false")
    for key in ("model", "user"):
        _require(fields[key] is None or isinstance(fields[key], str), f"{key}: must be text")
    _require(
        isinstance(stream_options, dict) and stream_options.keys() <= {"include_usage"},
        "stream_options: has only include_usage",
    )
    _require(
        isinstance(stream_options.get("include_usage", False), bool),
        "stream_options: include_usage must be true or false",
    )
    return fields


def _parse_prompts(prompt: Any, vocab_size: int) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or a list of tokens."""
    is_one = not isinstance(prompt, list) or (len(prompt) > 0 and type(prompt[0]) is int)
    prompts = [prompt] if is_one else prompt
    _require(bool(prompts), "prompt: must not be an empty list")
    for each in prompts:
        if isinstance(each, str):
            continue
        _require(isinstance(each, list), "prompt: must be text, tokens, or a list of these")
        _require(
            all(type(token) is int and 0 <= token < vocab_size for token in each),
            f"prompt: tokens must be whole numbers from 0 to {vocab_size - 1}",
        )
    return prompts


def _build_bias(run: Run, sample: SampleConfig, logit_bias: Any) -> torch.Tensor | None:
    """Combine `bias`, `ban` and `logit_bias` into one tensor (V,)."""
    bias = build_token_bias(run.tokenizer, sample)
    vocab_size = run.tokenizer.vocab_size
    _require(isinstance(logit_bias, dict), "logit_bias: must map tokens to numbers")
    _require(
        len(logit_bias) <= MAX_LOGIT_BIASES, f"logit_bias: at most {MAX_LOGIT_BIASES:,} tokens"
    )
    for token, value in logit_bias.items():
        _require(
            token.isdecimal() and len(token) < 8 and int(token) < vocab_size,
            f"logit_bias: {token[:20]!r} is not a token; use numbers below {vocab_size}",
        )
        _require(
            type(value) in (int, float) and -100 <= value <= 100,
            f"logit_bias: must be from -100 to 100, not {str(value)[:20]}",
        )
        if bias is None:
            bias = torch.zeros(vocab_size)
        bias[int(token)] += value
    return bias
