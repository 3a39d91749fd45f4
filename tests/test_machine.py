"""Devices, memory and names of the machine, with accelerators that are not here."""

import ctypes
import subprocess
import sys

import psutil
import pytest
import torch

from gptmini import machine
from gptmini.analysis import evaluate, measure
from gptmini.cli.evaluate import evaluate as cli_evaluate
from gptmini.cli.score import score as cli_score
from gptmini.errors import ConfigError, MachineError
from gptmini.generate import run as run_module
from gptmini.model.gpt import GPT
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


def test_a_small_model_generates_on_the_cpu_where_it_can_be_compiled(monkeypatch, tmp_path):
    model = GPT(tiny().with_tokenizer("byte", 257).model)
    have(monkeypatch, "cuda")
    monkeypatch.setattr(run_module, "build_library", lambda cache: ctypes.CDLL(None))
    assert run_module._pick_device("auto", model, tmp_path).type == "cpu"
    assert run_module._pick_device("cuda", model, tmp_path).type == "cuda"
    monkeypatch.setattr(run_module, "MIN_PARAMETERS_FOR_GPU", 1000)
    assert run_module._pick_device("auto", model, tmp_path).type == "cuda"
    monkeypatch.undo()
    have(monkeypatch, "cuda")
    monkeypatch.setattr(run_module, "build_library", lambda cache: None)
    assert run_module._pick_device("auto", model, tmp_path).type == "cuda"


def test_a_small_model_is_evaluated_on_the_gpu(monkeypatch, tmp_path):
    """Evaluating reads many tokens at a time, which a GPU does faster for every model."""
    (tmp_path / "text.txt").write_text("a text. " * 200)
    path = tmp_path / "run"
    config = tiny(train={"steps": 1}, data={"path": str(tmp_path / "text.txt")})
    train(config, path, tmp_path / "cache")
    have(monkeypatch, "cuda")
    devices = []

    def load_run(path: object, device: str = "auto", *_: object, **settings: object) -> None:
        devices.append(device)
        raise InterruptedError

    for module in (run_module, evaluate, measure):
        monkeypatch.setattr(module, "load_run", load_run)
    options = {"weights": "float32", "device": "auto", "as_json": False}
    with pytest.raises(InterruptedError):
        evaluate.evaluate_text(path)
    with pytest.raises(InterruptedError):
        measure.measure_variants({"a": [path]}, None, tmp_path, tmp_path / "none")
    with pytest.raises(InterruptedError):
        cli_evaluate(path, None, None, 16, "validation", **options)
    with pytest.raises(InterruptedError):
        cli_score(path, "a", None, **options)
    assert devices == ["cuda"] * 4


PEAK = """
import sys, torch
from gptmini import machine
from gptmini.analysis import evaluate, measure
from gptmini.cli.evaluate import evaluate as cli_evaluate
from gptmini.cli.score import score as cli_score
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


def test_a_mac_without_apples_tools_has_no_compiler_to_ask(monkeypatch):
    """There /usr/bin/g++ opens a window that offers to install them."""
    installed = {"g++": "/usr/bin/g++", "clang++": "/opt/homebrew/bin/clang++"}
    monkeypatch.setattr(machine.shutil, "which", installed.get)
    assert machine.find_compiler("g++") == "/usr/bin/g++"
    assert machine.find_compiler("cl") is None
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    for code, found in ((0, "/usr/bin/g++"), (2, "/opt/homebrew/bin/clang++")):
        done = subprocess.CompletedProcess([], code)
        monkeypatch.setattr(machine.subprocess, "run", lambda *_, done=done, **__: done)
        assert machine.find_compiler("g++", "clang++") == found
