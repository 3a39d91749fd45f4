"""Random models, and how the tests run the compiled step on them."""

import torch
from hypothesis import strategies as st

from gptmini.config.settings import ModelConfig
from gptmini.extras.engine import build, packing
from gptmini.extras.engine.step import ACTIVATION_CODES, NativeStep
from gptmini.model.gpt import GPT
from tests.support import NORMS, POSITIONS

LENGTH = 40  # more than a block of 32 positions, and than two of 16


@st.composite
def models(draw: st.DrawFn) -> GPT:
    one_of = lambda *choices: draw(st.sampled_from(choices))
    variant, window = one_of("mha", "gqa", "mqa"), one_of(None, 1, 3, 7)
    n_head = one_of(2, 4, 6)
    config = ModelConfig.model_validate(
        {
            "vocab_size": one_of(5, 37, 130),
            "n_layer": 3,
            "n_head": n_head,
            "d_model": 8 * n_head,
            "head_dim": one_of(8, 10, 32),
            "d_ff": one_of(8, 40, 100),
            "context_length": LENGTH,
            "attention": {
                "variant": variant,
                "n_kv_head": 2 if variant == "gqa" else None,
                "window": window,
                "full_every": one_of(None, 2) if window else None,
                "qk_norm": one_of(True, False),
                "qkv_bias": one_of(None, True, False),
            },
            "position": one_of(*POSITIONS),
            "norm": one_of(*NORMS),
            "activation": one_of(*ACTIVATION_CODES),
            "bias": one_of(True, False),
            "tie_embeddings": one_of(True, False),
        }
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    model = GPT(config).eval()
    with torch.no_grad():  # norms and biases that differ from their initial values
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def step_of(
    model: GPT,
    weights: str = "float32",
    n_rows: int = 1,
    target: tuple[str, ...] = build.NATIVE_TARGET,
) -> NativeStep:
    library = build.build_library(target)
    assert library is not None
    cache = packing.create_cache(model.config, weights, n_rows, spare_positions=LENGTH)
    return NativeStep(library, model, weights, cache)


def run(step: NativeStep, tokens: list[int], row: int = 0, start: int = 0) -> torch.Tensor:
    """The logits of all tokens of a row, from position `start` on."""
    places = range(len(tokens))
    return step(tokens, [row] * len(tokens), [start + place for place in places], places).clone()
