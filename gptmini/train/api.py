"""Trains from Python: what `gptmini train` does, as one function.

import gptmini
run = gptmini.fit({"data": {"path": "my.txt"}, "train": {"minutes": 5}}, "runs/my")
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini.config.load import read_config
from gptmini.config.settings import Config, ModelConfig
from gptmini.files import check_run_folder
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from gptmini.train.group import join_group
from gptmini.train.state import CustomParts


def fit(
    config: Config | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    model: Callable[[ModelConfig], GPT] | None = None,
    loss: Callable[[GPT, Tensor, Tensor], Tensor] | None = None,
    optimizer: Callable[[GPT], torch.optim.Optimizer] | None = None,
    schedule: Callable[[int], float] | None = None,
    batches: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    on_step: Callable[[int, dict[str, Any]], object] | None = None,
) -> Run:
    """Train a run, or resume it, in the directory `out`; returns it with its best weights,
    in float32.

    `config` states what differs from the defaults, in sections as a YAML file does. It may also be
    the path of such a file, or the name of one in configs/. Progress goes to stderr. Raises the
    errors of `gptmini.errors` that the command reports; after a signal that is Stopped, and the
    same call resumes. Under torchrun, all processes train one model.

    Parts of your own, each a function, take the place of gptmini's; docs/from-python.md and
    docs/own-attention.md have examples. Give the same ones to resume:

    - `model` builds the GPT of a ModelConfig, such as a subclass of GPT or one with other modules;
    - `loss` computes the loss of the model on tokens and targets (B, T), a scalar: a mean over all
      targets, to which those below 0 add nothing;
    - `optimizer` makes an optimizer of torch for the model, whose learning rates are the peaks;
    - `schedule` gives the learning rate of a step, counted from 0, for the first group of the
      optimizer, to which the others keep their ratio;
    - `batches` gives the tokens and targets of a step, int64 (B, T) each; a target below 0 does not
      count. The text of `config` then serves to learn a vocabulary and to validate;
    - `on_step` gets the number of updates made and their metrics: train_loss in nats per token, lr,
      grad_norm.
    """
    started = time.perf_counter()
    requested = read_config(config)
    out = Path(os.path.expanduser(out))
    check_run_folder(out)
    directory = RunDirectory(out)
    own = CustomParts(model, loss, optimizer, schedule, batches, on_step)
    with join_group() as group:
        plan = group.make_plan(requested, directory, started)
        loop.train(plan, directory.path, own, group)
    return load_run(out, requested.train.device, "float32", model=model)
