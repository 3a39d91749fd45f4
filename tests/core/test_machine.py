"""Devices, memory and names of the machine, with accelerators that are not here."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

from gptmini import machine
from gptmini.cli.evaluate import evaluate as cli_evaluate
from gptmini.cli.score import score as cli_score
from gptmini.errors import ConfigError, MachineError
from gptmini.generate import run as run_module
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.plan import timing
from gptmini.train import evaluate_run, loop, validate
from tests.support import tiny, train


def have(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Pretend that this machine has an accelerator, or none."""
    device = None if name is None else torch.device(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)


@pytest.mark.parametrize("found", ["cuda", "mps", "xpu"])
def test_auto_takes_the_accelerator_that_is_here(found, monkeypatch):
    have(monkeypatch, found)
    assert machine.pick_device("auto").type == found
    assert machine.pick_device(found).type == found
    assert machine.pick_device("cpu").type == "cpu"
    for other in {"cuda", "mps", "xpu"} - {found}:
        with pytest.raises(MachineError, match=f"no such device found; use auto, {found} or cpu"):
            machine.pick_device(other)


def test_without_an_accelerator_the_cpu_is_all_there_is(monkeypatch):
    have(monkeypatch, None)
    assert machine.pick_device("auto").type == "cpu"
    with pytest.raises(MachineError, match="--device mps: no such device found; use auto or cpu"):
        machine.pick_device("mps")
    have(monkeypatch, "hpu")  # one that gptmini does not know
    assert machine.pick_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="unknown; use auto, cpu, cuda, mps or xpu"):
        machine.pick_device("hpu")


def test_a_small_model_generates_on_the_cpu_where_it_can_be_compiled(monkeypatch):
    model = GPT(tiny().with_tokenizer("byte", 257).model)
    have(monkeypatch, "cuda")
    monkeypatch.setattr(run_module, "find_compiler", lambda *names: "/usr/bin/g++")
    assert run_module._pick_device("auto", model).type == "cpu"
    assert run_module._pick_device("cuda", model).type == "cuda"
    monkeypatch.setattr(run_module, "MIN_PARAMETERS_FOR_GPU", 1000)
    assert run_module._pick_device("auto", model).type == "cuda"
    monkeypatch.undo()
    have(monkeypatch, "cuda")
    monkeypatch.setattr(run_module, "find_compiler", lambda *names: None)
    assert run_module._pick_device("auto", model).type == "cuda"


def test_a_small_model_is_evaluated_on_the_gpu(monkeypatch, tmp_path):
    """Evaluating reads many tokens at a time, which a GPU does faster for every model."""
    path = tmp_path / "run"
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").touch()
    have(monkeypatch, "cuda")
    devices = []

    def load_run(path: object, device: str = "auto", *_: object, **settings: object) -> None:
        devices.append(device)
        raise InterruptedError

    for module in (run_module, evaluate_run):
        monkeypatch.setattr(module, "load_run", load_run)
    options = {"weights": "float32", "device": "auto", "as_json": False}
    with pytest.raises(InterruptedError):
        evaluate_run.evaluate_text(path)
    with pytest.raises(InterruptedError):
        cli_evaluate(path, None, None, 16, "validation", **options)
    with pytest.raises(InterruptedError):
        cli_score(path, "a", None, **options)
    assert devices == ["cuda"] * 3


# -- how torch computes in training ----------------------------------------------------------------


