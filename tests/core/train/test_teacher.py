"""Learning from a trained run: the loss, and which runs may teach."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import gptmini
from gptmini.errors import CheckpointError, ConfigError
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.train.teacher import TeacherLoss
from tests.support import TINY, new_cache, tiny


@pytest.fixture
def settings(text_file: Path) -> dict:
    return {**TINY, "data": {"path": str(text_file)}}


def test_half_is_learned_from_the_text_and_half_from_the_teacher():
    torch.manual_seed(0)
    config = tiny(model={**TINY["model"], "vocab_size": 11}).model
    model, teacher = GPT(config), GPT(config)
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(0, 11, (2, 6))
    targets = torch.randint(0, 11, (2, 6))
    targets[1, 2:4] = -100
    logits = model(tokens).flatten(0, 1)
    counted = targets.flatten() >= 0
    probabilities = teacher(tokens).flatten(0, 1).softmax(-1)
    of_text = cross_entropy(logits[counted], targets.flatten()[counted], reduction="sum")
    of_teacher = cross_entropy(logits[counted], probabilities[counted].detach(), reduction="sum")
    expected = (of_text + of_teacher) / 2 / targets.numel()
    gradients = torch.autograd.grad(expected, [*model.parameters()], retain_graph=True)

    loss = TeacherLoss(model, teacher)(tokens, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, [*model.parameters()]), gradients)


def test_a_run_learns_from_its_teacher_and_is_resumed_to_the_same_bits(settings, tmp_path):
    cache = new_cache(tmp_path)
    teacher = RunDirectory(gptmini.fit(settings, tmp_path / "teacher", cache).path)
    alone = gptmini.fit(settings, tmp_path / "alone", cache)
    taught = settings | {"teacher": {"run": str(teacher.path)}}

    def train(name: str, steps: int) -> gptmini.Run:
        train = settings["train"] | {"steps": steps}
        return gptmini.fit(
            taught | {"train": train}, tmp_path / name, cache, schedule=lambda step: 1e-3
        )

    whole = train("whole", 6)
    assert whole.config.teacher.sha256 == teacher.find_best().sha256
    assert not torch.equal(whole.model.embed.weight, alone.model.embed.weight)
    train("stopped", 4)
    train("stopped", 6)
    first, second = (RunDirectory(tmp_path / name).load_newest() for name in ("whole", "stopped"))
    assert all(torch.equal(first.model[name], second.model[name]) for name in first.model)

    longer = settings["train"] | {"steps": 12}
    gptmini.fit(settings | {"train": longer}, teacher.path, cache)  # other weights
    assert teacher.find_best().sha256 != whole.config.teacher.sha256
    with pytest.raises(CheckpointError, match=str(teacher.path)):
        train("whole", 8)
    with pytest.raises(ConfigError, match=r"teacher\.run"):  # to go on without it is another run
        gptmini.fit(settings, tmp_path / "stopped", cache)


def test_a_teacher_that_does_not_fit_is_refused(settings, tmp_path):
    cache = new_cache(tmp_path)
    teacher = gptmini.fit(settings, tmp_path / "teacher", cache)
    taught = settings | {"teacher": {"run": str(teacher.path)}}
    longer = settings["model"] | {"context_length": 2 * teacher.config.model.context_length}
    for changed, key in (
        ({"tokenizer": {"kind": "char"}}, r"teacher\.run.*tokenizer\.kind"),
        ({"model": longer}, r"teacher\.run.*train\.seq_len"),
        ({"teacher": {"run": str(teacher.path), "sha256": "ab"}}, r"teacher\.sha256"),
    ):
        with pytest.raises(ConfigError, match=key):
            gptmini.fit(taught | changed, tmp_path / "run", cache)
    with pytest.raises(ConfigError, match=r"teacher\.run"):
        gptmini.fit(taught, tmp_path / "run", cache, loss=lambda model, x, y: model(x, y))
    with pytest.raises(CheckpointError, match="missing"):
        gptmini.fit(taught | {"teacher": {"run": "missing"}}, tmp_path / "run", cache)
    assert not (tmp_path / "run").exists()
