"""A model of your own: build it, find what is not gptmini's in it, check it, know it again.

An attention that reads the KV cache wrongly trains well and writes nonsense. So it is asked once
for the same logits token by token and by whole texts, and generates without a cache if they differ.
One that sees later tokens is refused: its loss falls below what any GPT can reach. And a run keeps
a few logits of the model that it began with, since no file has its code.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.console import warn
from gptmini.errors import ConfigError
from gptmini.generate.engine import TorchEngine
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT

CHECKED_TOKENS = 16
# A share of the largest logit. Rounding makes 1e-6 of it in float32, and 1e-3 where a GPU
# multiplies with fewer bits.
TOLERANCE = 1e-2
# The same of logits that have no cause to differ. Rounding makes 1e-6; scores that are larger by
# 1 %, 4e-3.
CLOSE = 1e-4
START_TOKENS = 512  # so many show a longer window, and cost a second in a large model
BuildModel = Callable[[ModelConfig], GPT]
# Of torch, what gptmini's models are built of.
CLASSES_OF_TORCH = (nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList)


def build_own_model(build: BuildModel, config: ModelConfig) -> GPT:
    """Call the builder that somebody gave; ConfigError if that is none, or returns no GPT."""
    model = None if isinstance(build, nn.Module) else build(config)
    if not isinstance(model, GPT):
        raise ConfigError("model: must be a function that takes a ModelConfig and returns a GPT")
    return model


def find_own_module(model: GPT) -> str | None:
    """Name the first module of a class that gptmini's models do not have; None if there is none."""
    for name, module in model.named_modules():
        is_written_here = type(module).__module__.startswith("gptmini.")
        if not is_written_here and type(module) not in CLASSES_OF_TORCH:
            return f"{name or 'the model'} is a {type(module).__name__}"
    return None


def measure_start(build: BuildModel, config: ModelConfig) -> list[float]:
    """Measure a few logits of a new model; other code or other first weights change them.

    Empty where it differs from call to call, or fails on a CPU. ConfigError if two calls return the
    same weights: a second run would begin with what the first has learnt.
    """
    models = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            models.append(build_own_model(build, config))
    first, second = ({id(p) for p in each.parameters() if p.requires_grad} for each in models)
    if first & second:
        raise ConfigError("model: returned the same weights twice; make new ones in each call")
    tokens = torch.arange(min(config.context_length, START_TOKENS))  # (T,)
    tokens %= models[0].embed.num_embeddings
    with suppress(Exception), torch.inference_mode():  # modules of your own may raise anything
        logits = [_copy_with_noise(model).cpu()(tokens[None])[0] for model in models]  # (T, V) each
        a, b = (each[:: max(1, len(tokens) // 16), 0].tolist() for each in logits)
        if a == b:
            return a
    return []


def check_same_start(run: Path, before: list[float], now: list[float]) -> None:
    """Raise ConfigError if a run began with other logits than `measure_start` measures now."""
    gaps = [abs(a - b) for a, b in zip(before, now, strict=False)]  # none where nothing is known
    if gaps and max(gaps) > CLOSE * max(map(abs, before)):
        raise ConfigError(
            f"{run}: the model computes something else than when this run began; restore its code, "
            f"or choose another folder"
        )


def _copy_with_noise(model: GPT) -> GPT:
    """Copy a model, with fixed numbers added: a weight of zero would hide what it multiplies."""
    asked = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    for weights in asked.parameters():
        noise = torch.randn(weights.shape, generator=generator).to(weights)
        weights.add_(noise, alpha=weights.numel() ** -0.25)
    return asked


def check_own_model(model: GPT, trains: bool = True) -> None:
    """Raise ConfigError for a model whose logits depend on later tokens.

    With `trains`, it is asked in training mode, too.

    Let it generate without a cache, and say so, if it computes something else with one. It asks a
    copy: what a module keeps of a pass in inference mode cannot be trained through.
    """
    leak = ""
    devices = [model.device] if model.device.type == "cuda" else []
    with suppress(Exception), torch.random.fork_rng(devices):
        leak = _find_leak(model, trains)
    if leak:
        raise ConfigError(
            f"model: {leak} depends on later tokens, so its loss would mean nothing; hide them in "
            f"`mask` (docs/own-attention.md)"
        )
    asked = copy.deepcopy(model).eval()
    reached = [""]
    for layer, block in enumerate(asked.blocks):
        block.register_forward_pre_hook(
            lambda _, inputs, layer=layer: reached.append(
                f"layer {layer}, x {tuple(inputs[0].shape)}: "
            )
        )
    try:
        difference = _measure_difference(asked)
        differs = f"cached and uncached logits differ by {difference:.0%}"
        problem = "" if difference <= TOLERANCE else differs
    except Exception as error:  # modules of your own may raise anything
        problem = f"a trial with a KV cache failed: {reached[-1]}{type(error).__name__}: {error}"
    model.uses_cache = not problem
    if problem:
        warn(f"model: {problem}; generating without a KV cache, which is slower")


@torch.inference_mode()
def _find_leak(model: GPT, trains: bool) -> str:
    """Name the first position whose logits change with later tokens, and not without; or ""."""
    asked = _copy_with_noise(model)
    V = model.embed.num_embeddings

    def ask(tokens: Tensor) -> Tensor:
        torch.manual_seed(0)  # for dropout, which is the same in each pass
        return asked(tokens[None])[0]  # (T, V)

    passes = [("", CHECKED_TOKENS), ("", START_TOKENS)]
    for mode, length in [*passes, ("in training, ", CHECKED_TOKENS)] if trains else passes:
        asked.train(bool(mode))
        T = min(model.config.context_length, length)
        tokens = torch.arange(T, device=model.device) % V  # (T,)
        logits = ask(tokens)  # (T, V)
        cuts = range(1, T) if T <= CHECKED_TOKENS else (T // 3, T // 2 + 1, T - 1)
        for n in (T, *cuts):
            changed = torch.cat([tokens[:n], (tokens[n:] + 1) % V])  # (T,)
            if (ask(changed) - logits)[:n].abs().max() > CLOSE * logits.abs().max():  # of (n, V)
                return "" if n == T else f"{mode}position {n - 1}"
    return ""


@torch.inference_mode()
def _measure_difference(model: GPT) -> float:
    """Return how far logits by the cache are from those without, as a share of the largest.

    Two texts of different lengths grow together, as in a batch of prompts.
    """
    T = min(model.config.context_length, CHECKED_TOKENS)
    tokens = [n % model.embed.num_embeddings for n in range(T)]
    texts = [Sequence(0, tokens[: max(1, T // 4)], T), Sequence(1, tokens[: max(1, T // 2)], T)]
    engine = TorchEngine(model, len(texts))
    difference = 0.0
    largest = 0.0
    for _ in range(T // 2):
        for text, logits in zip(texts, engine(texts), strict=True):
            context = torch.tensor([text.context], device=model.device)  # (1, T)
            whole = model(context)[0, -1]  # (V,)
            difference = max(difference, (logits[-1] - whole).abs().max().item())
            largest = max(largest, whole.abs().max().item())
            text.context.append(tokens[len(text.context) % T])
    return difference / largest if difference else 0.0
