"""Machines to plan for whose memory, clock and speed a test states."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gptmini.config.settings import Config
from gptmini.machine import Compute
from gptmini.plan.cost import Memory
from gptmini.plan.estimates import Estimates, get_estimates
from gptmini.plan.timing import Machine, StepTime

CPU = Compute(torch.device("cpu"), torch.float32)
GPU = Compute(torch.device("cuda"), torch.bfloat16)


@dataclass(frozen=True)
class FakeMachine(Machine):
    """A machine that measures nothing.

    step: seconds of a step, the same for every run, or by its configuration; with None, a test that
    times a step fails. row: bytes of the activations of a row. `timed` has the configurations of
    the steps that were timed, `limits` the seconds that each was given.
    """

    compute: Compute = CPU
    step: StepTime | Callable[[Config], StepTime] | None = None
    memory: int = 1 << 40
    row: int = 0
    compiler: bool = False
    seconds_gone: Callable[[], float] = lambda: 0.0
    figures: Estimates | None = None
    timed: list[Config] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def estimates(self) -> Estimates:
        return self.figures or get_estimates(self.compute.device)

    def get_seconds_left(self, minutes: float) -> float:
        return 60 * minutes - self.seconds_gone()

    def get_total_memory(self) -> int:
        return self.memory

    def estimate_memory(self, config: Config) -> Memory:
        return Memory(0, 0, 0, self.row * (config.train.micro_batch_size or 1))

    def has_compiler(self) -> bool:
        return self.compiler

    def time_step(
        self, config: Config, *, compiled: bool = False, limit: float = math.inf
    ) -> StepTime:
        assert self.step is not None, "timed a step for nothing"
        self.timed.append(config)
        self.limits.append(limit)
        return self.step if isinstance(self.step, StepTime) else self.step(config)


def taking(*passes: float) -> Callable[[Config], StepTime]:
    """Steps that take so many seconds, one after the other."""
    seconds = itertools.chain(passes)
    return lambda _: StepTime(next(seconds), 0.0)
