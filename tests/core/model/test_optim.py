import pytest
import torch
from torch import nn

from gptmini.config.settings import ModelConfig, TrainConfig
from gptmini.model.gpt import GPT
from gptmini.model.optim import (
    Muon,
    Optimizer,
    compute_learning_rate,
    iterate_newton_schulz,
    orthogonalize,
)


def rates(**settings) -> list[float]:
    config = TrainConfig.model_validate({"lr": 1.0, "min_lr": 0.1} | settings)
    return [compute_learning_rate(config, step) for step in range(config.steps)]


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


def small(**settings: bool) -> GPT:
    return GPT(
        ModelConfig(
            **settings,
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


def roles(parameters: list[torch.Tensor], model: GPT) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter].split(".")[-2] for parameter in parameters}


MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}


def test_only_matrices_of_linear_layers_decay():
    model = small(tie_embeddings=False)
    settings = TrainConfig(optimizer="adamw", weight_decay=0.1)
    (adamw,) = Optimizer(model, settings).optimizers
    decayed, embeddings, _ = adamw.param_groups
    assert roles(decayed["params"], model) == MATRICES | {"head"}
    assert roles(embeddings["params"], model) == {"embed"}
    assert all(p.ndim == 2 for p in decayed["params"])
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0, 0.0]
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(model.state_dict())


def test_embeddings_that_are_the_head_decay():
    (adamw,) = Optimizer(small(), TrainConfig(optimizer="adamw", weight_decay=0.1)).optimizers
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.1, 0.0]


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(tied):
    model = small(tie_embeddings=tied)
    settings = TrainConfig(muon_lr=0.04, lr=0.01, embed_lr=0.02)
    optimizer = Optimizer(model, settings)
    adamw, muon = optimizer.optimizers
    assert isinstance(muon, Muon)
    (group,) = muon.param_groups
    assert roles(group["params"], model) == MATRICES
    rest = [p for group in adamw.param_groups for p in group["params"]]
    assert len(rest) + len(group["params"]) == len(list(model.parameters()))
    assert "embed" in roles(rest, model)
    assert ("head" in roles(adamw.param_groups[0]["params"], model)) == (not tied)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.005)  # half way through the warm-up
    assert group["lr"] == pytest.approx(0.02)
    by_role = {role: g["lr"] for g in adamw.param_groups for role in roles(g["params"], model)}
    assert by_role["embed"] == pytest.approx(0.01)
    assert by_role["final_norm"] == pytest.approx(0.005)
    if not tied:
        assert by_role["head"] == pytest.approx(0.005)


def test_an_update_of_muon_is_equally_long_in_every_direction():
    """Whatever the singular values of the gradient, those of the update are close to each other."""
    model = small()
    weight = model.blocks[0].mlp.up_proj.weight
    before = weight.detach().clone()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * torch.logspace(0, 2, parameter.shape[-1])
    Optimizer(model, TrainConfig(lr=0.01, muon_lr=0.01, weight_decay=0.0)).step(0.01)
    # up_proj has 4 times as many rows as columns, and √4 = 2
    values = torch.linalg.svdvals(before - weight) / (0.01 * 2)
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_an_update_of_muon_moves_all_inner_neurons_alike():
    """Whatever their gradients: one whose gradients are a thousand times smaller moves as far."""
    model = small()
    mlp = model.blocks[0].mlp
    before = [mlp.up_proj.weight.detach().clone(), mlp.down_proj.weight.detach().clone()]
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    sizes = torch.logspace(0, -1, mlp.up_proj.weight.shape[0])
    mlp.up_proj.weight.grad *= sizes[:, None]
    mlp.down_proj.weight.grad *= sizes
    Optimizer(model, TrainConfig(lr=0.01, muon_lr=0.01, weight_decay=0.0)).step(0.01)
    incoming = (before[0] - mlp.up_proj.weight).norm(dim=1)
    outgoing = (before[1] - mlp.down_proj.weight).norm(dim=0)
    assert incoming.tolist() == pytest.approx([0.01] * len(sizes), rel=1e-4)
    assert outgoing.tolist() == pytest.approx([0.005] * len(sizes), rel=1e-4)


def test_a_neuron_without_gradients_stays_where_it_is():
    matrices = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
    matrices[0, :, 3] = 0
    matrices[0, :, 5] *= 1e-6  # next to nothing, of which most is rounding
    lengths = orthogonalize(matrices)[0].norm(dim=0)
    assert lengths[3] == 0
    assert lengths[5] < 0.02
    assert lengths[[0, 1, 2, 4]].tolist() == pytest.approx([0.5] * 4)


def test_muon_computes_what_torchs_does():
    """Several matrices of several shapes, over several steps, against torch's own.

    All but for the lengths of columns, which torch's leaves as they are.
    """
    torch.manual_seed(0)
    shapes = [(8, 8), (32, 8), (8, 32), (8, 8), (8, 32)]
    ours = [torch.randn(shape) for shape in shapes]
    theirs = [matrix.clone() for matrix in ours]
    # torch's works in bfloat16 only
    pair = (
        Muon(ours, 0.1, torch.bfloat16, iterate_newton_schulz),
        torch.optim.Muon([nn.Parameter(m) for m in theirs], weight_decay=0.1),
    )
    theirs = pair[1].param_groups[0]["params"]
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.param_groups[0]["lr"] = 0.02
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), atol=2e-3, rtol=0)
        assert (mine - other).abs().max() < 0.05 * 4 * 0.02 * 2
