"""A trained model with its tokenizer: texts in, texts out.

import gptmini
run = gptmini.load("runs/python-docs")
for piece in run.stream("The "):
    print(piece, end="")
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.config.load import validate
from gptmini.config.settings import Config, SampleConfig
from gptmini.console import say
from gptmini.errors import ConfigError, DataError
from gptmini.files import CACHE
from gptmini.generate import native
from gptmini.generate.engine import (
    Engine,
    NativeEngine,
    Row,
    open_engine,
)
from gptmini.generate.filters import log_probability
from gptmini.generate.guess import Draft, Guesser, Lookup
from gptmini.generate.sampler import Speed, begin, decode
from gptmini.machine import pick_device
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory, fitting
from gptmini.text.tokenizer import StreamDecoder, Tokenizer

DOCUMENT = "<|endoftext|>"  # stands for the document token where that is asked for


@dataclass
class Sample:
    """A text that follows a prompt.

    `finish_reason` is "length", "stop" (a stop text), "document" (its end) or "context" (full), and
    None until then. `logprobs`, in nats as the model gives them, are there if they were asked for.
    """

    number: int
    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Run:
    """A trained model; its parts may be used by themselves."""

    def __init__(
        self,
        path: Path,
        config: Config,
        tokenizer: Tokenizer,
        model: GPT,
        state: dict[str, Any] | None = None,
        weights: str = "float32",
        cache: Path = CACHE,
    ) -> None:
        """`state` is what its checkpoint says of the training."""
        self.path, self.config = path, config
        self.state: dict[str, Any] = state or {"step": 0, "corpus": ""}
        self.tokenizer, self.model = tokenizer, model
        self.weights, self._cache = weights, cache
        self._decoder: Engine | None = None

    @property
    def step(self) -> int:
        """Updates that made the weights."""
        return int(self.state["step"])

    @property
    def corpus(self) -> str:
        """SHA-256 (hex) of the text that it was trained on."""
        return str(self.state["corpus"])

    def generate(self, prompt: str = "", **settings: Any) -> str:
        """The continuation of a prompt; `settings` are those of the section `sample`.

        ConfigError names a wrong setting, DataError a prompt that is no Unicode text.
        """
        return "".join(self.stream(prompt, **settings))

    def stream(self, prompt: str = "", **settings: Any) -> Iterator[str]:
        """The same in pieces of whole characters, as they come; errors come before the first."""
        return (text for _, text in self.start([prompt], **settings))

    def start(
        self,
        prompts: Sequence[str],
        numbers: Sequence[int] | None = None,
        use_cache: bool = True,
        logprobs: bool = False,
        special: bool = False,
        guess: "str | Run | None" = None,
        **settings: Any,
    ) -> "Generation":
        """The continuations of several prompts, which run together, each as if alone.

        `numbers` set their noise apart, by default 0, 1 and so on. With `special`, "<|endoftext|>"
        in a prompt is the document token. `guess` is "lookup" or a smaller run with this tokenizer:
        the same text, sooner if its guesses are often right.
        """
        sample = self.sampling(settings)
        bias = self._bias(sample)
        limit = self.model.config.context_length
        rows, allowed = [], {}
        for number, prompt in zip(numbers or range(len(prompts)), prompts, strict=True):
            tokens, first = self._tokens(prompt, special)
            rows.append(begin(number, tokens, sample, limit))
            if len(tokens) > limit:
                say(f"prompt: {len(tokens)} tokens, the context has {limit}; the last are used")
            if first is not None:
                allowed[rows[-1]] = first
        decoder = self.decoder(len(rows), use_cache)
        guesser = self._guesser(guess, len(rows), sample)
        speed = Speed()
        drawn = decode(decoder, rows, sample, limit, bias, allowed, guesser, speed)
        texts = {
            row: _Text(Sample(row.number, prompt), self.tokenizer, sample.stop, row in allowed)
            for row, prompt in zip(rows, prompts, strict=True)
        }
        return Generation(drawn, texts, speed, logprobs, decoder.name)

    def encode(self, text: str, name: str) -> list[int]:
        """The tokens of a text; DataError, which calls it by a name, if it is no Unicode text."""
        try:
            return self.tokenizer.encode(text).tolist()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name}: character {error.start} is no Unicode text; mend it"
            ) from None

    def sampling(self, settings: dict[str, Any]) -> SampleConfig:
        """The run's section `sample` with some settings changed; ConfigError names wrong ones."""
        section = {**self.config.sample.model_dump(), **settings}
        return validate({"sample": section}, {}).sample if settings else self.config.sample

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer and of the weights as they are rounded."""
        digest = hashlib.sha256(self.tokenizer.fingerprint.encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def decoder(self, n_rows: int, use_cache: bool = True) -> Engine:
        """What gives this model's logits for so many rows; it is made once."""
        if not use_cache:
            return open_engine(self.model, self.weights, n_rows, self._cache, False)
        held = self._decoder
        if held is None or (isinstance(held, NativeEngine) and held.n_rows < n_rows):
            self._decoder = open_engine(self.model, self.weights, n_rows, self._cache)
        assert self._decoder is not None
        return self._decoder

    def _guesser(
        self, guess: "str | Run | None", n_rows: int, sample: SampleConfig
    ) -> Guesser | None:
        if guess is None:
            return None
        if isinstance(guess, str):
            return Lookup()
        if guess.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"draft {guess.path}: has another tokenizer than {self.path}")
        return Draft(guess.model, guess.decoder(n_rows), sample)

    def _tokens(self, prompt: str, special: bool) -> tuple[list[int], Tensor | None]:
        """The tokens of a prompt, one at least, and which tokens (V,) may follow, if not all."""
        first = None
        if prompt.endswith(" ") and self._spaced.sum() > 1:
            # A space belongs to the word behind it where words are tokens: let the model draw both.
            prompt, first = prompt[:-1], self._spaced
        document = self.tokenizer.document_token
        tokens: list[int] = []
        for place, part in enumerate(prompt.split(DOCUMENT) if special else [prompt]):
            tokens += [document] * (place > 0) + self.encode(part, "prompt")
        return tokens or [document], first

    @cached_property
    def _spaced(self) -> Tensor:
        """Which tokens begin with a space, (V,)."""
        size, spelt = self.tokenizer.vocab_size, self.tokenizer.token_bytes
        return torch.tensor([spelt(token).startswith(b" ") for token in range(size)])

    def _bias(self, sample: SampleConfig) -> Tensor | None:
        """What is added to all logits, (V,); ConfigError for a text that is not one token."""
        named = [("bias", *item) for item in sample.bias.items()]
        named += [("ban", text, float("-inf")) for text in sample.ban]
        if not named:
            return None
        bias = torch.zeros(self.tokenizer.vocab_size)
        for key, text, value in named:
            tokens = self.tokenizer.encode(text).tolist()
            if len(tokens) != 1:
                parts = ", ".join(repr(self.tokenizer.decode([token])) for token in tokens)
                raise ConfigError(f"sample.{key}: {text!r} is not one token but {parts}; name one")
            bias[tokens[0]] += value
        return bias


