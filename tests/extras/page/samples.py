"""Models of all kinds with random weights, and the model that a page holds: its weights rounded."""

import copy
from pathlib import Path
from typing import Any

import torch

from gptmini.generate.precision import round_weights, widen_weights
from gptmini.generate.run import Run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import ByteTokenizer, Tokenizer
from tests.support import tiny

CONTEXT = 48

# Each part of a model is in at least one of them, in different company.
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "window": {"n_layer": 3, "attention": {"window": 5, "full_every": 2}},
    "gqa": {"n_layer": 3, "attention": {"variant": "gqa", "n_kv_head": 2, "window": 7}},
    "gpt2": {
        "position": "learned",
        "bias": True,
        "activation": "gelu",
        "attention": {"qk_norm": False},
    },
    "llama": {
        "n_head": 8,
        "d_model": 64,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "activation": "swiglu",
        "tie_embeddings": False,
        "rope_theta": 500.0,
        "rope_scaling": [8, 1, 4, 16],
        "attention": {"variant": "gqa", "n_kv_head": 2, "qk_norm": False},
    },
    "bloom": {
        "n_head": 6,
        "d_model": 42,
        "position": "alibi",
        "bias": True,
        "activation": "gelu",
        "attention": {"variant": "mqa", "window": 9},
    },
    "none": {"position": "none", "activation": "swiglu", "bias": True, "d_ff": 31},
    "wide": {
        "n_layer": 1,
        "n_head": 3,
        "d_model": 30,
        "head_dim": 6,
        "position": "learned",
        "tie_embeddings": False,
        "attention": {"variant": "mqa", "qkv_bias": True},
    },
}


def random_run(
    shape: str | dict[str, Any] = "default",
    tokenizer: Tokenizer | None = None,
    sample: dict[str, Any] | None = None,
    name: str = "run",
) -> Run:
    """A run in memory whose weights are all random, so that each of them counts."""
    model = SHAPES[shape] if isinstance(shape, str) else shape
    tokenizer = tokenizer or ByteTokenizer()
    config = tiny(model={"context_length": CONTEXT, **model}, sample=sample or {})
    config = config.with_tokenizer(tokenizer.kind, tokenizer.vocab_size)
    torch.manual_seed(0)
    net = GPT(config.model).eval()
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if "norm.weight" in key:
                parameter.normal_(1, 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 2 * parameter.shape[1] ** -0.5)
    return Run(Path("runs") / name, config, tokenizer, net, {"step": 7, "corpus": ""})


def rounded(run: Run, precision: str) -> Run:
    """The run with the weights that its page has."""
    net = copy.deepcopy(run.model)
    round_weights(net, precision)
    widen_weights(net)
    return Run(run.path, run.config, run.tokenizer, net, run.state)


def random_texts(count: int, vocab_size: int = 257) -> list[list[int]]:
    """Texts of 1 to `CONTEXT` random tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, CONTEXT + 1, (count,), generator=generator).tolist()
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
