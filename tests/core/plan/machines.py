"""Machines to plan for whose memory, clock and speed a test states."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from gptmini.config.settings import Config
from gptmini.machine import Compute
from gptmini.plan.cost import Memory
from gptmini.plan.estimates import Estimates
from gptmini.plan.timing import Machine

CPU = Compute(torch.device("cpu"), torch.float32)
GPU = Compute(torch.device("cuda"), torch.bfloat16)


@dataclass(frozen=True)
class FakeMachine(Machine):
    """A machine that measures nothing.

    step: predicted seconds of a step, the same for every run, or by its configuration; with None,
    a test that asks for them fails. slow: how many times as long it takes. row: bytes of the
    activations of a row. `measured` has the configurations of the steps that were measured.
    """

    compute: Compute = CPU
    step: float | Callable[[Config], float] | None = None
    slow: float = 1.0
    memory: int = 1 << 40
    row: int = 0
    compiler: bool = False
    seconds_gone: Callable[[], float] = lambda: 0.0
    figures: Estimates | None = None
    measured: list[Config] = field(default_factory=list)

    @property
    def estimates(self) -> Estimates:
        return self.figures or super().estimates

    def get_seconds_left(self, minutes: float) -> float:
        return 60 * minutes - self.seconds_gone()

    def get_total_memory(self) -> int:
        return self.memory

    def estimate_memory(self, config: Config) -> Memory:
        return Memory(0, 0, 0, self.row * (config.train.micro_batch_size or 1))

    def has_compiler(self) -> bool:
        return self.compiler

    def predict_step(self, config: Config) -> float:
        assert self.step is not None, "asked for the time of a step for nothing"
        return self.step(config) if callable(self.step) else self.step

    def measure(self, config: Config) -> Machine:
        if self.slowness is not None:
            return self
        self.measured.append(config)
        return replace(self, slowness=self.slow)
