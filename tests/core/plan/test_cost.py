"""Costs by arithmetic, against the model itself and against counted operations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from gptmini.config.load import CONFIGS_DIR, list_config_files, load_config
from gptmini.config.settings import ModelConfig
from gptmini.model.attention import Attention
from gptmini.model.cache import StaticCache
from gptmini.model.gpt import GPT
from gptmini.model.layers import MLP
from gptmini.plan import cost
from tests.support import ACTIVATIONS, NORMS, POSITIONS

NAMES = [str(path.relative_to(CONFIGS_DIR).with_suffix("")) for path in list_config_files()]


def by_part(model: GPT) -> dict[str, int]:
    """Parameters by the module that holds them."""
    counts: dict[str, int] = {}
    parts: dict[str, Any] = {"embedding": model.embed, "positions": model.positions}
    for name, part in {**parts, "head": model.head}.items():
        if part is not None:
            counts[name] = part.weight.numel()
    for module in model.modules():
        for kind, part in ((Attention, "attention"), (MLP, "mlp")):
            if isinstance(module, kind):
                counts[part] = counts.get(part, 0) + sum(p.numel() for p in module.parameters())
    counts["norms"] = sum(p.numel() for p in model.parameters()) - sum(counts.values())
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_model_for_every_configuration(name):
    config = load_config(CONFIGS_DIR / f"{name}.yaml", []).model.model_copy(
        update={"vocab_size": 50257}
    )
    with torch.device("meta"):
        assert cost.count_parameters_by_part(config) == by_part(GPT(config))


@st.composite
def models(draw) -> ModelConfig:
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    window = draw(st.none() | st.integers(1, 40))
    attention = {
        "variant": "gqa",
        "n_kv_head": kv_heads,
        "window": window,
        "full_every": draw(st.none() | st.integers(1, 3)) if window else None,
        "qk_norm": draw(st.booleans()),
        "qkv_bias": draw(st.none() | st.booleans()),
    }
    return ModelConfig.model_validate(
        {
            "vocab_size": draw(st.integers(1, 300)),
            "n_layer": draw(st.integers(1, 4)),
            "n_head": heads,
            "d_model": draw(st.integers(1, 40)),
            "head_dim": 2 * draw(st.integers(1, 8)),
            "context_length": draw(st.integers(1, 64)),
            "attention": attention,
            "position": draw(st.sampled_from(POSITIONS)),
            "norm": draw(st.sampled_from(NORMS)),
            "activation": draw(st.sampled_from(ACTIVATIONS)),
            "bias": draw(st.booleans()),
            "tie_embeddings": draw(st.booleans()),
        }
    )


@settings(deadline=None, max_examples=30)
@given(models())
def test_parameters_and_caches_are_those_of_any_model(config):
    with torch.device("meta"):
        assert cost.count_parameters(config) == sum(p.numel() for p in GPT(config).parameters())
    cache = StaticCache(config, 1, torch.device("meta"), torch.float32, max_pass_tokens=0)
    stored = sum(memory[:, :, :, :-1].nbytes for memory in cache.memory)
    assert cost.count_cache_bytes(config, config.context_length) == stored


@settings(deadline=None, max_examples=25)
@given(models())
def test_operations_are_those_that_torch_counts(config):
    """Its counter knows no causal mask, and a window or short queries are masks to it."""
    backend = config.attention.model_copy(update={"backend": "eager", "window": None})
    config = config.model_copy(update={"attention": backend})
    length = config.context_length
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:  # initial weights take products too
        model(tokens)
    ours = cost.count_forward_flops(config, length)
    heads = config.n_layer * config.n_head * config.head_dim
    unseen = 4 * heads * length * (length - (length + 1) / 2)
    assert sum(ours.values()) * length + unseen == pytest.approx(counter.get_total_flops())


@given(st.integers(1, 50), st.integers(1, 50))
def test_keys_seen_are_those_of_the_mask(window, length):
    from gptmini.model.attention import make_mask

    places = torch.arange(length)
    seen = make_mask(places, places, window).sum().item()
    config = ModelConfig.model_validate(
        {"vocab_size": 7, "n_layer": 1, "attention": {"window": window}}
    )
    narrow = config.attention.model_copy(update={"window": 1})
    whole = config.model_copy(update={"attention": narrow})
    gap = cost.count_forward_flops(config, length)["attention"]
    gap -= cost.count_forward_flops(whole, length)["attention"]
    heads = config.n_head * config.head_dim
    assert gap * length == pytest.approx(4 * heads * (seen - length))


def test_training_takes_three_passes_and_checkpointing_four_of_the_blocks():
    config = ModelConfig(vocab_size=100)
    parts = cost.count_forward_flops(config, 64)
    assert cost.count_training_flops(config, 64) == 3 * sum(parts.values())
    more = cost.count_training_flops(config, 64, True) - cost.count_training_flops(config, 64)
    assert more == parts["attention"] + parts["mlp"]
