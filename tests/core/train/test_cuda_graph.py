"""A recorded loss has the bits of the model's own; without a GPU, the passes are made again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmini.model.gpt import GPT
from gptmini.train import cuda_graph
from gptmini.train.build import choose_loss
from gptmini.train.cuda_graph import WARM_UP_PASSES, RecordedLoss
from gptmini.train.group import SINGLE_PROCESS
from gptmini.train.state import CustomParts
from tests.support import tiny

N_TOKENS = 50


class MadeAgain:
    """Takes the place of `_Recording`: results in the same memory each time, as from a graph."""

    made = 0

    def __init__(self, model: GPT, tokens: Tensor, targets: Tensor) -> None:
        type(self).made += 1
        self.model = model
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.tokens = tokens.clone()
        self.loss: Tensor = torch.empty(())
        self.gradients = [torch.empty_like(each) for each in self.parameters]

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            self.loss = self.model(tokens, targets)
        return self.loss.detach()

    def compute_gradients(self, factor: Tensor) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(self.loss, self.parameters, factor)
        for ours, theirs in zip(self.gradients, gradients, strict=True):
            ours.copy_(theirs)
        return torch._foreach_mul(self.gradients, 1)


def made(**settings: Any) -> GPT:
    torch.manual_seed(0)
    config = tiny(model={"dropout": 0.1, **settings}).with_tokenizer("byte", N_TOKENS)
    return GPT(config.model).train()


def update(
    model: GPT, compute_loss: Callable[..., Tensor], lengths: tuple[int, ...]
) -> list[Tensor]:
    """Add the gradients of micro-batches up; return their losses, and then the gradients."""
    losses = []
    for number, length in enumerate(lengths):
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(N_TOKENS, (2, length + 1), generator=random)
        torch.manual_seed(number)  # for dropout
        loss = compute_loss(tokens[:, :-1], tokens[:, 1:])
        (loss * 2 / 3).backward()
        losses.append(loss.detach())
    return losses + [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("lengths", [(9,) * 5, (9, 9, 9, 5, 9)], ids=["equal", "one is shorter"])
def test_losses_and_gradients_have_the_bits_of_the_model(lengths, monkeypatch):
    monkeypatch.setattr(cuda_graph, "_Recording", MadeAgain)
    MadeAgain.made = 0
    plain = made()
    expected = update(plain, plain, lengths)
    model = made()
    for ours, theirs in zip(update(model, RecordedLoss(model), lengths), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert MadeAgain.made == 1


def test_weights_that_are_frozen_stay_without_gradients(monkeypatch):
    monkeypatch.setattr(cuda_graph, "_Recording", MadeAgain)
    model = made()
    model.embed.requires_grad_(False)
    update(model, RecordedLoss(model), (9,) * 4)
    assert model.embed.weight.grad is None
    assert all(each.grad is not None for each in model.blocks.parameters())


def test_where_nothing_can_be_recorded_there_is_one_warning_and_the_same_loss(capsys):
    plain = made()
    expected = update(plain, plain, (9,) * 5)
    model = made()
    for ours, theirs in zip(update(model, RecordedLoss(model), (9,) * 5), expected, strict=True):
        assert torch.equal(ours, theirs)
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA graph" in line


def test_nothing_is_recorded_where_memory_is_short(monkeypatch, capsys):
    monkeypatch.setattr(cuda_graph, "_Recording", MadeAgain)
    monkeypatch.setattr(cuda_graph.machine, "get_total_memory", lambda _: 1)
    MadeAgain.made = 0
    model = made()
    update(model, RecordedLoss(model), (9,) * (WARM_UP_PASSES + 2))
    assert MadeAgain.made == 0
    assert capsys.readouterr().err == ""


def test_only_what_a_graph_can_repeat_is_recorded():
    model = made()
    cuda = torch.device("cuda")

    def choose(device: torch.device, own: CustomParts) -> Callable[..., Tensor]:
        return choose_loss(model, device, own, SINGLE_PROCESS)

    assert isinstance(choose(cuda, CustomParts()), RecordedLoss)
    assert choose(torch.device("cpu"), CustomParts()) is model
    assert choose(cuda, CustomParts(model=GPT)) is model
    model.gradient_checkpointing = True
    assert choose(cuda, CustomParts()) is model
