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
from gptmini.generate.engine import PREFILL_CHUNK, SPARE_POSITIONS, Engine
from gptmini.generate.filters import LogitsProcessor
from gptmini.generate.run import Run
from gptmini.generate.sampler import draw_token
from gptmini.generate.texts import Text

# Work is counted in tokens. Whatever passes through the model, many tokens of a prompt or one of
# each text, also waits for the weights to come from memory, about as long as READ tokens take.
WEIGHTS_COST_IN_TOKENS = 16


@dataclass(frozen=True)
class TokenEvent:
    """What one token adds to a text; log-probabilities (nats) only on request.

    A token of the prompt adds none. The first one has no log-probability, as nothing precedes it.
    """

    characters: str
    token: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]]  # the most likely tokens in its place
    finish_reason: str | None


TokenEvents = list[TokenEvent]
Deliveries = list[tuple[Callable[[TokenEvents | Exception], None], TokenEvents | Exception]]


@dataclass(eq=False)
class Request:
    """A text on its way; `tell` gets its pieces as they come, or the error that ended it.

    With `score_prompt`, those of the prompt come before the first. To take it off the engine, set
    the `finish_reason` of its text.
    """

    text: Text
    sample: SampleConfig
    logits_processor: LogitsProcessor
    n_logprobs: int | None  # how many likely tokens each piece lists; None: no log-probabilities
    score_prompt: bool
    callback: Callable[[TokenEvents | Exception], None]

    @property
    def scores_prompt_next(self) -> bool:
        """Whether the next call of the engine scores the prompt."""
        return self.score_prompt and not self.text.tokens


class Scheduler(threading.Thread):
    """The thread that draws; its texts are those that `Run.start` gives alone."""

    def __init__(
        self, run: Run, max_rows: int, max_waiting: int, deliver: Callable[[Deliveries], object]
    ) -> None:
        """`deliver` is called in this thread with the news of each turn, for the jobs' `tell`."""
        super().__init__(name="batch", daemon=True)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._run, self._deliver = run, deliver
        self._changed = threading.Condition()
        self._stopped = False
        self._work_since_step = 0.0  # on prompts since the last step

    def submit(self, requests: Sequence[Request]) -> bool:
        """Queue the texts of a request, all or none; False if the queue is too full."""
        with self._changed:
            if len(self.waiting) + len(requests) > self.max_waiting:
                return False
            self.waiting.extend(requests)
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
        with (
            self._run.borrow_engine(self.max_rows) as engine,
            self._interrupt_between_layers(engine),
        ):
            while self._admit():
                next_request = next(
                    (request for request in self.running if not self._is_ready(request, engine)),
                    None,
                )
                try:
                    if next_request is None:
                        self._step(engine, self.running)
                    else:
                        self._prefill(engine, next_request)
                except Exception as error:  # later texts still need this thread
                    logging.getLogger(__name__).exception("internal error")
                    self._deliver(
                        [(request.callback, self._fail(request, error)) for request in self.running]
                    )

    def _admit(self) -> bool:
        """Drop texts that have ended and fill their rows; wait for work. False when stopped."""
        with self._changed:
            while not self._stopped:
                self.waiting = deque(
                    request for request in self.waiting if not request.text.finish_reason
                )
                self.running = [
                    request for request in self.running if not request.text.finish_reason
                ]
                while self.waiting and len(self.running) < self.max_rows:
                    self.running.append(self.waiting.popleft())
                if self.running:
                    return True
                self._changed.wait()
        return False

    def _is_ready(self, request: Request, engine: Engine) -> bool:
        """Whether a step can give the text a token, as little of it is still to be prefilled.

        A text that is just being given one, from logits that took other prefills, is not ready.
        """
        return (
            not engine.ragged
            or 0 < len(request.text.context) - request.text.n_cached <= SPARE_POSITIONS
        )

    def _prefill(self, engine: Engine, request: Request) -> None:
        """Prefill a chunk of a prompt, or the rest of it and draw its first token."""
        self._interrupted, start = False, request.text.n_cached
        ready = sum(self._is_ready(job, engine) for job in self.running)
        max_tokens = 2 * (WEIGHTS_COST_IN_TOKENS + ready) if ready else PREFILL_CHUNK
        if request.scores_prompt_next or not engine.prefill_chunk(request.text, max_tokens):
            self._step(engine, [request])
        if not self._interrupted:  # by layers, as the engine has its own
            self._record_work(engine, WEIGHTS_COST_IN_TOKENS + request.text.n_cached - start)

    @contextmanager
    def _interrupt_between_layers(self, engine: Engine) -> Iterator[None]:
        """Interrupt the prefill of a prompt after each layer of the model."""

        def interrupt(block: object, inputs: object, hidden: Tensor) -> None:
            if threading.current_thread() is self:  # as a run may be used by several threads
                self._interrupted = True
                self._record_work(engine, (WEIGHTS_COST_IN_TOKENS + hidden.shape[1]) / len(blocks))

        blocks = list(self._run.model.blocks) if engine.ragged else []
        hooks = [block.register_forward_hook(interrupt) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record_work(self, engine: Engine, work: float) -> None:
        """Note work on a prompt; the other texts get a token when it was as much as theirs is."""
        self._work_since_step += work
        ready = [request for request in self.running if self._is_ready(request, engine)]
        if ready and self._work_since_step >= WEIGHTS_COST_IN_TOKENS + len(ready):
            self._work_since_step = 0.0
            self._step(engine, ready)

    def _step(self, engine: Engine, requests: list[Request]) -> None:
        """Draw one token for each of the texts, and tell it."""
        live = [request for request in requests if not request.text.finish_reason]
        for request in live:
            request.text.n_logits = len(request.text.context) if request.scores_prompt_next else 1
        logits = engine([request.text for request in live]) if live else []
        events = [self._draw_token(*each) for each in zip(live, logits, strict=True)]
        self._deliver(
            [(request.callback, event) for request, event in zip(live, events, strict=True)]
        )

    def _draw_token(self, request: Request, logits: Tensor) -> TokenEvents | Exception:
        """The next pieces, from logits (wanted, V)."""
        text, context_length = request.text, self._run.model.config.context_length
        events = self._score_prompt(request, logits) if request.scores_prompt_next else []
        logits = logits[-1]  # (V,)
        try:
            token = draw_token(
                text, logits, request.logits_processor, request.sample, context_length
            )
        except GptminiError as error:  # such as a ban of every token
            return self._fail(request, error)
        logprob, top = _find_top_logprobs(logits, token, request.n_logprobs)
        return [
            *events,
            TokenEvent(text.decode_token(token), token, logprob, top, text.finish_reason),
        ]

    def _score_prompt(self, request: Request, logits: Tensor) -> TokenEvents:
        """The pieces of a prompt of T tokens, from logits (T, V)."""
        tokens = request.text.prompt_tokens
        events = [TokenEvent("", tokens[0], None, [], None)]
        for token, row in zip(tokens[1:], logits[-len(tokens) :], strict=False):
            events.append(
                TokenEvent("", token, *_find_top_logprobs(row, token, request.n_logprobs), None)
            )
        return events

    def _fail(self, request: Request, error: Exception) -> Exception:
        request.text.finish_reason = "error"
        return error


def _find_top_logprobs(
    logits: Tensor, token: int, n_logprobs: int | None
) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token, and the likeliest ones with theirs, from logits (V,)."""
    if n_logprobs is None:
        return 0.0, []
    logprobs = logits.log_softmax(0)  # (V,)
    values, tokens = logprobs.topk(min(n_logprobs, len(logprobs)))
    return float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True))
