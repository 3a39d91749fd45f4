"""How far a run has come: what a checkpoint says of it beside its tensors."""

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptmini.console import quote


@dataclass
class Progress:
    """Contents of state.json: counters, the best evaluation, and what the bits depend on.

    `seconds` is the time of the updates, `elapsed` that of the commands; `best` is the best
    evaluation; `corpus` and `tokenizer` are SHA-256 digests; `loss_scale` keeps gradients in the
    range of float16 and is 1 for other types; `deterministic` is that of Compute; `source` is what
    was imported, such as hf:OWNER/NAME@COMMIT or a path, also for runs that began from that;
    `own_model` says that it was trained with a custom model, which no configuration describes,
    `own_logits` are a few of those that it began with, and `own_optimizer` is the class of a custom
    optimizer, and its settings, `own_parts` the names of other custom parts; `saw_held_out` says
    that its base may have been trained on text that is now held out.
    """

    corpus: str
    tokenizer: str
    torch: str = str(torch.__version__)
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    compile: str = "off"
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    best: dict[str, Any] | None = None
    loss_scale: float = 1.0
    deterministic: bool = False
    source: str = ""
    own_model: bool = False
    own_logits: list[float] = field(default_factory=list)
    own_optimizer: str = ""
    own_parts: list[str] = field(default_factory=list)
    saw_held_out: bool = False

    def to_metrics(self) -> dict[str, Any]:
        """Return the keys that every line of metrics begins with."""
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 3)}


def describe_changed_text(paths: list[str], run: Path, remedy: str) -> str:
    """Return the message for a run whose text or tokenizer has changed."""
    return f"{', '.join(paths)}: the text has changed since {run} began; {remedy}"


def describe_edited_text(paths: list[str], run: Path) -> str:
    """Return that message with the name of a run that does not exist yet, for the new text."""
    here = run if run.name else run.absolute()
    name = re.sub(r"-\d+$", "", here.name)
    number = int(here.name.removeprefix(name).removeprefix("-") or 1)
    names = (here.with_name(f"{name}-{each}") for each in itertools.count(number + 1))
    new = next(each for each in names if not each.exists())
    remedy = f"to train a new model on it, pass another --out, such as {quote(new)}"
    return describe_changed_text(paths, run, remedy)


def describe_own_model(run: Path, remedy: str) -> str:
    """Return the message for a run whose model is not gptmini's, where nobody builds it."""
    return f"{run}: has a model of its own; in Python: {remedy}"
