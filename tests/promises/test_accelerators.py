"""A step and an evaluation on an accelerator that is not here; see fake_accelerator.py."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.promises.fake_accelerator"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_needs_what_apples_gpu_lacks(counted: dict[str, Any]):
    assert counted["train_step"]["lacking"] == []
    assert counted["evaluate"]["lacking"] == []


def test_a_step_waits_for_the_device_once(counted: dict[str, Any]):
    assert sum(counted["train_step"]["waits"].values()) == 1
    assert counted["train_step"]["kernels"] > 100


def test_a_step_needs_nothing_that_varies_on_a_gpu(counted: dict[str, Any]):
    assert counted["train_step"]["varying"] == []
    assert counted["evaluate"]["varying"] == []
