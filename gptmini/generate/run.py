"""A trained model with its tokenizer.

import gptmini
run = gptmini.load("runs/python-docs")
for piece in run.stream("The "):
    print(piece, end="")
"""

import hashlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.config.load import validate
from gptmini.config.settings import Config, SampleConfig
from gptmini.console import warn
from gptmini.errors import ConfigError, DataError
from gptmini.files import CACHE
from gptmini.generate import native, precision
from gptmini.generate.engine import Engine, TorchEngine
from gptmini.generate.guess import Draft, Lookup
from gptmini.generate.sampler import check_overflow, decode
from gptmini.generate.texts import Generation, Text, opening, token_bias
from gptmini.machine import pick_device
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.runs.tensors import fitting
from gptmini.text.tokenizer import Tokenizer


class Run:
    """A trained model, ready to generate, in several threads too.

    Its parts may be used on their own.
    """

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
        """`state` is the checkpoint's record of the training."""
        self.path, self.config = path, config
        self.state: dict[str, Any] = state or {"step": 0, "corpus": ""}
        self.tokenizer, self.model = tokenizer, model
        self.weights, self._cache = weights, cache
        # Engines that no generation is using. A deque needs no lock, which the garbage collector
        # could ask for a second time: it may close a generation at any moment.
        self._idle: deque[Engine] = deque()
        self._packed: precision.Packed = {}  # the weights that all engines share

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        kind, vocab_size = self.tokenizer.kind, self.tokenizer.vocab_size
        return (
            f"<Run {self.path}: step {self.step}, {size:,} parameters, {kind} tokenizer, "
            f"vocabulary {vocab_size:,}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no engines yet: they hold pointers into the memory of this run."""
        return {**self.__dict__, "_idle": deque(), "_packed": {}}

    @property
    def step(self) -> int:
        """Optimizer updates that made the weights."""
        return int(self.state["step"])

    @property
    def corpus(self) -> str:
        """SHA-256 (hex) of the text it was trained on."""
        return str(self.state["corpus"])

    def generate(self, prompt: str = "", **settings: Any) -> str:
        """The continuation of a prompt; `settings` are those of the section `sample`.

        ConfigError names a wrong setting, DataError a prompt that is not valid Unicode.
        """
        return "".join(self.stream(prompt, **settings))

    def stream(self, prompt: str = "", **settings: Any) -> Iterator[str]:
        """Like `generate`, piece by piece, in whole characters; errors are raised by the call."""
        return (characters for _, characters in self.start([prompt], **settings))

    def start(
        self,
        prompts: Sequence[str],
        numbers: Sequence[int] | None = None,
        use_cache: bool = True,
        logprobs: bool = False,
        special: bool = False,
        guess: "str | Run | None" = None,
        **settings: Any,
    ) -> Generation:
        """Continue several prompts in one batch, each as if it were alone.

        `numbers` (by default 0, 1, ...) give each text random numbers of its own. With `special`,
        the name of a special token in a prompt, such as "<|endoftext|>", is that token. `guess` is
        "lookup" or a smaller run with the same tokenizer: the text stays the same and comes sooner
        if the guesses are often right.
        """
        sample = self.sampling(settings)
        bias = self.bias(sample)
        texts = []
        if isinstance(prompts, str):  # each character would be a prompt
            raise ConfigError(
                "prompts: must be a list of texts, not str; use generate for one text"
            )
        for number, prompt in zip(numbers or range(len(prompts)), prompts, strict=True):
            if not isinstance(prompt, str):
                kind = type(prompt).__name__
                raise ConfigError(f"prompt: must be a text, not {kind}; use start for several")
            text = self.text(number, prompt, sample, special)
            if text.start:
                seen, n_prompt = len(text.context), len(text.prompt_tokens)
                warn(f"prompt: {n_prompt:,} tokens; the model sees the last {seen:,}")
            texts.append(text)
        if isinstance(guess, Run) and guess.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(
                f"draft {guess.path}: its tokenizer differs from that of {self.path}; "
                "use a draft with the same tokenizer"
            )
        drawn = self._draw(texts, sample, bias, guess, use_cache)
        compiled = native.library_for(self.model, self._cache, use_cache)
        name = native.NativeEngine.name if compiled else TorchEngine.name
        return Generation(drawn, texts, logprobs, name)

    def text(
        self, number: int, prompt: str | list[int], sample: SampleConfig, special: bool = False
    ) -> Text:
        """A text that continues a prompt, given as text or as tokens; see `start`."""
        limit, first = self.model.config.context_length, None
        if isinstance(prompt, str):
            tokens, first = self._tokens(prompt, special)
        else:
            tokens, prompt = prompt, self.tokenizer.decode(prompt)
        tokens = tokens or opening(self.tokenizer, sample)
        check_overflow(len(tokens), sample, limit)
        return Text(number, tokens, limit, prompt, self.tokenizer, sample.stop, first)

    def _draw(
        self,
        texts: list[Text],
        sample: SampleConfig,
        bias: Tensor | None,
        guess: "str | Run | None",
        use_cache: bool,
    ) -> Iterator[tuple[Text, int, Tensor]]:
        """The tokens of `sampler.decode`, with engines that nobody else uses meanwhile."""
        with ExitStack() as engines:
            engine = engines.enter_context(self.engine(len(texts), use_cache))
            guesser: Lookup | Draft | None = Lookup() if guess else None
            if isinstance(guess, Run):
                draft = engines.enter_context(guess.engine(len(texts)))
                guesser = Draft(guess.model, draft, sample)
            limit = self.model.config.context_length
            yield from decode(engine, texts, sample, limit, bias, guesser)

    def encode(self, text: str, name: str = "text") -> list[int]:
        """The tokens of a text, as `model` takes them.

        DataError, which begins with `name`, for lone surrogates.
        """
        try:
            return self.tokenizer.encode(text).tolist()
        except UnicodeEncodeError as error:
            where = f"{name}: character {error.start}"
            raise DataError(f"{where} is not valid Unicode; remove it") from None

    def sampling(self, settings: dict[str, Any]) -> SampleConfig:
        """The run's section `sample` with some settings changed; ConfigError names wrong ones."""
        section = {**self.config.sample.model_dump(), **settings}
        return validate({"sample": section}, {}).sample if settings else self.config.sample

    def bias(self, sample: SampleConfig) -> Tensor | None:
        """`bias` and `ban` as one tensor (V,); ConfigError for a text that is not one token."""
        return token_bias(self.tokenizer, sample)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer and the rounded weights."""
        digest = hashlib.sha256(self.tokenizer.fingerprint.encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    @contextmanager
    def engine(self, n_texts: int, use_cache: bool = True) -> Iterator[Engine]:
        """An engine for up to `n_texts` texts, used by nobody else until the block ends."""
        engine = self._idle_engine(n_texts) if use_cache else None
        if engine is None:
            engine = native.open_engine(
                self.model, self.weights, n_texts, self._cache, use_cache, self._packed
            )
        try:
            yield engine
        finally:
            if use_cache:
                self._idle.append(engine)

    def _idle_engine(self, n_texts: int) -> Engine | None:
        """An engine kept from earlier; those too small are dropped, as a larger one follows."""
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                engine = self._idle.pop()
                if not isinstance(engine, native.NativeEngine) or engine.n_slots >= n_texts:
                    return engine
        return None

    def _tokens(self, prompt: str, special: bool) -> tuple[list[int], Tensor | None]:
        """The tokens of a prompt, and which may come first, (V,), if not all."""
        first = None
        if prompt.endswith(" ") and self._begins_with_space.sum() > 1:
            # Where words are tokens, the space belongs to the next one (" the"), and the model has
            # hardly seen a space alone. So drop it and have the model draw it with its word.
            prompt, first = prompt[:-1], self._begins_with_space
        if not special:
            return self.encode(prompt, "prompt"), first
        numbers = self.tokenizer.special_tokens
        longest_first = sorted(numbers, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first))
        tokens: list[int] = []
        for part in re.split(f"({names})", prompt):
            if part in numbers:
                tokens.append(numbers[part])
            else:
                tokens += self.encode(part, "prompt")
        return tokens, first

    @cached_property
    def _begins_with_space(self) -> Tensor:
        """Which tokens begin with a space, (V,)."""
        spelling, size = self.tokenizer.token_bytes, self.tokenizer.vocab_size
        return torch.tensor([spelling(token).startswith(b" ") for token in range(size)])


def load(
    path: str | Path,
    device: str = "auto",
    weights: str = "bfloat16",
    cache: Path = CACHE,
    step: int | None = None,
) -> Run:
    """The best checkpoint of a run directory, or that of a step.

    `weights` says how matrices are stored: float32 as trained, or bfloat16 (default) or int8, which
    are faster on a CPU: there the compiled step, which `cache` holds, rounds their inputs too, and
    keys and values to bfloat16.
    """
    if weights not in precision.PRECISIONS:
        raise ConfigError(f"--weights {weights}: not supported; choose float32, bfloat16 or int8")
    directory = RunDirectory(Path(path))
    config = directory.config()
    checkpoint = directory.best() if step is None else directory.load(step)
    tokenizer = directory.tokenizer(checkpoint)
    model = GPT(config.model)
    model.load_state_dict(fitting(checkpoint.model, model.state_dict(), directory.checkpoints))
    precision.round_weights(model, weights)
    model = model.eval().to(pick_device(device))
    return Run(directory.path, config, tokenizer, model, checkpoint.state, weights, cache)
