"""A step, an evaluation and a token on an accelerator that is not here; see fake_accelerator.py."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT


@pytest.fixture(scope="session")  # as a worker may leave this file and come back
def counted() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.promises.fake_accelerator"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_step_waits_for_the_device_once(counted: dict[str, Any]):
    assert sum(counted["train_step"]["waits"].values()) == 1
    assert counted["train_step"]["kernels"] > 100


@pytest.mark.parametrize(("model", "most"), [("gpt2-124m", 80), ("llama-135m", 160)])
def test_the_host_waits_once_for_the_tokens_of_all_texts(counted: dict[str, Any], model, most):
    """And a step has as many kernels for 32 texts as for one, of which a graph launches all."""
    one = counted[f"{model}, 1"]
    many = counted[f"{model}, 32"]
    assert sum(one["waits"].values()) == sum(many["waits"].values()) == 1
    assert one["kernels"] == many["kernels"] <= most
    assert one["draw_kernels"] == many["draw_kernels"] <= 60


def test_a_step_needs_nothing_that_varies_on_a_gpu(counted: dict[str, Any]):
    assert counted["train_step"]["varying"] == []
    assert counted["evaluate"]["varying"] == []


def test_the_next_batch_is_read_before_the_wait(counted: dict[str, Any]):
    assert counted["prepared"] == [1]


def test_the_loss_takes_few_kernels(counted: dict[str, Any]):
    """Two chunks of 8,192 rows: 47. Chunks that fit the caches of a CPU took 1,982."""
    assert counted["loss"] <= 50


def test_muon_takes_no_kernels_for_another_layer(counted: dict[str, Any]):
    assert counted["update"]["2"] == counted["update"]["6"] <= 85