def get_numerics() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend that this machine has a GPU by NVIDIA, which nothing has used."""
    have(monkeypatch, "cuda")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("device", "deterministic", "within"),
    [
        ("cpu", False, (False, False, True, "highest")),
        ("cuda", False, (False, False, True, "high")),
        ("cuda", True, (True, False, False, "high")),
        ("xpu", True, (True, False, False, "highest")),
    ],
)
def test_training_sets_how_torch_computes_and_restores_it(device, deterministic, within):
    compute = Compute(torch.device(device), torch.float32, deterministic)
    before = get_numerics()
    with pytest.raises(InterruptedError), compute.enter_training():
        assert get_numerics() == within
        with machine.allow_varying_algorithms():
            assert not torch.are_deterministic_algorithms_enabled()
        assert get_numerics() == within
        raise InterruptedError
    assert get_numerics() == before


def test_what_the_caller_had_set_is_kept():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    before = get_numerics()
    try:
        with Compute(torch.device("cuda"), torch.float32, True).enter_training():
            assert get_numerics() == (True, False, False, "high")
        assert get_numerics() == before
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


def test_runs_and_timings_compute_alike_and_evaluations_in_full(monkeypatch, tmp_path):
    """Only what trains, or times training, enters the numerics of training."""
    inside = []
    entered = Compute.enter_training

    @contextmanager
    def enter(compute: Compute) -> Iterator[None]:
        inside.append(compute)
        with entered(compute):
            yield
        inside.pop()

    seen: dict[str, set[int]] = {}

    def note(module: object, name: str) -> None:
        whole = getattr(module, name)

        def noting(*inputs: object, **settings: object) -> object:
            seen.setdefault(f"{module.__name__}.{name}", set()).add(len(inside))
            return whole(*inputs, **settings)

        monkeypatch.setattr(module, name, noting)

    monkeypatch.setattr(Compute, "enter_training", enter)
    (tmp_path / "text.txt").write_text("a text. " * 200)
    config = tiny(train={"steps": 1}, data={"path": str(tmp_path / "text.txt")})
    note(GPT, "compute_loss")
    note(loop, "train_step")
    note(validate, "evaluate")
    note(evaluate_run, "evaluate")
    train(config.with_train(compile="auto"), tmp_path / "run")
    here = timing.Machine(machine.pick_compute("cpu", "float32"))
    here.measure(config.with_tokenizer("byte", 257))
    evaluate_run.evaluate_text(tmp_path / "run")
    assert seen == {
        "GPT.compute_loss": {1},
        "gptmini.train.loop.train_step": {1},
        "gptmini.train.validate.evaluate": {1},
        "gptmini.train.evaluate_run.evaluate": {0},
    }


def test_auto_is_deterministic_on_nvidias_gpus_where_cublas_can_be(gpu):
    assert machine.pick_compute("cuda", "auto").deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert machine.pick_compute("cuda", "auto", "on").deterministic
    assert not machine.pick_compute("cuda", "auto", "off").deterministic
    assert not machine.pick_compute("cpu", "auto", "on").deterministic  # it always is
    gpu.setattr(torch.version, "hip", "7.0")
    assert not machine.pick_compute("cuda", "auto").deterministic
    assert machine.pick_compute("cuda", "auto", "on").deterministic
    have(gpu, "mps")
    assert not machine.pick_compute("mps", "auto").deterministic
    assert machine.pick_compute("mps", "auto", "on").deterministic


def test_a_gpu_in_use_is_deterministic_only_if_cublas_was_told_before(gpu):
    gpu.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not machine.pick_compute("cuda", "auto").deterministic
    with pytest.raises(MachineError, match="must be :4096:8 before this process uses the GPU"):
        machine.pick_compute("cuda", "auto", "on")
    gpu.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert machine.pick_compute("cuda", "auto").deterministic


@pytest.mark.parametrize(
    ("has_bfloat16", "capability", "dtype"),
    [
        (True, (8, 0), torch.bfloat16),
        (False, (7, 5), torch.float16),  # T4
        (False, (7, 0), torch.float16),  # V100
        (False, (6, 1), torch.float32),  # slow at float16
    ],
)
def test_auto_takes_the_type_that_the_gpu_multiplies_fast(gpu, has_bfloat16, capability, dtype):
    gpu.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    gpu.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert machine.pick_compute("cuda", "auto").dtype == dtype
    assert machine.pick_compute("cuda", "float16").dtype == torch.float16


PEAK = """
import sys, torch
from gptmini import machine
cpu = torch.device("cpu")
before = machine.get_peak_memory(cpu)
block = bytearray(200 << 20)
del block
print(before, machine.get_peak_memory(cpu), machine.get_resident_memory(cpu))
"""


def test_peak_memory_is_that_of_this_process_and_not_of_its_parent():
    block = bytearray(400 << 20)  # makes the peak of this process larger than the child's
    words = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True
    ).stdout.split()
    del block
    before, peak, now = map(int, words)
    assert peak - before == pytest.approx(200 << 20, rel=0.1)
    assert now < before + (50 << 20)
    assert machine.get_total_memory(torch.device("cpu")) == psutil.virtual_memory().total


def test_peak_memory_is_known_where_the_system_keeps_no_peak(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine.Path, "read_text", lambda path: "Name: gptmini\nVmRSS:\t1 kB\n")
    assert machine.get_peak_memory(cpu) >= psutil.Process().memory_info().rss / 2
