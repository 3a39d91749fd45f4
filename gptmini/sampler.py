"""Text from a model: prefill the prompt, then decode token by token over a KV cache.

Past the context there are three policies. `slide`: when the context is full, its newer half is
prefilled again, at positions from 0 on, and decoding goes on from there. That holds for learned and
rotary positions and for windowed layers alike, and costs about one prefilled token for each drawn
one. `stop` ends the text, `error` refuses before it begins. With and without the cache the model
sees the same tokens at the same positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.attention import KVCache
from gptmini.checkpoint import RunDirectory, fitting
from gptmini.config import Config, SampleConfig
from gptmini.configfile import validate
from gptmini.errors import CheckpointError, ConfigError, DataError
from gptmini.machine import pick_device
from gptmini.model import GPT
from gptmini.runlog import say
from gptmini.tokenizer import StreamDecoder, Tokenizer

PREFILL = 512  # prompt tokens per forward pass, which bounds the memory of their scores


def decode(
    model: GPT,
    prompt: list[int],
    sample: SampleConfig,
    use_cache: bool = True,
    first: Tensor | None = None,
) -> Iterator[int]:
    """Tokens that follow a prompt of at least one token, max_new_tokens of them.

    Where `first` is given, bool (V,), it says which tokens the first may be. ConfigError, before
    anything is drawn, if the tokens do not fit the context and may not overflow it.
    """
    limit = model.config.context_length
    if sample.overflow == "error" and len(prompt) + sample.max_new_tokens - 1 > limit:
        raise ConfigError(
            f"sample.overflow: {len(prompt)} tokens of prompt and {sample.max_new_tokens} new ones "
            f"do not fit the context of {limit}; lower max_new_tokens, or take slide"
        )
    return _decode(model, prompt, sample, use_cache, first)


@torch.inference_mode()
def _decode(
    model: GPT, prompt: list[int], sample: SampleConfig, use_cache: bool, first: Tensor | None
) -> Iterator[int]:
    limit = model.config.context_length
    weight = model.embed.weight
    cache = KVCache(model.config, 1, weight.device, weight.dtype) if use_cache else None
    generator = torch.Generator(weight.device).manual_seed(sample.seed)
    window = prompt[-limit:]
    unseen = window  # by the cache
    for _ in range(sample.max_new_tokens):
        tokens = torch.tensor([unseen if use_cache else window], device=weight.device)
        for chunk in tokens.split(PREFILL if use_cache else limit, dim=1):
            hidden = model.hidden(chunk, cache)
        logits = model.logits(hidden[0, -1])
        token = choose(logits, sample, generator, first)
        first = None
        yield token
        window, unseen = [*window, token], [token]
        if len(window) > limit:
            if sample.overflow == "stop":
                return
            window = unseen = window[-max(1, limit // 2) :]
            if cache is not None:
                cache.clear()


def choose(
    logits: Tensor, sample: SampleConfig, generator: torch.Generator, allowed: Tensor | None = None
) -> int:
    """A token drawn from logits (V,), or from those allowed; temperature 0 takes the likeliest."""
    if not logits.isfinite().all():
        raise CheckpointError("the model gives non-finite logits; its weights are damaged")
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
    if sample.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, sample), 1, generator=generator))


def probabilities(logits: Tensor, sample: SampleConfig) -> Tensor:
    """Logits (V,) to probabilities (V,): temperature, then top-k (with its ties), then top-p.

    Top-p keeps the smallest set of likeliest tokens that holds at least that much probability
    (Holtzman et al. 2020).
    """
    logits = logits.float() / sample.temperature
    if sample.top_k is not None and sample.top_k < len(logits):
        smallest = logits.topk(sample.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    weights = logits.softmax(dim=-1)
    if sample.top_p is not None:
        ordered, order = weights.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        weights[order[before >= sample.top_p]] = 0
    return weights / weights.sum()


@dataclass(frozen=True)
class Run:
    """A trained model with its tokenizer and settings."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    model: GPT
    step: int

    def stream(self, prompt: str, use_cache: bool = True, **settings: Any) -> Iterator[str]:
        """The continuation of a prompt, in whole characters as they come.

        Ends after max_new_tokens or at the end of the document. `settings` are those of
        `sample:` in the configuration; ConfigError and DataError come before the first text.
        """
        sample = self.config.sample
        if settings:
            sample = _override(sample, settings)
        first = None
        if prompt.endswith(" "):
            # A space belongs to the word behind it where words are tokens: let the model draw both.
            size, spelt = self.tokenizer.vocab_size, self.tokenizer.token_bytes
            words = torch.tensor([spelt(token).startswith(b" ") for token in range(size)])
            if words.sum() > 1:
                prompt, first = prompt[:-1], words
        try:
            tokens = self.tokenizer.encode(prompt).tolist() or [self.tokenizer.document_token]
        except UnicodeEncodeError as error:
            raise DataError(
                f"prompt: character {error.start} is no Unicode text; mend it"
            ) from None
        limit = self.model.config.context_length
        if len(tokens) > limit:
            say(f"prompt: {len(tokens)} tokens, the context has {limit}; the last ones are used")
        return self._texts(decode(self.model, tokens, sample, use_cache, first), first is not None)

    def _texts(self, tokens: Iterator[int], without_space: bool) -> Iterator[str]:
        decoder = StreamDecoder(self.tokenizer)
        for token in tokens:
            if token == self.tokenizer.document_token:
                break
            if text := decoder.feed(token):
                yield text.removeprefix(" " * without_space)
                without_space = False
        if text := decoder.flush():
            yield text

    def generate(self, prompt: str, **settings: Any) -> str:
        """The continuation of a prompt as one string; `settings` as for `stream`."""
        return "".join(self.stream(prompt, **settings))


def _override(sample: SampleConfig, settings: dict[str, Any]) -> SampleConfig:
    """The sampling settings with some changed; ConfigError names what is wrong."""
    return validate({"sample": {**sample.model_dump(), **settings}}, {}).sample


def load(path: str | Path, device: str = "auto") -> Run:
    """The best checkpoint of a run directory, ready to generate, in float32."""
    run = RunDirectory(Path(path), say)
    config, tokenizer = run.config(), run.tokenizer()
    checkpoint = run.best()
    if checkpoint.state["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"{run.tokenizer_file}: is not the tokenizer of this run ({tokenizer.kind} of "
            f"{tokenizer.vocab_size}); restore it"
        )
    model = GPT(config.model)
    model.load_state_dict(fitting(checkpoint.model, model.state_dict(), run.checkpoints))
    return Run(run.path, config, tokenizer, model.eval().to(pick_device(device)), checkpoint.step)
