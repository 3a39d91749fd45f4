"""Compiled blocks: the same gradients, and runs that go on without them if they fail."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.errors import MachineError
from gptmini.model import compile, gpt, kernels
from gptmini.model.compile import compile_blocks
from gptmini.model.gpt import GPT
from gptmini.plan import timing
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from gptmini.train import build, loop, step
from tests.support import tiny, train


@pytest.mark.parametrize("setting", ["on", "auto"])
def test_a_broken_compiler_leaves_a_run_without_it(
    setting, monkeypatch, capsys, text_file, tmp_path
):
    def broken(*_: Any) -> float:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(machine, "has_compiler", lambda: True)
    monkeypatch.setattr(timing, "has_compiler", lambda: True)
    monkeypatch.setattr(compile, "_choose_compiler_options", lambda _: None)
    monkeypatch.setattr(timing, "MIN_SECONDS_TO_COMPILE", 0.0)
    config = tiny(data={"path": str(text_file)}, train={"steps": 3})
    plain = train_without_compiling(config, tmp_path / "plain")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: broken)
        run = train_compiled(config, setting, tmp_path / "run")
    assert capsys.readouterr().err.count("  compile   off: it failed (no C++ compiler)\n") == 1
    assert run.load_config().train.compile == "off"
    assert run.read_newest_state()["compile"] == "off"
    assert all(torch.equal(plain[name], each) for name, each in load_weights(run).items())


def test_compiled_gradients_that_are_not_finite_are_not_used(
    monkeypatch, capsys, text_file, tmp_path
):
    hooks = []

    def spoil(model: GPT) -> None:
        weight = model.blocks[0].attn.k_proj.weight
        spoiled = torch.tensor([3])
        hook = weight.register_hook(lambda gradient: gradient.index_fill(0, spoiled, torch.nan))
        hooks.append(hook)

    config = tiny(data={"path": str(text_file)}, train={"steps": 3})
    plain = train_without_compiling(config, tmp_path / "plain")
    monkeypatch.setattr(build, "compile_blocks", spoil)
    monkeypatch.setattr(step, "undo_compiling", lambda _: hooks[0].remove())
    run = train_compiled(config, "on", tmp_path / "run")
    assert "  compile   off: it computes gradients that are not finite\n" in capsys.readouterr().err
    assert all(torch.equal(plain[name], each) for name, each in load_weights(run).items())


def train_without_compiling(config: Config, out: Path) -> dict[str, torch.Tensor]:
    return load_weights(train_compiled(config, "off", out))


def train_compiled(config: Config, setting: str, out: Path) -> RunDirectory:
    run = RunDirectory(out)
    loop.train(make_plan(config.with_train(compile=setting), run), out)
    return run


def load_weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    checkpoint = run.load_newest()
    assert checkpoint is not None
    return checkpoint.model


def test_a_compiled_run_without_a_compiler_says_so(monkeypatch, text_file, tmp_path):
    monkeypatch.setattr(machine, "has_compiler", lambda: False)
    config = tiny(data={"path": str(text_file)}, train={"compile": "on"})
    with pytest.raises(MachineError, match="no C\\+\\+ compiler found; use auto or off"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("compiled", [False, True])
def test_an_accelerator_compiles_the_loss_with_the_blocks(compiled, monkeypatch):
    compilers = {}
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compilers.setdefault(function, function.__call__)
    )
    monkeypatch.setattr(gpt, "fuses_head_and_loss", lambda _: True)
    monkeypatch.setattr(gpt, "linear_cross_entropy", lambda *arguments: arguments[-1])
    model = GPT(tiny().with_tokenizer("byte", 257).model)
    plain = kernels.softmax_
    if compiled:
        compile_blocks(model)
    fast = compilers.get(plain)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert model(tokens, tokens) is (fast if compiled else plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch's own
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_gradients_of_heads_of_64_are_right():
    """g++ 11 and 12 lost half the stores with AVX512; other code passes with any flags."""
    shape = {"n_layer": 1, "d_model": 128, "n_head": 2, "context_length": 64}
    config = tiny(model=shape).with_tokenizer("byte", 257)
    tokens = torch.arange(128).view(2, 64)
    eager, compiled = (_compute_gradients(config, tokens, compiled) for compiled in (False, True))
    for name, expected in eager.items():
        error = (compiled[name] - expected).norm() / expected.norm()
        assert error < 0.05, name  # NaN is not


def _compute_gradients(
    config: Config, tokens: torch.Tensor, compiled: bool
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(config.model).train()
    if compiled:
        compile_blocks(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens.roll(-1))
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch's own
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_compiled_run_learns_the_same_and_goes_on_to_the_same_bits(
    text_file: Path, tmp_path: Path, monkeypatch
):
    def run(name: str, compile: str = "on", dropout: float = 0.1) -> dict[str, torch.Tensor]:
        settings = {"compile": compile, "dtype": "float32"}
        config = tiny(data={"path": str(text_file)}, model={"dropout": dropout}, train=settings)
        train(config, tmp_path / name)
        found = RunDirectory(tmp_path / name).load_newest()
        assert found is not None
        return found.model

    whole = run("whole")
    with monkeypatch.context() as patch:
        update = loop.train_step

        def stop(training: Any) -> Any:
            if training.step == 4:
                raise KeyboardInterrupt
            return update(training)

        patch.setattr(loop, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            run("stopped")
    again = run("stopped")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    plain = run("plain", "off", 0.0)
    compiled = run("compiled", "on", 0.0)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, atol=2e-4, rtol=1e-3)
