"""Continuous batching: texts of many callers share an engine, and come and go between its steps.

One thread owns the engine. Prompts are prefilled one after another, first come, first served, and
the other texts get tokens in between. Neither may change a bit of the result: the compiled step
reads a prompt in short slices; where PyTorch reads it (float32), whose bits depend on the slice,
chunks are long and interrupted between the layers.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import GptminiError
from gptmini.generate.engine import PREFILL, SPARE, Engine
from gptmini.generate.filters import Adjustment
from gptmini.generate.run import Run
from gptmini.generate.sampler import draw
from gptmini.generate.texts import Text

# Work is counted in tokens. Whatever passes through the model, many tokens of a prompt or one of
# each text, also waits for the weights to come from memory, about as long as READ tokens take.
READ = 16


@dataclass(frozen=True)
class Piece:
    """What one token adds to a text; log-probabilities (nats) only on request.

    A token of the prompt adds none. The first one has no log-probability, as nothing precedes it.
    """

    characters: str
    token: int
    logprob: float | None
    top: list[tuple[int, float]]  # the most likely tokens in its place
    finish_reason: str | None


Pieces = list[Piece]
News = list[tuple[Callable[[Pieces | Exception], None], Pieces | Exception]]


@dataclass(eq=False)
class Job:
    """A text on its way; `tell` gets its pieces as they come, or the error that ended it.

    With `score_prompt`, those of the prompt come before the first. To take it off the engine, set
    the `finish_reason` of its text.
    """

    text: Text
    sample: SampleConfig
    adjust: Adjustment
    n_top: int | None  # how many likely tokens each piece lists; None: no log-probabilities
    score_prompt: bool
    tell: Callable[[Pieces | Exception], None]

    @property
    def scores(self) -> bool:
        """Whether the next call of the engine scores the prompt."""
        return self.score_prompt and not self.text.tokens


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
        self._work = 0.0  # on prompts since the last step

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
        with self._run.engine(self.max_rows) as engine, self._between_layers(engine):
            while self._admit():
                new = next((job for job in self.running if not self._is_ready(job, engine)), None)
                try:
                    if new is None:
                        self._step(engine, self.running)
                    else:
                        self._prefill(engine, new)
                except Exception as error:  # later texts still need this thread
                    logging.getLogger(__name__).exception("internal error")
                    self._deliver([(job.tell, self._failed(job, error)) for job in self.running])

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

    def _is_ready(self, job: Job, engine: Engine) -> bool:
        """Whether a step can give the text a token, as little of it is still to be prefilled.

        A text that is just being given one, from logits that took other prefills, is not ready.
        """
        return not engine.ragged or 0 < len(job.text.context) - job.text.cached <= SPARE

    def _prefill(self, engine: Engine, new: Job) -> None:
        """Prefill a chunk of a prompt, or the rest of it and draw its first token."""
        self._interrupted, start = False, new.text.cached
        ready = sum(self._is_ready(job, engine) for job in self.running)
        most = 2 * (READ + ready) if ready else PREFILL
        if new.scores or not engine.prefill_chunk(new.text, most):
            self._step(engine, [new])
        if not self._interrupted:  # by layers, as the engine has its own
            self._worked(engine, READ + new.text.cached - start)

    @contextmanager
    def _between_layers(self, engine: Engine) -> Iterator[None]:
        """Interrupt the prefill of a prompt after each layer of the model."""

        def interrupt(block: object, inputs: object, hidden: Tensor) -> None:
            if threading.current_thread() is self:  # as a run may be used by several threads
                self._interrupted = True
                self._worked(engine, (READ + hidden.shape[1]) / len(blocks))

        blocks = list(self._run.model.blocks) if engine.ragged else []
        hooks = [block.register_forward_hook(interrupt) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _worked(self, engine: Engine, work: float) -> None:
        """Note work on a prompt; the other texts get a token when it was as much as theirs is."""
        self._work += work
        ready = [job for job in self.running if self._is_ready(job, engine)]
        if ready and self._work >= READ + len(ready):
            self._work = 0.0
            self._step(engine, ready)

    def _step(self, engine: Engine, jobs: list[Job]) -> None:
        """Draw one token for each of the texts, and tell it."""
        live = [job for job in jobs if not job.text.finish_reason]
        for job in live:
            job.text.wanted = len(job.text.context) if job.scores else 1
        logits = engine([job.text for job in live]) if live else []
        pieces = [self._draw(*each) for each in zip(live, logits, strict=True)]
        self._deliver([(job.tell, piece) for job, piece in zip(live, pieces, strict=True)])

    def _draw(self, job: Job, logits: Tensor) -> Pieces | Exception:
        """The next pieces, from logits (wanted, V)."""
        text, limit = job.text, self._run.model.config.context_length
        pieces = self._scored(job, logits) if job.scores else []
        logits = logits[-1]  # (V,)
        try:
            token = draw(text, logits, job.adjust, job.sample, limit)
        except GptminiError as error:  # such as a ban of every token
            return self._failed(job, error)
        logprob, top = _likely(logits, token, job.n_top)
        return [*pieces, Piece(text.read(token), token, logprob, top, text.finish_reason)]

    def _scored(self, job: Job, logits: Tensor) -> Pieces:
        """The pieces of a prompt of T tokens, from logits (T, V)."""
        tokens = job.text.prompt_tokens
        pieces = [Piece("", tokens[0], None, [], None)]
        for token, row in zip(tokens[1:], logits[-len(tokens) :], strict=False):
            pieces.append(Piece("", token, *_likely(row, token, job.n_top), None))
        return pieces

    def _failed(self, job: Job, error: Exception) -> Exception:
        job.text.finish_reason = "error"
        return error


def _likely(logits: Tensor, token: int, n_top: int | None) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token, and the likeliest ones with theirs, from logits (V,)."""
    if n_top is None:
        return 0.0, []
    logprobs = logits.log_softmax(0)  # (V,)
    values, tokens = logprobs.topk(min(n_top, len(logprobs)))
    return float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True))