class Generation:
    """Texts on their way: iterating gives (number of the sample, more of its text) as they grow."""

    def __init__(
        self,
        drawn: Iterator[tuple[Row, int, Tensor]],
        texts: "dict[Row, _Text]",
        speed: Speed,
        logprobs: bool,
        engine: str,
    ) -> None:
        self._drawn, self._texts, self._logprobs = drawn, texts, logprobs
        self.speed, self.engine = speed, engine
        self.samples = [text.sample for text in texts.values()]

    def finish(self) -> list[Sample]:
        """The samples, when all have ended."""
        for _ in self:
            pass
        return self.samples

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for row, token, logits in self._drawn:
            text = self._texts[row]
            if self._logprobs:
                text.sample.logprobs.append(log_probability(logits, token))
            piece, row.finish = text.add(token, row.finish)
            if piece:
                yield text.sample.number, piece


class _Text:
    """Tokens of one sample to text, which ends at a stop text or at the end of the document."""

    def __init__(
        self, sample: Sample, tokenizer: Tokenizer, stops: Sequence[str], spaced: bool
    ) -> None:
        """With `spaced` the prompt has a space that the first token has as well."""
        self.sample = sample
        self._decoder = StreamDecoder(tokenizer)
        self._document, self._stops, self._spaced = tokenizer.document_token, stops, spaced
        self._held = ""  # what may be the beginning of a stop text

    def add(self, token: int, finish: str | None) -> tuple[str, str | None]:
        """The text that is certain now, and why it is the last, if it is."""
        self.sample.tokens.append(token)
        if token == self._document:
            finish = "document"
        text = self._decoder.feed(token)
        if finish:
            text += self._decoder.flush()
        if text and self._spaced:
            text, self._spaced = text.removeprefix(" "), False
        self._held += text
        found = [self._held.find(stop) for stop in self._stops]
        if places := [place for place in found if place >= 0]:
            finish, certain = "stop", min(places)
        else:
            certain = len(self._held) - (0 if finish else self._uncertain())
        text, self._held = self._held[:certain], self._held[certain:]
        self.sample.text += text
        self.sample.finish_reason = finish
        return text, finish

    def _uncertain(self) -> int:
        """How many characters at the end could become a stop text."""
        sizes = (
            size
            for stop in self._stops
            for size in range(1, len(stop))
            if self._held.endswith(stop[:size])
        )
        return max(sizes, default=0)


def load(
    path: str | Path, device: str = "auto", weights: str = "bfloat16", cache: Path = CACHE
) -> Run:
    """The best checkpoint of a run directory, ready to generate.

    The arithmetic is in float32; `weights` says how the matrices are stored: float32 as they were
    trained, bfloat16 (default) or int8, which are faster on a CPU. `cache` keeps compiled code.
    """
    if weights not in native.PRECISIONS:
        raise ConfigError(f"weights {weights}: take one of {', '.join(native.PRECISIONS)}")
    run = RunDirectory(Path(path))
    config, tokenizer = run.config(), run.tokenizer()
    checkpoint = run.best()
    if checkpoint.state["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"{run.tokenizer_file}: is not the tokenizer of this run ({tokenizer.kind} of "
            f"{tokenizer.vocab_size}); restore it"
        )
    model = GPT(config.model)
    model.load_state_dict(fitting(checkpoint.model, model.state_dict(), run.checkpoints))
    native.round_weights(model, weights)
    model = model.eval().to(pick_device(device))
    return Run(run.path, config, tokenizer, model, checkpoint.state, weights, cache)
