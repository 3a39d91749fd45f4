"""What a new model attends to: the token before, and what followed the current one earlier."""

import math

import pytest
import torch
from torch import Tensor

from gptmini.config.settings import ModelConfig
from gptmini.model import gpt
from gptmini.model.gpt import GPT, Block

PERIOD = 64  # tokens until the text repeats itself
SHAPES = {
    "as it is by default": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "gqa": {"attention": {"variant": "gqa", "n_kv_head": 2}},
    "mqa": {"attention": {"variant": "mqa"}},
    "wide": {"d_model": 256},
    "one head": {"n_head": 1, "d_model": 64},
    "without QK-norm": {"attention": {"qk_norm": False}},
    "of two layers": {"n_layer": 2},
    "tied": {"tie_embeddings": True},
}


def make(**given: object) -> GPT:
    base = {"vocab_size": 300, "n_layer": 3, "n_head": 4, "d_model": 128, "context_length": 128}
    torch.manual_seed(1)
    return GPT(ModelConfig.model_validate(base | {"tie_embeddings": False} | given)).eval()


@torch.no_grad()
def compute_attention(model: GPT) -> tuple[Tensor, Tensor]:
    """Compute how head 0 of two layers attends over text that repeats itself, (2·PERIOD,) twice."""
    generator = torch.Generator().manual_seed(2)
    once = torch.stack([torch.randperm(300, generator=generator)[:PERIOD] for _ in range(8)])
    tokens = torch.cat([once, once], dim=1)  # (8, T)
    T = tokens.shape[1]
    assert model.rotary is not None
    cos_sin = model.rotary(torch.arange(T))
    hidden = torch.full((T, T), -math.inf).triu(1)
    x = model.embed(tokens)
    found = []
    for block in model.blocks[:2]:
        assert isinstance(block, Block)
        q, k, _ = block.attn.project_qkv(block.attn_norm(x), cos_sin)  # (8, H, T, K), (8, G, T, K)
        scores = q[:, 0] @ k[:, 0].mT / math.sqrt(q.shape[-1]) + hidden  # (8, T, T), of head 0
        found.append(scores.softmax(dim=-1).mean(dim=0))  # (T, T)
        x = block(x, cos_sin, None)
    return found[0], found[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_model_attends_to_the_token_before(shape: str):
    attention, _ = compute_attention(make(**SHAPES[shape]))
    by_distance = torch.stack([attention.diagonal(-n).mean() for n in range(PERIOD)])
    assert by_distance.argmax() == 1
    assert by_distance[1] > 5 * by_distance.mean()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_model_attends_to_what_followed_a_token_before(shape: str):
    _, attention = compute_attention(make(**SHAPES[shape]))
    followed = attention.diagonal(1 - PERIOD)[1:].mean()
    others = (1 - followed) / (1.5 * PERIOD)
    assert followed > 1.8 * others


@pytest.mark.parametrize("shape", ["as it is by default", "gqa", "tied"])
def test_wiring_leaves_all_other_weights_as_they_were_drawn(shape: str):
    wired = make(**SHAPES[shape]).state_dict()
    drawn = make(**SHAPES[shape], induction_head=False).state_dict()
    changes = {
        name: wired[name] - drawn[name] for name in drawn if not wired[name].equal(drawn[name])
    }
    wired_projections = {f"blocks.{n}.attn.{name}_proj.weight" for n in (0, 1) for name in "qkvo"}
    assert changes.keys() == {"embed.weight"} | wired_projections
    common = changes.pop("embed.weight")
    torch.testing.assert_close(common, common[:1].expand_as(common), atol=1e-6, rtol=0)
    std = drawn["embed.weight"].std()
    assert common[0].norm().item() == pytest.approx(std.item() * math.sqrt(128), rel=0.01)
    for name, change in changes.items():
        of_other_heads = change[:, 32:] if "o_proj" in name else change[32:]
        assert not of_other_heads.any()


@pytest.mark.parametrize("given", [{"position": "learned"}, {"position": "alibi"}, {"n_layer": 1}])
def test_without_rope_or_a_second_layer_nothing_is_wired(given: dict[str, object]):
    weights = make(**given).state_dict()
    drawn = make(**given, induction_head=False).state_dict()
    assert all(weights[name].equal(drawn[name]) for name in drawn)


def test_without_the_setting_the_weights_are_those_that_are_drawn(monkeypatch: pytest.MonkeyPatch):
    plain = make(induction_head=False).state_dict()
    monkeypatch.setattr(gpt, "wire_induction_head", lambda *_: None)
    drawn = make().state_dict()
    assert all(plain[name].equal(drawn[name]) for name in drawn)


@pytest.mark.parametrize("d_model", [1, 2, 3])
def test_a_width_without_room_for_directions_has_finite_weights(d_model: int):
    model = make(d_model=d_model, n_head=1, head_dim=2)
    assert all(weight.isfinite().all() for weight in model.state_dict().values())
