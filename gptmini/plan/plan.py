"""What planning passes on: the request, and the plan that training follows.

They stand alone, so that the training loop can name them without loading the text formats that
making a plan needs.
"""

from dataclasses import dataclass
from pathlib import Path

from gptmini.config.settings import Config
from gptmini.data.token_file import Corpus
from gptmini.plan.recipe import TextSize
from gptmini.plan.timing import Machine
from gptmini.tokenizer.tokenizers import Tokenizer


@dataclass(frozen=True)
class Request:
    """The request, and what the resumed run or the base brings along.

    stated: the configuration as it was requested.
    config: the same with all that the run has chosen before, or that its base has.
    existing: the configuration of the run, if it is resumed; `run` is its directory.
    tokenizer: that of the run or of the base; None for a new run without a base.
    threads: those of the run, if it is resumed and has a checkpoint.
    """

    stated: Config
    config: Config
    run: Path | None = None
    existing: Config | None = None
    tokenizer: Tokenizer | None = None
    threads: int | None = None

    @property
    def steps_follow_minutes(self) -> bool:
        """Whether the number of steps follows `train.minutes`, since none was requested."""
        train = self.stated.train
        return train.minutes is not None and "steps" not in train.model_fields_set

    @property
    def minutes(self) -> float | None:
        """The minutes that choose sizes and steps: of a new run, as one that exists keeps its."""
        return None if self.existing is not None else self.config.train.minutes


@dataclass(frozen=True)
class Plan:
    """All that a run needs before its first step: a complete configuration, a text, a machine.

    text_size: how long the text is, in rows of this configuration.
    """

    request: Request
    config: Config
    corpus: Corpus
    text_size: TextSize
    machine: Machine
