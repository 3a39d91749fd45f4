"""Keeps the losses of a run's held-out text, window by window, in its directory.

    losses-validation.json   of the best evaluation; training writes it before the checkpoint
    losses-test.json         of the best checkpoint; `gptmini evaluate --split test` writes it

So runs can be compared without their models, whatever these are.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gptmini import files
from gptmini.data.token_file import TokenFile
from gptmini.model.gpt import GPT
from gptmini.train.evaluate import Evaluation

Split = Literal["validation", "test"]
SUMS = ("nats", "tokens", "bytes")  # of each window


@dataclass(frozen=True)
class WindowLosses:
    """An evaluation of a model of `parameters` after `step` updates.

    `text` identifies the held-out text, whatever the tokenizer; `whole` says that all of it was
    read, more than the part that `train.eval_tokens` leaves.
    """

    step: int
    text: str
    whole: bool
    parameters: int
    evaluation: Evaluation


def write_losses(
    run: Path,
    split: Split,
    step: int,
    texts: list[TokenFile],
    model: GPT,
    evaluation: Evaluation,
    whole: bool = True,
) -> None:
    """Write an evaluation to a run's directory, in place of that of another step."""
    # Token files are named after their text, then their tokenizer.
    names = {file.path.stem.split("-")[0] for file in texts}
    data = {
        "step": step,
        "text": ",".join(sorted(names)),
        "whole": whole,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "correct": evaluation.correct,
    }
    data |= {key: getattr(evaluation, key).tolist() for key in SUMS}
    files.atomic_write_bytes(_get_path(run, split), json.dumps(data).encode())


def read_losses(run: Path, split: Split) -> WindowLosses | None:
    """Read the losses of a run; None if there are none, or no whole file."""
    try:
        data = files.read_json(_get_path(run, split))
        nats, tokens, text_bytes = (np.array(data[key], np.float64) for key in SUMS)
        evaluation = Evaluation(nats, tokens, text_bytes, int(data["correct"]))
        return WindowLosses(
            int(data["step"]),
            str(data["text"]),
            bool(data["whole"]),
            int(data["parameters"]),
            evaluation,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _get_path(run: Path, split: Split) -> Path:
    return run / f"losses-{split}.json"
