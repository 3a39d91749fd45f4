import pytest
import torch

from gptmini.config import ModelConfig, TrainConfig
from gptmini.model import GPT
from gptmini.optim import adamw, learning_rate, named_state, restore_state, state_like


def rates(**settings) -> list[float]:
    config = TrainConfig.model_validate({"lr": 1.0, "min_lr": 0.1} | settings)
    return [learning_rate(config, step) for step in range(config.steps)]


def test_linear_cooldown_after_a_plateau():
    found = rates(steps=100, warmup_steps=10, cooldown=0.5, schedule="linear")
    assert found[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert found[10:51] == [1.0] * 41
    assert found[75] == pytest.approx(0.1 + 0.9 * 25 / 50)
    assert found[99] == pytest.approx(0.1 + 0.9 / 50)
    assert all(a >= b for a, b in zip(found[10:], found[11:], strict=False))


def test_cosine_cooldown_over_all_steps_is_gpt2s():
    found = rates(steps=100, warmup_steps=10, cooldown=1.0, schedule="cosine")
    assert found[10] == 1.0
    assert found[55] == pytest.approx(0.55)  # half way between 1 and 0.1
    assert found[99] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 1},
        {"steps": 5, "warmup_steps": 5},
        {"steps": 5, "warmup_steps": 0, "cooldown": 0.0},
    ],
)
def test_short_runs_have_a_rate_at_every_step(settings):
    assert all(0 < rate <= 1 for rate in rates(**settings))


def small() -> GPT:
    return GPT(
        ModelConfig(
            vocab_size=11,
            n_layer=1,
            n_head=2,
            d_model=8,
            context_length=4,
            position="learned",
            bias=True,
            norm="layernorm",
        )
    )


def test_only_matrices_of_linear_layers_decay():
    model = small()
    decayed, others = adamw(model, TrainConfig()).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "up_proj",
        "down_proj",
    }
    assert all(p.ndim == 2 for p in decayed["params"])
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def step(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(4)[None]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_state_by_name_goes_on_to_the_same_bits():
    torch.manual_seed(0)
    model = small()
    optimizer = adamw(model, TrainConfig())
    step(model, optimizer)
    state = {name: value.clone() for name, value in named_state(model, optimizer).items()}
    assert {n: t.shape for n, t in state.items()} == {
        n: t.shape for n, t in state_like(model).items()
    }
    twin = small()
    twin.load_state_dict(model.state_dict())
    twin_optimizer = adamw(twin, TrainConfig())
    restore_state(twin, twin_optimizer, dict(reversed(state.items())))
    step(model, optimizer)
    step(twin, twin_optimizer)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
