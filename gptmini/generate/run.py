"""Load a trained model with its tokenizer and generate text with it.

import gptmini

run = gptmini.load("runs/stories")
print(run.generate("Ella ", temperature=0.8, max_new_tokens=100))
for characters in run.stream("Ella "):
    print(characters, end="", flush=True)
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from gptmini import files
from gptmini.config.load import validate
from gptmini.config.settings import Config, ModelConfig, SampleConfig
from gptmini.console import quote, show_elapsed, warn
from gptmini.errors import ConfigError, DataError, explain_missing_part
from gptmini.generate import precision
from gptmini.generate.engine import Engine, TorchEngine, open_engine
from gptmini.generate.filters import compute_logprob
from gptmini.generate.own_model import (
    build_own_model,
    check_own_model,
    check_same_start,
    find_own_module,
    measure_start,
)
from gptmini.generate.sampler import check_overflow, sample_tokens
from gptmini.generate.sequence import Sequence, ban_end_tokens, build_token_bias, encode_start
from gptmini.machine import CPP_COMPILERS, find_compiler, multiplies_bfloat16, pick_device
from gptmini.model.gpt import GPT, create_undrawn
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.progress import Progress, describe_own_model
from gptmini.runs.tensors import check_weights
from gptmini.tokenizer.tokenizers import Tokenizer

# Templates of chats are imported when they are needed: a command waits for all that is imported
# here.
if TYPE_CHECKING:
    from gptmini.extras.sources.find import Copies
    from gptmini.tokenizer.chat_template import ChatTemplate, Message

# A token of GPT-2's 124 million parameters takes a millisecond on an H100, and one of a small model
# hardly less, as that is the time of 230 kernels (scripts/LOG.md: What does an H100 say?). The
# compiled engine needs five on two cores for GPT-2.
MIN_PARAMETERS_FOR_GPU = 50_000_000

# Threads that share a run share its weights, too. Opening an engine may ask for the model.
_opening = threading.RLock()


class Generation:
    """Texts that are generated together; iterate for (number, new characters) as they grow.

    Nothing is computed before the first step of the iterator, which opens an engine: `engine` is
    its name, and `seconds` and `time_to_first_token` count from then.
    """

    def __init__(self, tokens: Iterator[Any], samples: list[Sequence], logprobs: bool) -> None:
        """`tokens` yields the engine's name, then what `sampler.sample_tokens` does."""
        self.samples = samples
        self.engine = ""
        self.seconds = 0.0
        self.time_to_first_token = 0.0
        self._tokens = tokens
        self._logprobs = logprobs
        self._started = 0.0

    @property
    def n_tokens(self) -> int:
        """Count the tokens generated so far."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def drafted(self) -> int:
        """Count the tokens drafted so far."""
        return sum(sample.drafted for sample in self.samples)

    @property
    def accepted(self) -> int:
        """Count the drafted tokens that the model accepted."""
        return sum(sample.accepted for sample in self.samples)

    def finish(self) -> list[Sequence]:
        """Generate to the end, then return the samples."""
        for _ in self:
            pass
        return self.samples

    def __iter__(self) -> Iterator[tuple[int, str]]:
        if not self.engine:
            self.engine = next(self._tokens)
            self._started = time.perf_counter()
        for text, token, logits in self._tokens:
            self.seconds = time.perf_counter() - self._started
            self.time_to_first_token = self.time_to_first_token or self.seconds
            if self._logprobs:
                text.logprobs.append(compute_logprob(logits, token))
            if characters := text.decode_token(token):
                yield text.number, characters


class Run:
    """A trained model with its tokenizer, ready to generate; threads may share it.

    `gptmini.load` opens a run directory. `generate` returns one text, or one for each of a list of
    prompts, and `stream` yields one as it grows; `start` also returns tokens and
    log-probabilities. To use the parts on their own:

        tokens = torch.tensor([run.encode("The ")])  # (1, T)
        logits = run.model(tokens)  # (1, T, V)
        text = run.decode(logits[0].argmax(-1))  # what it expects after each token

    `path`, `config`, `tokenizer` and `model` are what was loaded, `weights` is the precision that
    texts are generated in;
    `state` is the checkpoint's record of the run. The model may be trained further or changed:
    the next text comes from the weights and modules that it has then.
    """

    def __init__(
        self,
        path: str | Path,
        config: Config,
        tokenizer: Tokenizer,
        model: GPT,
        state: dict[str, Any] | None = None,
        weights: str = "float32",
    ) -> None:
        """Combine parts that are already in memory; `gptmini.load` reads them from a directory.

        Matrices of `model` may be as `round_weights` stores them; everything else is in float32.
        """
        self.path = Path(path)
        self.config = config
        self.state: dict[str, Any] = {"step": 0, "corpus": ""} | (state or {})
        self.tokenizer = tokenizer
        self._model = model  # in bfloat16 or int8 until someone asks for `model`
        self.weights = weights
        self._engine: Engine | None = None  # the one that was opened last
        # Engines that no generation is using. Not a list behind a lock: the garbage collector may
        # close an abandoned generation at any moment, even in a thread that holds the lock, and
        # giving back its engine would wait for that lock forever. A deque's methods are atomic.
        self._idle_engines: deque[Engine] = deque()

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self._model.parameters())
        tokenizer = f"{self.tokenizer.kind} tokenizer, vocabulary {self.tokenizer.vocab_size:,}"
        return f"<Run {self.path}: step {self.step}, {size:,} parameters, {tokenizer}>"

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but the engines, which hold pointers into the memory of this run."""
        state = {**self.__dict__, "_engine": None, "_idle_engines": deque()}
        state.pop("_chat_template", None)
        return state

    @cached_property
    def model(self) -> GPT:
        """The model with all weights in float32.

        The compiled engine needs no such copies of matrices that were rounded when loaded.
        """
        with _opening:
            precision.widen_weights(self._model)
            self._engine = None  # which keeps the narrow weights in memory
            self._idle_engines.clear()
        return self._model

    @property
    def context_length(self) -> int:
        """The number of tokens that the model sees at most."""
        return self._model.config.context_length

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return int(self.state["step"])

    @property
    def corpus(self) -> str:
        """SHA-256 (hex) of the text that the model was trained on."""
        return str(self.state["corpus"])

    def save(self, out: str | Path | None = None) -> None:
        """Write a run directory, by default at `path`, with the weights as they are now.

        There is no state of an optimizer, so `train --from` goes on from it. Raises ConfigError if
        something is there already, MachineError if it cannot be written; nothing half-written
        stays.
        """
        with files.atomic_output(Path(out or self.path)) as partial:
            directory = RunDirectory(partial)
            directory.create(self.config, self.tokenizer)
            names = {field.name for field in fields(Progress)}
            known = {name: value for name, value in self.state.items() if name in names}
            begun: dict[str, Any] = {"tokenizer": self.tokenizer.fingerprint}
            # The best evaluation was of other weights, if these have changed, or their modules.
            progress = Progress(**begun | known | {"best": None, "own_logits": []})
            progress.own_model |= find_own_module(self._model) is not None
            directory.save(Checkpoint(asdict(progress), self.model.state_dict(), {}))

    @overload
    def generate(self, prompt: str = "", **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: list[str], **settings: Any) -> list[str]: ...

    def generate(self, prompt: str | list[str] = "", **settings: Any) -> str | list[str]:
        """Return the continuation of a prompt, or those of a list of prompts.

        Each prompt of a list gets the text that it gets alone, as `start` does.
        `settings` override those of the section `sample`, such as `temperature`, `top_k`, `seed`,
        `max_new_tokens` or `stop`; `gptmini settings sample` lists them. The same settings give the
        same text. Raises ConfigError for a wrong setting, DataError for a prompt that is not valid
        Unicode.
        """
        if not isinstance(prompt, list):
            return "".join(self.stream(prompt, **settings))
        if not prompt:
            return []
        settings.setdefault("numbers", [0] * len(prompt))  # that of a prompt alone
        return [text.text for text in self.start(prompt, **settings).finish()]

    def stream(self, prompt: str = "", **settings: Any) -> Iterator[str]:
        """Yield the continuation of a prompt as it grows, in whole characters; see `generate`.

        This call raises the errors, not the first step of the iterator.
        """
        generation = self.start([prompt], **settings)
        return (characters for _, characters in generation)

    def start(
        self,
        prompts: Collection[str | list[int]],
        numbers: Iterable[int] | None = None,
        use_cache: bool = True,
        logprobs: bool = False,
        special: bool = False,
        draft: "str | Run | None" = None,
        **settings: Any,
    ) -> Generation:
        """Continue several prompts in one batch; each gets the text that it gets alone.

        That holds to the bit with the compiled engine, elsewhere up to the rounding of logits. A
        prompt is a text, or a list of tokens, such as `encode_chat` returns.

            generation = run.start(["The ", "A "], max_new_tokens=50)
            for number, characters in generation:  # as they grow
                ...
            first, second = generation.finish()  # or wait for the whole texts

        `numbers` (by default 0, 1, ...) select the random numbers of each text: the same prompt
        with another number gives another sample. `logprobs` records each token's log-probability.
        With `special`, the name of a special token in a prompt, such as "<|endoftext|>", is that
        token. `draft` proposes tokens ahead, which changes no text and is faster where drafts are
        often right: "lookup" copies from the text so far, a smaller run with the same tokenizer
        drafts with its model. `use_cache=False` recomputes the whole context for each token.
        """
        sample = self.build_sample_config(settings)
        bias = build_token_bias(self.tokenizer, sample)
        if isinstance(prompts, str):  # each character would be a prompt
            raise ConfigError(
                "prompts: must be a list of texts, not str; use generate for one text"
            )
        texts = []
        for number, prompt in zip(numbers or range(len(prompts)), prompts, strict=True):
            is_tokens = isinstance(prompt, list) and all(
                type(token) is int and 0 <= token < self.tokenizer.vocab_size for token in prompt
            )
            if not isinstance(prompt, str) and not is_tokens:
                kind = type(prompt).__name__
                raise ConfigError(f"prompt: must be a text, not {kind}; use a list for several")
            text = self.create_text(number, prompt, sample, bias, special)
            if text.context_start:
                n_prompt = len(text.prompt_tokens)
                n_seen = len(text.context)
                warn(f"prompt: {n_prompt:,} tokens; the model sees the last {n_seen:,}")
            texts.append(text)
        if isinstance(draft, str) and draft != "lookup":
            raise ConfigError(f"draft {draft}: not supported; choose lookup, or give a run")
        if isinstance(draft, Run) and draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(
                f"draft {draft.path}: its tokenizer differs from that of {self.path}; "
                "use a draft with the same tokenizer"
            )
        return Generation(self._generate_tokens(texts, draft, use_cache), texts, logprobs)

    def find_copies(self, text: str, prompt: str = "") -> "Copies":
        """Find what a text copies from the training text, and where that stands.

            found = run.find_copies(run.generate("The "), "The ")
            print(found.describe())
            for copy in found.copies:
                print(copy.start, copy.end, copy.file, copy.line)

        A copy has 20 characters or more. The `prompt` that the text continues is not counted, but a
        copy may begin in it. The first call reads the training text into memory. DataError if that
        is gone or has changed, and for a run that was not trained here.
        """
        with explain_missing_part("finding copies"):
            from gptmini.extras.sources import training_text  # noqa: PLC0415 - may be missing
        return training_text.find_copies(self, text, prompt)

    def create_text(
        self,
        number: int,
        prompt: str | list[int],
        sample: SampleConfig,
        bias: Tensor | None = None,
        special: bool = False,
        whole: bool = False,
    ) -> Sequence:
        """Create a text that continues a prompt, given as text or as tokens; see `start`.

        `whole` keeps a space that the prompt ends with among its tokens, as scoring it needs.
        """
        first_bias = None
        if isinstance(prompt, str) and whole:
            tokens = self.encode(prompt, "prompt", special)
        elif isinstance(prompt, str):
            tokens, first_bias = self._encode_prompt(prompt, special)
        else:
            tokens = prompt
            prompt = self.tokenizer.decode(tokens)
        tokens = tokens or encode_start(self.tokenizer, sample)
        text = Sequence(
            number, tokens, self.context_length, sample, bias, prompt, self.tokenizer, first_bias
        )
        check_overflow(text)
        return text

    def _generate_tokens(
        self, texts: list[Sequence], draft: "str | Run | None", use_cache: bool
    ) -> Iterator[Any]:
        """Yield the engine's name, then what `sampler.sample_tokens` does.

        Nobody else uses the engines meanwhile.
        """
        # A generator borrows its engines at its first step and gives them back when it is closed,
        # also if nobody iterates to the end.
        with ExitStack() as engines:
            engine = engines.enter_context(self.borrow_engine(len(texts), use_cache))
            tokens = sample_tokens(engine, texts)
            if draft:
                with explain_missing_part("drafting"):
                    from gptmini.extras.engine import speculative  # noqa: PLC0415 - may be missing
                drafter: Any = speculative.PromptLookup()
                if isinstance(draft, Run):
                    draft_engine = engines.enter_context(draft.borrow_engine(len(texts)))
                    drafter = speculative.DraftModel(draft.context_length, draft_engine)
                tokens = speculative.sample_speculatively(engine, drafter, texts)
            yield engine.name
            yield from tokens

    def encode(self, text: str, name: str = "text", special: bool = False) -> list[int]:
        """Encode a text to the tokens that `model` takes.

        As with transformers' tokenizers, a beginning-of-text token comes first if the model has one
        there. With `special`, the names of special tokens are these tokens. Raises DataError for
        lone surrogates; `name` is what the message calls the text.
        """
        encode = self.tokenizer.encode_special if special else self.tokenizer.encode
        try:
            return self.tokenizer.add_bos(encode(text).tolist())
        except UnicodeEncodeError as error:
            where = f"{name}: character {error.start}"
            raise DataError(f"{where} is not valid Unicode; remove it") from None

    def encode_chat(self, messages: "list[Message]") -> list[int]:
        """Return the prompt for a model's answer to messages, as the tokens of transformers.

            prompt = run.encode_chat([{"role": "user", "content": "What is 2 + 2?"}])
            answer = "".join(text for _, text in run.start([prompt]))

        A space at its end stays a token, and is not left to the answer. Raises what `render_chat`
        does.
        """
        return self.encode(self.render_chat(messages), "messages", special=True)

    def render_chat(self, messages: "list[Message]") -> str:
        """Return the prompt for a model's answer to messages as text, by its chat template.

        Raises ConfigError for a run without a template, and for messages that it refuses.
        """
        if self._chat_template is None:
            raise ConfigError(
                f"{self.path}: this model continues texts and has not learnt to answer; use: "
                f"gptmini generate {quote(self.path)} --prompt TEXT"
            )
        return self._chat_template.render(messages)

    @cached_property
    def _chat_template(self) -> "ChatTemplate | None":
        from gptmini.tokenizer.chat_template import ChatTemplate  # noqa: PLC0415 - as above

        source = self.tokenizer.chat_template
        if source is None:
            return None
        return ChatTemplate(source, self.tokenizer.template_tokens, self.path)

    def decode(self, tokens: list[int] | Tensor) -> str:
        """Return the text of tokens (T,), such as `encode` returns or `model` makes likely."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return self.tokenizer.decode(numbers)

    def build_sample_config(self, settings: dict[str, Any]) -> SampleConfig:
        """Return the run's section `sample` with some settings changed.

        Raises ConfigError for a setting that does not exist or has a wrong value.
        """
        if not settings:
            return self.config.sample
        section = self.config.sample.model_dump() | settings
        return validate({"sample": section}, {}).sample

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, those in bfloat16 as they are; `model` would widen all."""
        model = self._model
        return {
            name: precision.dequantize(model.get_submodule(name.rpartition(".")[0]), weights)
            for name, weights in model.state_dict().items()
        }

    @contextmanager
    def borrow_engine(self, n_texts: int, use_cache: bool = True) -> Iterator[Engine]:
        """Lend an engine for up to `n_texts` texts; nobody else uses it until the block ends."""
        if not use_cache:
            yield TorchEngine(self.model, n_texts, use_cache=False)
            return
        engine = self._take_engine(n_texts)
        try:
            yield engine
        finally:
            self._idle_engines.append(engine)

    def _take_engine(self, n_texts: int) -> Engine:
        """Take an idle engine that is large enough, or open one.

        Drops engines that are too small, which the larger one replaces, and those of the model as
        it was before a change.
        """
        while self._idle_engines:
            with suppress(IndexError):  # another thread may have taken the last one
                engine = self._idle_engines.pop()
                if engine.n_slots >= n_texts and engine.is_current(self._model):
                    return engine
        return self._open_engine(n_texts)

    def _open_engine(self, n_texts: int) -> Engine:
        """Open an engine of the model as it is now; those of one model share its weights."""
        with _opening:
            last = self._engine
            if last is not None and last.is_current(self._model):
                self._engine = last.open_another(n_texts)
            else:
                self._engine = last = None  # so that what it made of the model goes first
                self._engine = open_engine(self._model, n_texts, self.weights)
            return self._engine

    def _encode_prompt(self, prompt: str, special: bool) -> tuple[list[int], Tensor | None]:
        """Encode a prompt; also return the bias (V,) of the first token, or None."""
        first_bias = None
        if prompt.endswith(" ") and (self._space_bias == 0).sum() > 1:
            # Where words are tokens, a space belongs to the word behind it (" the"), and the model
            # has hardly seen one alone. So drop it, and let the first token bring it back.
            prompt = prompt[:-1]
            first_bias = self._space_bias
        if not prompt:
            return [], ban_end_tokens(self.tokenizer) if first_bias is None else first_bias
        return self.encode(prompt, "prompt", special), first_bias

    @cached_property
    def _space_bias(self) -> Tensor:
        """The bias (V,) of a first token that begins with a space."""
        spellings = map(self.tokenizer.decode_token, range(self.tokenizer.vocab_size))
        return torch.tensor([0.0 if each.startswith(b" ") else -torch.inf for each in spellings])


