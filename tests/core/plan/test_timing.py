"""What a run chooses for itself: micro-batches, compiled blocks, sizes and steps for minutes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.model.gpt import GPT
from gptmini.plan import cost, estimates, settle, timing
from gptmini.plan.settle import make_plan
from gptmini.plan.timing import Machine
from gptmini.runs.directory import RunDirectory
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
class PredictableMachine(Machine):
    """Predicts that a row takes so many seconds, with one thread twice as many."""

    row: float = 0.01

    def predict_step(self, config: Config) -> float:
        return config.train.batch_size * self.row * (2 if self.compute.threads == 1 else 1)


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
    assert (
        "  threads   1 of 2 CPU threads, as steps are faster with one\n" in capsys.readouterr().err
    ) == warned


def test_a_run_keeps_its_threads(monkeypatch, text_file, tmp_path):
    config = tiny(data={"path": str(text_file)}, train={"steps": 2})
    run = RunDirectory(tmp_path / "run")
    train(config, run.path)
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


def test_time_follows_from_the_operations_at_the_speed_of_a_product(monkeypatch):
    monkeypatch.setattr(timing, "measure_product_speed", lambda *_: 1e10)
    cpu = machine.pick_compute("cpu", "float32")
    config = tiny(train={"batch_size": 8, "optimizer": "adamw"}).with_tokenizer("byte", 257)
    flops = 8 * 16 * cost.count_training_flops(config.model, 16)
    assert Machine(cpu).predict_step(config) == pytest.approx(flops / 5e9)
    muon = config.with_train(optimizer="muon")
    assert Machine(cpu).predict_step(muon) > flops / 5e9


def test_the_speed_of_a_product_is_that_of_this_machine():
    cpu = machine.pick_compute("cpu", "float32")
    assert timing.measure_product_speed(32, 128, 64, cpu) > 1e6
