"""The decision: all that a run needs before its first step.

It stands alone, so that the training loop can name it without loading the text formats that making
one needs.
"""

from dataclasses import dataclass

from gptmini.config.settings import Config
from gptmini.data.token_file import Corpus
from gptmini.distributed.group import SINGLE_PROCESS, Group
from gptmini.machine import Compute


@dataclass(frozen=True)
class Decision:
    """A complete configuration, the text in tokens, and the machine to train on.

    started: the time.perf_counter() from which `train.minutes` count.
    paced: whether the number of steps follows `train.minutes`.
    seconds_per_step: what a step was measured to take, if one was measured.
    compile_outcome: what came of trying torch.compile, in words.
    """

    config: Config
    corpus: Corpus
    compute: Compute
    started: float
    paced: bool
    seconds_per_step: float | None = None
    compile_outcome: str = ""
    group: Group = SINGLE_PROCESS