def _pick_device(name: str, model: GPT) -> torch.device:
    """Pick a device to generate on; `auto` takes a GPU only for a model that is faster there.

    For a small model, the compiled engine finishes a token before a GPU's kernels are launched.
    Those who read whole texts, as `evaluate` does, name the device they want.
    """
    device = pick_device(name)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    is_small = n_parameters < MIN_PARAMETERS_FOR_GPU
    if name == "auto" and device.type != "cpu" and is_small and find_compiler(*CPP_COMPILERS):
        return torch.device("cpu")
    return device


@show_elapsed("loading the model")
def load_run(
    path: str | Path,
    device: str = "auto",
    weights: str = "bfloat16",
    step: int | None = None,
    model: Callable[[ModelConfig], GPT] | None = None,
    rounds_model: bool = False,
) -> Run:
    """Load the best checkpoint of a run directory, or that of `step`.

        run = gptmini.load("runs/stories")

    A run that was trained with a `model` of your own (`gptmini.fit`) is loaded with it, too.

    `run.model` has the weights of the checkpoint. `weights` is the precision of the matrices that
    texts are generated with: float32, or bfloat16 (the default) or int8, which are faster on a CPU.
    There the compiled engine also rounds the inputs of every product, and keys and values to
    bfloat16. With bfloat16, a GPU that multiplies it generates wholly in bfloat16. PyTorch rounds
    nothing on a CPU. `rounds_model` rounds those of `run.model` as well, which takes less memory.
    """
    if weights not in precision.PRECISIONS:
        raise ConfigError(f"--weights {weights}: not supported; choose float32, bfloat16 or int8")
    directory = RunDirectory(Path(path))
    config = directory.load_config()
    checkpoint = directory.load_best() if step is None else directory.load_checkpoint(step)
    tokenizer = directory.load_tokenizer(checkpoint)
    if model is not None:
        net = build_own_model(model, config.model)
    elif checkpoint.state.get("own_model"):
        remedy = (
            f'run = gptmini.load("{path}", model=build), then run.generate("The ") or '
            f"gptmini.evaluate(run)"
        )
        raise ConfigError(describe_own_model(directory.path, remedy))
    else:
        net = create_undrawn(config.model)
    tensors = checkpoint.model
    check_weights(tensors, net, directory.checkpoints)
    net.eval().load_state_dict(tensors, assign=True)
    tensors.clear()  # so that rounding frees one after the other
    if model is not None:
        check_own_model(net, trains=False)
        try:  # these weights under another mask may be a question of yours
            before = checkpoint.state.get("own_logits", [])
            now = before and measure_start(model, config.model)
            check_same_start(directory.path, before, now)
        except ConfigError as error:
            warn(f"{error}")
    precision.round_weights(net, weights if rounds_model else "float32")
    target = _pick_device(device, net)
    if target.type != "cpu" and not (weights == "bfloat16" and multiplies_bfloat16(target)):
        precision.widen_weights(net)
    net = net.to(target)
    return Run(directory.path, config, tokenizer, net, checkpoint.state, weights)
