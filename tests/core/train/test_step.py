"""A step in float16: the loss is scaled, and a step whose gradients overflow is made again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.errors import CheckpointError, DivergedError
from gptmini.generate.run import load_run
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.train import build, loop, step
from gptmini.train.group import Group
from gptmini.train.state import Training
from tests.support import prepared, tiny, train

CLOCK = {"seconds", "wall_time", "tokens_per_second", "peak_memory"}


@pytest.fixture
def start(text_file: Path, tmp_path: Path):
    """Makes a training at step 0."""

    def make(dtype: str = "float16", **settings: Any) -> Training:
        return prepared(make_config(text_file, dtype, **settings), tmp_path / "run")

    return make


def make_config(text_file: Path, dtype: str = "float16", **settings: Any) -> Config:
    return tiny(
        data={"path": str(text_file)},
        model={"dropout": 0.1},
        train={"dtype": dtype, "micro_batch_size": 2, **settings},
    )


def finish(config: Config, out: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train to the end; returns the metrics, without what a clock said, and the weights."""
    train(config, out)
    lines = [json.loads(line) for line in RunDirectory(out).metrics_file.read_text().splitlines()]
    metrics = [{key: line[key] for key in line.keys() - CLOCK} for line in lines]
    newest = max((out / "checkpoints").glob("step-*"))
    return metrics, safetensors.torch.load_file(newest / "model.safetensors")


@pytest.mark.parametrize(("optimizer", "grad_clip"), [("muon", 1e9), ("adamw", 0.01)])
def test_float16_follows_float32(text_file, tmp_path, optimizer, grad_clip):
    runs = []
    for dtype in ("float16", "float32"):
        config = make_config(text_file, dtype, optimizer=optimizer, grad_clip=grad_clip)
        runs.append(finish(config, tmp_path / dtype))
    for half, single in zip(runs[0][0], runs[1][0], strict=True):
        assert half["train_loss"] == pytest.approx(single["train_loss"], abs=2e-3)
        assert half["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-2)
        assert half["loss_scale"] == 2**16
        assert "loss_scale" not in single
    for name, tensor in runs[1][1].items():
        torch.testing.assert_close(runs[0][1][name], tensor, atol=5e-3, rtol=5e-2)


def test_gradients_too_small_for_float16_are_those_of_float32(start):
    """Each position adds a 16,384th to the loss, as in the batch of a GPU."""
    gradients = []
    for dtype in ("float16", "float32"):
        training = start(dtype)
        whole = GPT.compute_loss
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GPT, "compute_loss", lambda *of, whole=whole: whole(*of) / 16384)
            training.optimizer.step = lambda lr: None  # type: ignore[method-assign]
            loop.train_step(training)
        gradients.append([parameter.grad for parameter in training.model.parameters()])
    for half, single in zip(*gradients, strict=True):
        assert (half - single).norm() < 0.01 * single.norm()


def test_a_step_that_overflows_is_made_again_at_half_the_scale(start, capsys):
    ends = []
    for first_scale in (2.0**16, 2.0**40):
        training = start()
        training.progress.loss_scale = first_scale
        scales = [loop.train_step(training)["loss_scale"]]
        training.progress.step = 1
        scales.append(loop.train_step(training)["loss_scale"])
        ends.append({name: p.detach().clone() for name, p in training.model.named_parameters()})
    assert scales[0] == scales[1]
    assert 2**16 <= scales[0] < 2**40
    said = [line for line in capsys.readouterr().err.splitlines() if "again" in line]
    assert len(said) == 40 - math.log2(scales[0])
    assert said[0] == (
        "step 1: gradients overflow float16; again with the loss scaled by 549,755,813,888"
    )
    for name, tensor in ends[0].items():  # the same dropout, and nothing left of the overflow
        torch.testing.assert_close(ends[1][name], tensor, atol=1e-4, rtol=1e-3)


