"""The state of a training run: all that the loop works on.

Everything random is a function of (seed, step, micro-batch), so nothing random is saved.
"""

from __future__ import annotations

import inspect
import math
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from gptmini.console import format_count
from gptmini.errors import ConfigError
from gptmini.model.optim import compute_learning_rate, get_cooldown_steps

if TYPE_CHECKING:  # so that who reads one update need not read what a whole run is made of
    from collections.abc import Callable

    from torch import Tensor

    from gptmini.config.settings import Config, ModelConfig
    from gptmini.data.token_file import Corpus
    from gptmini.machine import Compute
    from gptmini.model.gpt import GPT
    from gptmini.model.optim import Optimizer
    from gptmini.plan.settle import Plan
    from gptmini.runs.directory import RunDirectory
    from gptmini.runs.progress import Progress
    from gptmini.train.batches import Batches
    from gptmini.train.gradients import Gradients
    from gptmini.train.group import Group

FIRST_LOSS_SCALE = 2.0**16  # in float16
# The arguments that parts of your own get; the optimizer's is checked when it is made.
ARGUMENTS = {"model": 1, "loss": 3, "schedule": 1, "batches": 1, "on_step": 2}


@dataclass(frozen=True)
class CustomParts:
    """Parts of a training that its owner makes; `gptmini.fit` describes them."""

    model: Callable[[ModelConfig], GPT] | None = None
    loss: Callable[[GPT, Tensor, Tensor], Tensor] | None = None
    optimizer: Callable[[GPT], torch.optim.Optimizer] | None = None
    schedule: Callable[[int], float] | None = None
    batches: Callable[[int], tuple[Tensor, Tensor]] | None = None
    on_step: Callable[[int, dict[str, Any]], object] | None = None

    def __post_init__(self) -> None:
        """ConfigError for a part that cannot be called with its arguments."""
        for name, count in ARGUMENTS.items():
            part = getattr(self, name)
            if part is None:
                continue
            rule = f"{name}: must be a function of {format_count(count, 'argument')}"
            if not callable(part):
                raise ConfigError(f"{rule}, not {type(part).__name__}")
            try:
                inspect.signature(part).bind(*range(count))
            except ValueError:  # a function in C may not tell its arguments
                continue
            except TypeError as error:
                raise ConfigError(f"{rule} ({error})") from error

    def list_unsaved(self) -> list[str]:
        """List the parts of which a checkpoint has only the names."""
        return [name for name in ("loss", "schedule", "batches") if getattr(self, name) is not None]


@dataclass
class Training:
    """Everything that the loop works on.

    Of several processes, each has one: `micro_batches` are those of its rank, by their number in
    the step, and `batches` reads their rows.
    """

    # The run, and what was planned for it: `plan.request` is what was asked for, and the settings
    # of a run that exists. `config` is the plan's until `train.minutes` changes the steps.
    plan: Plan
    config: Config
    run: RunDirectory
    corpus: Corpus
    compute: Compute  # the device, and the type of its matrix products
    group: Group
    own: CustomParts
    # What an update works on.
    model: GPT
    # The mean loss () of targets (B, T): the model, a CUDA graph of it, or a loss of your own.
    compute_loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    batches: Batches
    micro_batches: list[int]
    gradients: Gradients
    progress: Progress
    # What the loop remembers from one step to the next.
    started: float  # when the run would have begun, had it never stopped
    saved_step: int | None = None  # the step of the newest checkpoint
    has_compiled: bool = False  # or does not compile
    # This command's first step, and the seconds that had elapsed then: it allocates and compiles
    # for all the others.
    first_step: tuple[int, float] | None = None

    @property
    def step(self) -> int:
        """Updates made."""
        return self.progress.step

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.seq_len

    @property
    def is_log_due(self) -> bool:
        settings = self.config.train
        return self.step % settings.log_every == 0 or self.step in (1, settings.steps)

    @property
    def is_evaluation_due(self) -> bool:
        settings = self.config.train
        return self.step % settings.eval_every == 0 or self.step == settings.steps

    @property
    def is_save_due(self) -> bool:
        is_due = self.step % self.config.train.save_every == 0
        best = self.progress.best
        return is_due or self.is_finished or (best is not None and best["step"] == self.step)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are made, or the best evaluation is `train.patience` others old.

        Only evaluations in the cool-down count: on the plateau the loss goes up and down, and falls
        again later.
        """
        settings = self.config.train
        best = self.progress.best
        if self.step >= settings.steps:
            return True
        if settings.patience is None or best is None or self.step % settings.eval_every:
            return False
        since = max(best["step"], settings.steps - get_cooldown_steps(settings))
        return self.step >= since + settings.patience * settings.eval_every

    @property
    def is_better_than_base(self) -> bool:
        """Whether an evaluation after step 0 was the best; without a base there is none before."""
        return self.progress.best is None or self.progress.best["step"] > 0

    @property
    def steps_follow_minutes(self) -> bool:
        """Whether the number of steps follows `train.minutes`, since none was requested."""
        return self.plan.request.steps_follow_minutes

    def compute_rate(self) -> float:
        """Return the learning rate of the next update."""
        if self.own.schedule is not None:
            rate = self.own.schedule(self.step)
            if not isinstance(rate, Real) or not 0 <= rate < math.inf:
                raise ConfigError(f"schedule: must return a number from 0, not {rate!r}")
            return float(rate)
        rate = compute_learning_rate(self.config.train, self.step)
        given = self.optimizer.given_groups  # the peak of an optimizer of your own is its own rate
        return rate / self.config.train.lr * given[0]["lr"] if given else rate

    @property
    def elapsed(self) -> float:
        """Seconds the run has taken in all commands, with everything around the updates."""
        return time.perf_counter() - self.started

    def enter_inference(self) -> AbstractContextManager[object]:
        """Enter a context for forward passes outside of a training step.

        Compiled kernels stay out of it: new shapes and modes would recompile them.
        """
        context = ExitStack()
        if self.config.train.compile == "on":
            context.enter_context(torch.compiler.set_stance("force_eager"))
        if self.group.is_sharded:  # its matrices are gathered in the type of training
            context.enter_context(self.compute.autocast())
        return context
