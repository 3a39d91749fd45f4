"""What a run chooses for itself: micro-batches, compiled blocks, sizes and steps for minutes."""

import math
import shutil
from dataclasses import replace
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
from gptmini.train import loop
from tests.core.plan.machines import CPU, GPU, FakeMachine, taking
from tests.support import tiny, train

STATIC = 16  # bytes of a parameter in training


def test_the_micro_batch_divides_the_batch_and_fits():
    config = tiny(train={"batch_size": 12}).with_tokenizer("byte", 257)
    row = 1000
    static = STATIC * cost.count_parameters(config.model)
    for rows, expected in ((1000, 12), (11, 6), (5, 4), (3, 3), (0, 1)):
        machine = FakeMachine(memory=static + 2 * rows * row, row=row)
        assert timing.choose_micro_batch_size(config, machine) == expected
    assert timing.choose_micro_batch_size(config, FakeMachine()) == 12
    small = replace(estimates.CPU, max_tokens_per_pass=4 * config.seq_len)
    assert timing.choose_micro_batch_size(config, FakeMachine(figures=small)) == 4
    assert timing.choose_micro_batch_size(config, FakeMachine(GPU)) == 12


@pytest.mark.parametrize(("batch_size", "expected"), [(64, 8), (24, 3), (12, 3), (2, 1), (7, 7)])
def test_exact_has_the_same_micro_batch_on_1_to_8_processes(batch_size, expected):
    config = tiny(train={"batch_size": batch_size, "reduce": "exact"}).with_tokenizer("byte", 257)
    numbers = [n for n in (1, 2, 4, 8) if batch_size % n == 0]
    for n in numbers:
        assert timing.choose_micro_batch_size(config, FakeMachine(world_size=n)) == expected
    fast = config.with_train(reduce="fast")
    shares = [batch_size // n for n in numbers]
    found = [timing.choose_micro_batch_size(fast, FakeMachine(world_size=n)) for n in numbers]
    assert found == shares
    static = STATIC * cost.count_parameters(config.model)
    row = static // 8
    for most in numbers:  # so many processes fit, each with two rows
        memory = most * static + 4 * row
        machines = [FakeMachine(world_size=n, memory=memory, row=row) for n in numbers]
        sizes = {timing.choose_micro_batch_size(config, machine) for machine in machines}
        assert sizes == {2 if expected % 2 == 0 else 1}


def test_sharded_processes_hold_one_model_together_and_have_room_for_more_rows():
    train = {"batch_size": 16, "reduce": "fast"}
    config = tiny(train=train).with_tokenizer("byte", 257)
    sharded = config.with_train(shard=True)
    static = STATIC * cost.count_parameters(config.model)
    row = static // 4
    # Twice the rows that fit into half of what 2 whole models, or one in two shards, leave free.
    machine = FakeMachine(world_size=2, memory=2 * static + 2 * row, row=row)
    assert timing.choose_micro_batch_size(config, machine) == 1
    assert timing.choose_micro_batch_size(sharded, machine) == 2
    roomy = replace(machine, memory=static + 8 * row)
    assert timing.choose_micro_batch_size(sharded, roomy) == 4


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
    assert timing.choose_micro_batch_size(config, FakeMachine(memory=16_000_000_000)) == 4


@pytest.mark.parametrize(("limit", "passes"), [(1.5, 2), (100.0, 3)])
def test_timing_repeats_nothing_after_its_limit(monkeypatch, limit, passes):
    """By this clock a pass takes a second, an update none."""
    now = 0.0
    made = 0

    def slow(*given: Any) -> torch.Tensor:
        nonlocal now, made
        now += 1
        made += 1
        return loss(*given)

    loss = GPT.compute_loss
    monkeypatch.setattr(GPT, "compute_loss", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    config = tiny().with_tokenizer("byte", 257)
    assert timing.Machine(CPU).time_step(config, limit=limit).passes == 1
    assert made == passes


def test_a_batch_takes_the_time_of_its_micro_batches(monkeypatch):
    """By this clock a row takes a second in each pass."""
    now = 0.0

    def slow(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += len(tokens)
        return loss(model, tokens, targets)

    loss = GPT.compute_loss
    monkeypatch.setattr(GPT, "compute_loss", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    for size in (1, 2, 6):
        train = {"batch_size": 6, "micro_batch_size": size}
        config = tiny(train=train).with_tokenizer("byte", 257)
        assert timing.Machine(CPU).time_step(config) == timing.StepTime(6.0, 0.0)


def test_the_peak_of_an_accelerator_is_not_that_of_timing(monkeypatch, text_file, tmp_path):
    given_back: list[torch.device] = []
    monkeypatch.setattr(settle, "release_freed_memory", given_back.append)
    plan = make_plan(tiny(data={"path": str(text_file)}), None)
    assert given_back == [plan.machine.compute.device]


def test_a_step_that_was_timed_is_not_timed_again():
    known = timing.StepTime(0.1, 0.0)
    config = tiny(train={"steps": 100})
    assert timing.try_compile(config, FakeMachine(compiler=True), known) == (False, known)


@pytest.mark.parametrize(
    ("requested", "seconds", "compiled"),
    [
        ("auto", [0.1], False),  # too short a run
        ("auto", [2.0, 2.0, 1.0], True),
        ("auto", [2.0, 2.0, 2.1], False),  # slower
        ("on", [0.1, 0.1, 0.2], True),
        ("off", [], False),
    ],
)
def test_blocks_are_compiled_if_it_pays(requested, seconds, compiled):
    machine = FakeMachine(step=taking(*seconds), compiler=True)
    config = tiny(train={"compile": requested, "steps": 200}).with_tokenizer("byte", 257)
    assert timing.try_compile(config, machine)[0] == compiled
    assert len(machine.timed) == len(seconds)
    assert math.inf not in machine.limits[:1]
    assert all(limit == math.inf for limit in machine.limits[1:])  # once it matters, exactly


def test_compiling_is_not_tried_where_it_takes_what_is_left_of_the_minutes():
    machine = FakeMachine(step=taking(2.0), compiler=True)
    config = tiny(train={"minutes": 1.0, "steps": 100}).with_tokenizer("byte", 257)
    assert not timing.try_compile(config, machine)[0]
    assert len(machine.timed) == 1


def test_compiling_is_tried_on_the_rows_of_one_process(capsys):
    config = tiny(train={"batch_size": 12, "steps": 200})
    slow = FakeMachine(world_size=4, step=taking(2.0, 2.0, 1.0), compiler=True)
    _, timed = timing.try_compile(config, slow)
    assert [share.train.batch_size for share in slow.timed] == [3, 3, 3]
    assert timed == timing.StepTime(1.0, 0.0)
    known = FakeMachine(world_size=4, step=taking(1.0), compiler=True)
    timing.try_compile(config, known, timing.StepTime(8.0, 1.0))  # of all passes
    assert [share.train.batch_size for share in known.timed] == [3]
    assert "  compile   on: 1.000 s/step compiled, 2.000 without\n" in capsys.readouterr().err


def test_a_broken_compiler_is_an_error_only_where_compiling_was_asked_for(monkeypatch, capsys):
    def broken(*_: Any) -> float:
        raise RuntimeError("no C++ compiler\nand a long story")

    config = tiny(train={"steps": 100}).with_tokenizer("byte", 257)
    monkeypatch.setattr(timing, "has_compiler", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    monkeypatch.setattr(timing, "is_worth_compiling", lambda *_: True)
    compiled, timed = timing.try_compile(config, timing.Machine(CPU))
    assert not compiled
    assert timed is not None
    assert "  compile   off: it failed (no C++ compiler)\n" in capsys.readouterr().err
    with pytest.raises(MachineError, match=r"train\.compile: no C\+\+ compiler; use auto or off"):
        timing.try_compile(config.with_train(compile="on"), timing.Machine(CPU))


def test_compiled_gradients_that_are_not_finite_are_not_used(monkeypatch, capsys):
    def spoil(model: GPT) -> None:
        weight = model.blocks[0].attn.k_proj.weight
        weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan))

    monkeypatch.setattr(timing, "compile_blocks", spoil)
    monkeypatch.setattr(timing, "is_worth_compiling", lambda *_: True)
    config = tiny(train={"compile": "auto"}).with_tokenizer("byte", 257)
    assert not timing.try_compile(config, timing.Machine(CPU))[0]
    assert "gradients" in capsys.readouterr().err
    with pytest.raises(MachineError, match=r"train\.compile"):
        timing.try_compile(config.with_train(compile="on"), timing.Machine(CPU))


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
    assert timing.measure_product_speed(tiny(), 64, cpu) > 1e6
