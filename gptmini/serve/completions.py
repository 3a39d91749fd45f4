"""OpenAI's completions format: the JSON of a request to texts, and their tokens to a response."""

import asyncio
import codecs
import secrets
import time
from typing import Any

import torch

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError
from gptmini.generate.batch import Job, Pieces
from gptmini.generate.filters import Adjustment
from gptmini.generate.run import Run
from gptmini.generate.texts import Text

# Fields beside the settings of `sample`; null stands for the default.
FIELDS: dict[str, Any] = {
    **{"model": None, "prompt": "", "n": 1, "best_of": None, "suffix": None, "user": ""},
    **{"max_tokens": 16, "logprobs": None, "logit_bias": {}, "echo": False},
    **{"stream": False, "stream_options": {}},
}
SETTINGS = SampleConfig.model_fields.keys() - {"max_new_tokens"}
OFF = {"top_k", "top_p", "min_p"}  # null turns these off
REASONS = {"length": "length", "context": "length", "stop": "stop", "document": "stop"}


class TooLongError(ConfigError):
    """A prompt that does not fit the model's context."""


class Completion:
    """A request, checked, and its response as it grows."""

    def __init__(self, run: Run, name: str, max_texts: int, data: dict[str, Any]) -> None:
        """`data` is the JSON of the request; ConfigError or DataError names a wrong field."""
        for key in data.keys() - FIELDS.keys() - SETTINGS:
            raise ConfigError(f"{key}: no such field; leave it out")
        fields = FIELDS | {key: value for key, value in data.items() if value is not None}
        n, top, options = fields["n"], fields["logprobs"], fields["stream_options"]
        _check(type(n) is int and n > 0, "n: must be a whole number from 1 on")
        _check(fields["best_of"] in (None, n), "best_of: not supported; use n")
        _check(not fields["suffix"], "suffix: not supported; this model only continues a prompt")
        _check(top is None or (type(top) is int and 0 <= top <= 20), "logprobs: must be 0 to 20")
        for key in ("echo", "stream"):
            _check(isinstance(fields[key], bool), f"{key}: must be true or false")
        known = isinstance(options, dict) and options.keys() <= {"include_usage"}
        _check(known, "stream_options: has only include_usage")
        # Without new tokens a prompt is only scored: one is drawn for it, and not shown.
        self._n_hidden = int(fields["echo"] and fields["max_tokens"] == 0)
        settings: dict[str, Any] = {
            "seed": secrets.randbits(63),
            "max_new_tokens": fields["max_tokens"] or self._n_hidden,
        }
        settings |= {key: value for key, value in fields.items() if key in SETTINGS}
        settings |= {key: None for key in OFF & data.keys() if data[key] is None}
        self.sample = run.sampling(settings)
        self.stream, self.include_usage = fields["stream"], bool(options.get("include_usage"))
        prompts = _prompts(fields["prompt"], run.tokenizer.vocab_size)
        _check(len(prompts) * n <= max_texts, f"n: at most {max_texts} texts per request")
        texts = [self._text(run, number, prompt) for prompt in prompts for number in range(n)]
        self._firsts = texts[::n]  # one of each prompt
        self.prompt_tokens = sum(len(text.prompt_tokens) for text in self._firsts)
        scores = fields["echo"] and top is not None
        adjust = Adjustment(self.sample, _bias(run, self.sample, fields["logit_bias"]))
        self.news: asyncio.Queue[tuple[int, Pieces | Exception]] = asyncio.Queue()
        tell = lambda index: lambda pieces: self.news.put_nowait((index, pieces))
        self.jobs = [
            Job(text, self.sample, adjust, top, scores, tell(index))
            for index, text in enumerate(texts)
        ]
        self._tokenizer = run.tokenizer
        self._special = {number: name for name, number in run.tokenizer.special_tokens.items()}
        self._before = [text.prompt if fields["echo"] else "" for text in texts]  # until said
        # Where the next tokens begin; a space that belongs to the first one is part of the prompt.
        self._offsets = [len(text.prompt) - (text.allowed_first is not None) for text in texts]
        if scores:
            for index, text in enumerate(texts):
                self._offsets[index] -= len(run.tokenizer.decode(text.prompt_tokens))
        # As a character may come in several tokens.
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in texts]
        kind, made = {"object": "text_completion", "model": name}, {"created": int(time.time())}
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}"} | kind | made

    def _text(self, run: Run, number: int, prompt: str | list[int]) -> Text:
        text = run.text(number, prompt, self.sample)
        if text.start:
            n_tokens, limit = len(text.prompt_tokens), len(text.context)
            raise TooLongError(
                f"prompt: {n_tokens:,} tokens, but the model's context has {limit:,}"
            )
        return text

    def response(self, choices: list[dict[str, Any]], usage: bool = True) -> dict[str, Any]:
        """The response, or one chunk of its stream."""
        if not usage:
            return self._head | {"choices": choices}
        n_tokens = sum(len(job.text.tokens) - self._n_hidden for job in self.jobs)
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": n_tokens,
            "total_tokens": self.prompt_tokens + n_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(text.reused for text in self._firsts)},
        }
        return self._head | {"choices": choices, "usage": counts}

    def choice(self, index: int, pieces: Pieces) -> dict[str, Any]:
        """What these pieces add to a text."""
        before, self._before[index] = self._before[index], ""
        reason = "length" if self._n_hidden else REASONS.get(pieces[-1].finish_reason or "")
        pieces = pieces[: len(pieces) - self._n_hidden]
        return {
            "index": index,
            "text": before + "".join(piece.characters for piece in pieces),
            "logprobs": self._logprobs(index, pieces),
            "finish_reason": reason,
        }

    def _logprobs(self, index: int, pieces: Pieces) -> dict[str, Any] | None:
        if self.jobs[index].n_top is None:
            return None
        entries: dict[str, list[Any]]
        entries = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            name, top = self._spelled(piece.token), None
            if piece.logprob is not None:
                top = {self._spelled(token): value for token, value in piece.top}
                top[name] = piece.logprob
            row = (name, piece.logprob, top, self._offsets[index])
            for column, value in zip(entries.values(), row, strict=True):
                column.append(value)
            spelling = self._tokenizer.token_bytes(piece.token)
            self._offsets[index] += len(self._decoders[index].decode(spelling))
        return entries

    def _spelled(self, token: int) -> str:
        """A token as text; part of a character as OpenAI writes it: bytes:\\xe2\\x80."""
        if token in self._special:
            return self._special[token]
        spelling = self._tokenizer.token_bytes(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ConfigError(problem)


def _prompts(prompt: Any, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a request, each a text or a list of tokens."""
    many = isinstance(prompt, list) and not (prompt and type(prompt[0]) is int)
    prompts = prompt if many else [prompt]
    _check(bool(prompts), "prompt: must not be an empty list")
    for each in prompts:
        _check(isinstance(each, str | list), "prompt: must be text, tokens, or a list of these")
        right = isinstance(each, str) or all(type(n) is int and 0 <= n < vocab_size for n in each)
        _check(right, f"prompt: tokens must be whole numbers from 0 to {vocab_size - 1}")
    return prompts


def _bias(run: Run, sample: SampleConfig, by_token: Any) -> torch.Tensor | None:
    """`bias`, `ban` and `logit_bias` as one tensor (V,)."""
    bias, size = run.bias(sample), run.tokenizer.vocab_size
    _check(isinstance(by_token, dict), "logit_bias: must map tokens to numbers")
    for token, value in by_token.items():
        right = token.isdecimal() and len(token) < 8 and int(token) < size
        _check(right, f"logit_bias: {token[:20]!r} is not a token; use numbers below {size}")
        right = type(value) in (int, float) and -100 <= value <= 100
        _check(right, f"logit_bias: must be from -100 to 100, not {str(value)[:20]}")
        bias = torch.zeros(size) if bias is None else bias
        bias[int(token)] += value
    return bias
