"""What is said before the first step."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from gptmini.config.load import validate
from gptmini.plan.recipe import TextSize
from gptmini.plan.settle import make_plan
from gptmini.train import header
from gptmini.train.state import CustomParts
from tests.core.plan.machines import FakeMachine


def test_minutes_are_said_once_and_only_as_long_as_the_text_is_worth(tmp_path: Path, capsys):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 1000)
    sections = {"data": {"path": str(tmp_path / "text.txt")}, "tokenizer": {"kind": "byte"}}
    sections["train"] = {"minutes": 100, "compile": "off", "device": "cpu", "dtype": "float32"}
    plan = make_plan(validate(sections, {}), None, machine=FakeMachine(step=0.5))
    assert "  time  " not in capsys.readouterr().err  # so that it is said but here
    training = SimpleNamespace(plan=plan, config=plan.config, step=0, steps_follow_minutes=True)
    training.own = CustomParts()
    training.progress = SimpleNamespace(elapsed=0.0)
    steps = f"{plan.config.train.steps:,} steps, reading the text "
    said = header._describe_time(training)  # type: ignore[arg-type]
    assert said.startswith(f"  time      about 2:02: {steps}")  # of half a second
    assert said.endswith(" times; more often would make the model worse")

    training.plan = replace(plan, text_size=TextSize(1e9, per_epoch=1e9))
    said = header._describe_time(training)  # type: ignore[arg-type]
    assert said == "  time      about 100 minutes, reading the text 0.0 times"
    training.step = 7
    training.progress.elapsed = 60 * 98.0
    training.own = CustomParts(batches=lambda step: (torch.zeros(0), torch.zeros(0)))
    said = header._describe_time(training)  # type: ignore[arg-type]
    assert said == "  time      about 2:00 more; resuming after step 7"
