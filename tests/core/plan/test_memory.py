"""What a training would hold, against what tensors with memory do."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from gptmini.config.settings import Config
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan.cost import estimate_memory
from tests.storages import StorageCounter
from tests.support import tiny

CPU = Compute(torch.device("cpu"), torch.float32)
SHAPE = {"n_head": 4, "d_model": 64, "context_length": 64}


def config_of(optimizer: str = "muon", n_layer: int = 2, **train):
    config = tiny(
        model={**SHAPE, "n_layer": n_layer, "dropout": 0.1},
        train={"optimizer": optimizer, "batch_size": 8, "micro_batch_size": 8, **train},
    )
    return config.with_tokenizer("byte", 257)


def run_real_steps(
    config: Config, compute: Compute, passes: int = 1
) -> tuple[GPT, Optimizer, StorageCounter]:
    """Make two steps on tensors that have storages; counts the bytes they hold."""
    with StorageCounter() as held:
        model = GPT(config.model).train()
        model.gradient_checkpointing = config.train.gradient_checkpointing
        learner = Optimizer(model, config.train, compute.dtype)
        for _ in range(2):
            for _ in range(passes):
                tokens = torch.zeros(8, 64, dtype=torch.long)
                with compute.autocast():
                    mean = model(tokens, tokens)
                mean.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            learner.step(1e-3)
    return model, learner, held


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "dtype", "checkpointing"),
    [
        ("muon", torch.float32, True),
        ("muon", torch.bfloat16, False),
        ("adamw", torch.float32, False),
        ("adamw", torch.bfloat16, True),
    ],
)
def test_the_peak_is_about_that_of_real_steps(optimizer, dtype, checkpointing, passes):
    train = {"batch_size": 8 * passes, "gradient_checkpointing": checkpointing}
    config = config_of(optimizer, **train)
    compute = Compute(torch.device("cpu"), dtype)
    model, learner, held = run_real_steps(config, compute, passes)
    found = estimate_memory(config, compute)
    assert 0.9 * held.peak < found.peak < 1.9 * held.peak
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert found.weights == sum(weights.values())
    state = sum(tensor.nbytes for tensor in learner.state_dict().values())
    assert found.optimizer == pytest.approx(state, rel=0.001)  # and counters of steps


def test_windows_cost_activations_and_checkpointing_saves_them():
    few = estimate_memory(config_of(n_layer=4, micro_batch_size=2), CPU)
    many = estimate_memory(config_of(n_layer=4), CPU)
    saving = estimate_memory(config_of(n_layer=4, gradient_checkpointing=True), CPU)
    assert 3 < many.activations / few.activations < 4.5
    assert saving.activations < 0.6 * many.activations
    assert few.weights == many.weights == saving.weights


def test_no_weights_are_made():
    """A model of a trillion parameters is weighed like any other."""
    config = tiny(model={"n_layer": 1, "n_head": 1, "d_model": 262_144, "context_length": 16})
    found = estimate_memory(config.with_tokenizer("byte", 257), CPU)
    assert found.weights > 3e12


SAVE = """
import sys, torch
from pathlib import Path
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.machine import get_peak_memory, get_resident_memory
cpu, run = torch.device("cpu"), RunDirectory(Path(sys.argv[1]))
weights = {str(n): torch.ones(5_000_000) for n in range(4)}
state = {str(n): torch.ones(5_000_000) for n in range(6)}
run.checkpoints.mkdir()
before = get_resident_memory(cpu)
run.save(Checkpoint({"step": 1, "best": None}, weights, state))
print(get_peak_memory(cpu) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_saving_takes_no_memory(tmp_path):
    """In a process of its own, whose peak the system tells."""
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(found) < 5e6  # of 200 MB
