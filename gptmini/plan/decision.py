"""The result of planning: everything that a training needs before its first step."""

from dataclasses import dataclass

from gptmini.config.settings import Config
from gptmini.data.token_file import Corpus
from gptmini.distributed.group import SINGLE_PROCESS, Group
from gptmini.machine import Compute


@dataclass(frozen=True)
class Decision:
    """What a training needs before its first step.

    `paced` says that the number of steps follows `train.minutes`, `seconds_per_step` what a step
    was measured to take, `compiling` the outcome of trying torch.compile. `started` is the
    time.perf_counter() from which the minutes count.
    """

    config: Config
    corpus: Corpus
    compute: Compute
    started: float
    paced: bool
    seconds_per_step: float | None = None
    compile_outcome: str = ""
    group: Group = SINGLE_PROCESS
