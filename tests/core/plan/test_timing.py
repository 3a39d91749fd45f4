"""What a run chooses for itself: micro-batches, compiled blocks, sizes and steps for minutes."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.errors import MachineError
from gptmini.model import gpt, kernels
from gptmini.model.gpt import GPT
from gptmini.plan import cost, estimates, settle, timing
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from gptmini.train import build, loop
from tests.core.plan.machines import CPU, GPU, FakeMachine
from tests.support import tiny, train

STATIC = 16  # bytes of a parameter in training


def test_the_micro_batch_divides_the_batch_and_fits():
    config = tiny(train={"batch_size": 12}).with_tokenizer("byte", 257)
    row = 1000
    static = STATIC * cost.count_parameters(config.model)
    for rows, expected in ((1000, 12), (11, 6), (5, 4), (3, 3), (0, 1)):
        machine = FakeMachine(memory=static + 2 * rows * row, row=row)
        assert timing.choose_micro_batch_size(config, machine, [1]) == expected
    assert timing.choose_micro_batch_size(config, FakeMachine(), [1]) == 12
    small = replace(estimates.CPU, max_tokens_per_pass=4 * config.seq_len)
    assert timing.choose_micro_batch_size(config, FakeMachine(figures=small), [1]) == 4
    assert timing.choose_micro_batch_size(config, FakeMachine(GPU), [1]) == 12


SMOLLM2 = {
    "n_layer": 30,
    "n_head": 9,
    "d_model": 576,
    "head_dim": 64,
    "d_ff": 1536,
    "vocab_size": 49152,
    "attention": {"variant": "gqa", "n_kv_head": 3, "qk_norm": False},
    "norm": "rmsnorm",
    "activation": "swiglu",
    "tie_embeddings": True,
    "context_length": 256,
}


def test_a_few_rows_of_a_large_model_are_one_pass():
    """Four of SmolLM2-135M, with 16 GB."""
    config = tiny(model=SMOLLM2, train={"batch_size": 4, "optimizer": "adamw"})
    assert timing.choose_micro_batch_size(config, FakeMachine(memory=16_000_000_000), [1]) == 4


class Clock:
    """Passes take the seconds that a function states, by the rows and the threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int], float]):
        self.now = 0.0
        self.passes: list[tuple[int, int]] = []  # rows and threads
        loss = GPT.compute_loss

        def slow(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.passes.append((len(tokens), torch.get_num_threads()))
            self.now += seconds(*self.passes[-1])
            return loss(model, tokens, targets)

        monkeypatch.setattr(GPT, "compute_loss", slow)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


@dataclass(frozen=True)
class PredictableMachine(timing.Machine):
    """Predicts that a row takes so many seconds."""

    row: float = 0.01

    def predict_step(self, config: Config) -> float:
        return config.train.batch_size * self.row


@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_batch_takes_the_time_of_its_micro_batches(monkeypatch, size):
    clock = Clock(monkeypatch, lambda rows, _: 0.03 * rows)
    train = {"batch_size": 6, "micro_batch_size": size}
    config = tiny(train=train).with_tokenizer("byte", 257)
    machine = PredictableMachine(CPU).measure(config)
    assert machine.estimate_seconds_per_step(config) == pytest.approx(0.18)
    assert clock.passes == 3 * [(size, 1)]
    assert machine.measure(config) is machine


def test_a_few_rows_are_measured_and_once_where_those_take_long(monkeypatch):
    clock = Clock(monkeypatch, lambda rows, _: 3.0 * rows)
    config = tiny(train={"batch_size": 64}).with_tokenizer("byte", 257)
    machine = PredictableMachine(CPU).measure(config)
    assert clock.passes == 2 * [(15, 1)]  # 0.15 s by prediction
    assert machine.slowness == pytest.approx(300)


@pytest.mark.parametrize(
    ("busy", "threads", "warned"), [(1.0, 2, False), (1.6, 2, False), (4.0, 1, True)]
)
def test_one_thread_computes_where_all_are_slower(monkeypatch, capsys, busy, threads, warned):
    """Two threads take half the time of one on a quiet machine."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    try:
        clock = Clock(monkeypatch, lambda rows, n: rows * (0.02 if n == 1 else 0.01 * busy))
        config = tiny(train={"batch_size": 8}).with_tokenizer("byte", 257)
        machine = PredictableMachine(CPU).measure(config)
        assert torch.get_num_threads() == 2  # in training alone it is another
    finally:
        torch.set_num_threads(1)
    assert machine.compute.threads == threads
    assert [n for _, n in clock.passes] == [1, 2, 1, 2, 1]
    seconds = 0.16 if threads == 1 else 0.08 * busy
    assert machine.estimate_seconds_per_step(config) == pytest.approx(seconds)
    assert ("  threads   1: a step takes 0.16 s" in capsys.readouterr().err) == warned


def test_a_run_keeps_its_threads(monkeypatch, text_file, tmp_path):
    config = tiny(data={"path": str(text_file)}, train={"steps": 2})
    run = train_compiled(config, "off", tmp_path / "run")
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    try:
        plan = make_plan(config.with_train(steps=3, compile="off"), run)
        with plan.machine.compute.enter_training():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("chosen", ["environment", "one", "processes"])
def test_threads_that_were_chosen_stay(monkeypatch, chosen):
    if chosen != "environment":
        monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(1 if chosen == "one" else 2)
    try:
        clock = Clock(monkeypatch, lambda rows, n: float(rows * n))
        config = tiny().with_tokenizer("byte", 257)
        machine = PredictableMachine(CPU, 2 if chosen == "processes" else 1).measure(config)
    finally:
        torch.set_num_threads(1)
    assert machine.compute.threads is None
    assert len({n for _, n in clock.passes}) == 1


def test_the_peak_of_an_accelerator_is_not_that_of_timing(monkeypatch, text_file, tmp_path):
    given_back: list[torch.device] = []
    monkeypatch.setattr(settle, "release_freed_memory", given_back.append)
    plan = make_plan(tiny(data={"path": str(text_file)}), None)
    assert given_back == [plan.machine.compute.device]


@pytest.mark.parametrize("setting", ["on", "auto"])
def test_a_broken_compiler_leaves_a_run_without_it(
    setting, monkeypatch, capsys, text_file, tmp_path
):
    def broken(*_: Any) -> float:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(timing, "has_compiler", lambda: True)
    monkeypatch.setattr(timing, "_choose_compiler_options", lambda _: None)
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
    monkeypatch.setattr(timing, "undo_compiling", lambda _: hooks[0].remove())
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


def test_a_compiled_run_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr(timing, "has_compiler", lambda: False)
    model = GPT(tiny().with_tokenizer("byte", 257).model)
    with pytest.raises(MachineError, match="no C\\+\\+ compiler found; use auto or off"):
        timing.compile_blocks(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_accelerator_compiles_the_loss_with_the_blocks(compiled, monkeypatch):
    compilers = {}
    monkeypatch.setattr(timing, "has_compiler", lambda: True)
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compilers.setdefault(function, function.__call__)
    )
    monkeypatch.setattr(gpt, "fuses_head_and_loss", lambda _: True)
    monkeypatch.setattr(gpt, "linear_cross_entropy", lambda *arguments: arguments[-1])
    model = GPT(tiny().with_tokenizer("byte", 257).model)
    plain = kernels.softmax_
    if compiled:
        timing.compile_blocks(model)
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
        timing.compile_blocks(model)
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


def test_time_follows_from_the_operations_at_the_speed_of_a_product(monkeypatch):
    monkeypatch.setattr(timing, "measure_product_speed", lambda *_: 1e10)
    cpu = machine.pick_compute("cpu", "float32")
    config = tiny(train={"batch_size": 8, "optimizer": "adamw"}).with_tokenizer("byte", 257)
    flops = 8 * 16 * cost.count_training_flops(config.model, 16)
    assert timing.predict_seconds_per_step(config, cpu) == pytest.approx(flops / 5e9)
    muon = config.with_train(optimizer="muon")
    assert timing.predict_seconds_per_step(muon, cpu) > flops / 5e9


def test_the_speed_of_a_product_is_that_of_this_machine():
    cpu = machine.pick_compute("cpu", "float32")
    assert timing.measure_product_speed(32, 128, 64, cpu) > 1e6
