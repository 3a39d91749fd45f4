"""A model of your own: build it, find what is not gptmini's in it, check that its cache is right.

An attention that reads the KV cache wrongly trains well and writes nonsense. So it is asked once
for the same logits token by token and by whole texts, and generates without a cache if they differ.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn

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
# Of torch, what gptmini's models are built of.
CLASSES_OF_TORCH = (nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList)


def build_own_model(build: Callable[[ModelConfig], GPT], config: ModelConfig) -> GPT:
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


def check_cache(model: GPT) -> None:
    """Let a model generate without a cache, and say so, if it computes something else with one.

    It asks a copy: what a module keeps of a pass in inference mode cannot be trained through.
    """
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
        problem = "" if difference <= TOLERANCE else f"logits differ by {difference:.0%}"
    except Exception as error:  # modules of your own may raise anything
        problem = f"{reached[-1]}{type(error).__name__}: {error}"
    model.uses_cache = not problem
    if problem:
        warn(
            f"model: cached and uncached logits differ ({problem}); generating without a KV "
            f"cache, which is slower"
        )


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
