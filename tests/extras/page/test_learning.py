"""model.js learns as PyTorch does: gradients by autograd in float64, and steps of its AdamW."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gptmini.extras.page.export import build_page
from tests.extras.page.samples import CONTEXT, random_run, rounded
from tests.support import ACTIVATIONS, NORMS, POSITIONS


def draw_shape(seed: int) -> dict[str, Any]:
    """Draw the shape of a model; ten in a row have each choice at least twice."""
    draw = random.Random(seed)
    variant = ("mha", "gqa", "mqa")[seed % 3]
    n_kv_head = {"n_kv_head": 2} if variant == "gqa" else {}
    n_head = draw.choice([4, 6])
    return {
        "n_layer": draw.randint(1, 3),
        "n_head": n_head,
        "d_model": 5 * n_head,
        "head_dim": draw.choice([6, 8]),
        "d_ff": draw.randint(20, 50),
        "position": POSITIONS[seed % len(POSITIONS)],
        "norm": NORMS[seed // 2 % len(NORMS)],
        "activation": ACTIVATIONS[seed // 3 % len(ACTIVATIONS)],
        "bias": seed % 4 < 2,
        "tie_embeddings": seed % 5 < 2,
        "attention": {
            "variant": variant,
            **n_kv_head,
            "qk_norm": draw.random() < 0.6,
            "qkv_bias": draw.random() < 0.5,
            **draw.choice([{}, {"window": 3}, {"window": 7, "full_every": 2}]),
        },
    }


LEARN = """async ([tokens, steps]) => {
  const { gpt } = opened;
  const reader = new Reader(gpt);
  const optimizer = new AdamW();
  const losses = [];
  let first = null;
  for (let step = 0; step < steps; step++) {
    reader.forget();
    for (let n = 5; n < tokens.length; n += 5) reader.read(tokens.slice(0, n)); // piece by piece
    reader.read(tokens);
    losses.push(computeLoss(reader.record));
    const walk = gpt.backward(reader.record);
    let pause = walk.next();
    while (!pause.done) pause = walk.next();
    first ??= pause.value;
    optimizer.update(gpt.weights, pause.value);
  }
  const list = (all) =>
    Object.fromEntries(Object.entries(all).map(([name, values]) => [name, Array.from(values)]));
  return [losses, list(first), list(gpt.weights)];
}"""


@pytest.mark.parametrize("seed", range(10))
def test_gradients_and_steps_are_those_of_pytorch(visit, seed):
    run = random_run(draw_shape(seed))
    draw = random.Random(seed)
    tokens = [draw.randrange(257) for _ in range(draw.randint(2, CONTEXT))]
    losses, gradients, weights = visit(build_page(run)).evaluate(LEARN, [tokens, 5])
    model = rounded(run, "bfloat16").model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.tensor(tokens)
    for step in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[None])[0, :-1], text[1:])
        assert losses[step] == pytest.approx(loss.item(), abs=1e-4)
        loss.backward()
        if step == 0:
            moved_by_rounding = check_gradients(model, gradients)
        optimizer.step()
    for name, parameter in model.named_parameters():
        if name in moved_by_rounding:
            continue
        learned = torch.tensor(weights[name], dtype=torch.float64).view_as(parameter)
        torch.testing.assert_close(learned, parameter.detach(), atol=1e-4, rtol=0, msg=name)


def check_gradients(model: torch.nn.Module, gradients: dict[str, list[float]]) -> set[str]:
    """Every tensor has the gradient of autograd, by a relative 1e-4.

    Returns the names of those that have none: softmax leaves nothing of a bias that all keys share.
    AdamW moves such a bias by what rounding leaves, which changes nothing.
    """
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    total = torch.stack([grad.norm() for grad in expected.values()]).norm()
    nothing = {name for name, grad in expected.items() if grad.norm() < 1e-14 * total}
    assert all(name.endswith("k_proj.bias") for name in nothing)
    for name, grad in expected.items():
        error = (torch.tensor(gradients[name], dtype=torch.float64).view_as(grad) - grad).norm()
        limit = 1e-7 * total if name in nothing else 1e-4 * grad.norm()
        assert error <= limit, (name, error / grad.norm())
    return nothing