def test_a_scaled_run_is_resumed_to_the_same_bits(text_file, tmp_path, monkeypatch):
    """The scale doubles after every second step, and overflows now and then."""
    monkeypatch.setattr(step, "LOSS_SCALE_INTERVAL", 2)
    monkeypatch.setattr(build, "FIRST_LOSS_SCALE", 2.0**17)
    config = make_config(text_file, save_every=1)
    whole = finish(config, tmp_path / "whole")
    update = loop.train_step

    def stopping(training: Training) -> dict[str, Any]:
        if training.step == 3:
            raise KeyboardInterrupt
        return update(training)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            finish(config, tmp_path / "stopped")
    stopped = finish(config, tmp_path / "stopped")
    assert len({line["loss_scale"] for line in whole[0]}) > 1
    assert whole[0] == stopped[0]
    assert all(torch.equal(tensor, stopped[1][name]) for name, tensor in whole[1].items())


def test_a_run_that_goes_on_in_another_type_has_its_scale(text_file, tmp_path, monkeypatch):
    config = make_config(text_file, "auto", steps=3)
    for dtype, steps, scale in (("float32", 3, 1), ("float16", 4, 2**16), ("float32", 5, 1)):
        pick = machine.pick_compute
        with monkeypatch.context() as patch:
            patch.setattr(
                "gptmini.plan.settle.pick_compute", lambda device, *_, d=dtype, p=pick: p(device, d)
            )
            finish(config.with_train(steps=steps), tmp_path / "run")
        newest = RunDirectory(tmp_path / "run").load_newest()
        assert newest is not None
        assert newest.state["loss_scale"] == scale


def test_a_checkpoint_of_an_older_version_is_not_resumed(text_file, tmp_path, monkeypatch):
    config = make_config(text_file, "float32", steps=3)

    def save_as_before(progress: Any) -> dict[str, Any]:
        return {key: value for key, value in vars(progress).items() if key != "own_model"}

    with monkeypatch.context() as patch:
        patch.setattr("gptmini.train.checkpoint.asdict", save_as_before)
        finish(config, tmp_path / "run")
    with pytest.raises(CheckpointError, match="own_model"):
        finish(config.with_train(steps=6), tmp_path / "run")
    run = load_run(tmp_path / "run", "cpu")
    assert run.generate("The", max_new_tokens=2)


def test_a_loss_that_is_not_finite_is_not_tried_again(start, monkeypatch):
    training = start()
    whole = GPT.compute_loss
    passes = []

    def broken(*of: Any) -> Any:
        passes.append(1)
        return whole(*of) * math.nan

    monkeypatch.setattr(GPT, "compute_loss", broken)
    with pytest.raises(DivergedError, match="loss nan"):
        loop.train_step(training)
    assert len(passes) == 2  # micro-batches of one step


def test_gradients_that_overflow_at_any_scale_are_divergence(start, monkeypatch):
    training = start()
    training.progress.loss_scale = 8.0
    whole = GPT.compute_loss

    def overflowing(*of: Any) -> Any:
        loss = whole(*of)
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(GPT, "compute_loss", overflowing)
    with pytest.raises(DivergedError, match=r"loss 5\.\d+, gradient norm (nan|inf)"):
        loop.train_step(training)
    assert training.progress.loss_scale == 1


def test_compiling_that_fails_on_one_of_several_processes_is_not_made_good(start):
    """Passes of one process alone would add to sums that the others do not make."""
    training = start("float32")
    training.config = training.config.with_train(compile="on")
    training.group = Group(rank=1, world_size=2)
    n_passes = 0

    def fail(*_: Any) -> torch.Tensor:
        nonlocal n_passes
        n_passes += 1
        raise RuntimeError("no C++ compiler")

    training.compute_loss = fail
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler") as caught:
        step.train_step(training)
    assert n_passes == 1
    assert "train.compile: off" in caught.value.__notes__[0]
    assert training.config.train.compile == "on"
