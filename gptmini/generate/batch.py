"""Continuous batching: texts of many callers share an engine, and come and go between its steps.

One thread owns the engine. Each turn prefills at most one chunk of one prompt and draws one token
for every other text, so a long prompt delays the others by one chunk at a time.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import GptminiError
from gptmini.generate.engine import SPARE, Engine
from gptmini.generate.filters import Adjustment
from gptmini.generate.run import Run
from gptmini.generate.sampler import draw
from gptmini.generate.texts import Text


@dataclass(frozen=True)
class Piece:
    """What one token adds to a text; log-probabilities (nats) only on request."""

    characters: str
    token: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely tokens in its place
    finish_reason: str | None


News = list[tuple[Callable[[Piece | Exception], None], Piece | Exception]]


@dataclass(eq=False)
class Job:
    """A text on its way; `tell` gets each piece of it, or the error that ended it.

    To take it off the engine, set the `finish_reason` of its text.
    """

    text: Text
    sample: SampleConfig
    adjust: Adjustment
    n_top: int | None  # how many likely tokens each piece lists; None: no log-probabilities
    tell: Callable[[Piece | Exception], None]


class Batch(threading.Thread):
    """The thread that draws; its texts are those that `Run.start` gives alone."""

    def __init__(
        self, run: Run, max_rows: int, max_waiting: int, deliver: Callable[[News], object]
    ) -> None:
        """`deliver` is called in this thread with the news of each turn, for the jobs' `tell`."""
        super().__init__(name="batch", daemon=True)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._run, self._deliver = run, deliver
        self._changed = threading.Condition()
        self._stopped = False

    def submit(self, jobs: Sequence[Job]) -> bool:
        """Queue the texts of a request, all or none; False if the queue is too full."""
        with self._changed:
            if len(self.waiting) + len(jobs) > self.max_waiting:
                return False
            self.waiting.extend(jobs)
            self._changed.notify()
        return True

    def stop(self) -> None:
        """End the thread after its present turn."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.join()

    @torch.inference_mode()
    def run(self) -> None:
        with self._run.engine(self.max_rows) as engine:
            while self._admit():
                try:
                    ready = self._ready(engine)
                    logits = engine([job.text for job in ready]) if ready else []
                    pieces = [self._draw(*each) for each in zip(ready, logits, strict=True)]
                except Exception as error:  # later texts still need this thread
                    logging.getLogger(__name__).exception("internal error")
                    ready, pieces = self.running, [self._failed(job, error) for job in self.running]
                if ready:
                    tells = [job.tell for job in ready]
                    self._deliver(list(zip(tells, pieces, strict=True)))

    def _admit(self) -> bool:
        """Drop texts that have ended and fill their rows; wait for work. False when stopped."""
        with self._changed:
            while not self._stopped:
                self.waiting = deque(job for job in self.waiting if not job.text.finish_reason)
                self.running = [job for job in self.running if not job.text.finish_reason]
                while self.waiting and len(self.running) < self.max_rows:
                    self.running.append(self.waiting.popleft())
                if self.running:
                    return True
                self._changed.wait()
        return False

    def _ready(self, engine: Engine) -> list[Job]:
        """The texts that get a token in this turn; of those with much to prefill at most one."""
        if not engine.ragged:
            return self.running
        unseen = [len(job.text.context) - job.text.cached for job in self.running]
        ready = [job for job, count in zip(self.running, unseen, strict=True) if count <= SPARE]
        new = next((job for job in self.running if job not in ready), None)
        return ready if new is None or engine.prefill_chunk(new.text) else [*ready, new]

    def _draw(self, job: Job, logits: Tensor) -> Piece | Exception:
        text, limit = job.text, self._run.model.config.context_length
        logits = logits[-1]  # (V,)
        try:
            token = draw(text, logits, job.adjust, job.sample, limit)
        except GptminiError as error:  # such as a ban of every token
            return self._failed(job, error)
        logprob, top = 0.0, []
        if job.n_top is not None:
            logprobs = logits.log_softmax(0)  # (V,)
            logprob = float(logprobs[token])
            values, tokens = logprobs.topk(min(job.n_top, len(logprobs)))
            top = list(zip(tokens.tolist(), values.tolist(), strict=True))
        return Piece(text.read(token), token, logprob, top, text.finish_reason)

    def _failed(self, job: Job, error: Exception) -> Exception:
        job.text.finish_reason = "error"
        return error
