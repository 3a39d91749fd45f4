"""Continuous batching: the texts of many callers share an engine and join and leave between steps.

One thread owns the engine. It prefills prompts one after another, first come, first served. So that
a long prompt does not hold up everyone else, texts that are already generating get their tokens
between parts of a prefill. How a prompt is cut must not change a bit of any text: the compiled step
gives the same bits for slices of any length, so it reads short slices; PyTorch gives other bits for
other lengths, so it always reads whole chunks.

Letters: T tokens of a prompt, V vocabulary.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmini.generate.engine import PREFILL_CHUNK, SPARE_POSITIONS, Engine
from gptmini.generate.run import Run
from gptmini.generate.sampler import append_token
from gptmini.generate.sequence import Sequence

# The cost of a forward pass is counted in tokens. Besides the arithmetic for each token, every pass
# reads all weights from memory, which takes about as long as the arithmetic of this many tokens.
WEIGHTS_COST_IN_TOKENS = 16


@dataclass(frozen=True)
class TokenEvent:
    """A token, the characters that it adds, and log-probabilities (nats) if requested.

    A token of the prompt adds no characters. The first one has no log-probability, as nothing
    precedes it.
    """

    characters: str
    token: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]]  # the most likely tokens in its place
    finish_reason: str | None


TokenEvents = list[TokenEvent]
Callback = Callable[[TokenEvents | Exception], None]
Deliveries = list[tuple[Callback, TokenEvents | Exception]]


@dataclass(eq=False)
class Request:
    """A text to generate.

    `callback` gets the events of each step, or the error that ended the text. With `score_prompt`,
    the events of the prompt's tokens precede that of the first new one. To cancel a request, set
    the `finish_reason` of its text.
    """

    text: Sequence
    n_logprobs: int | None  # how many likely tokens each event lists; None: no log-probabilities
    score_prompt: bool
    callback: Callback

    @property
    def scores_prompt_next(self) -> bool:
        """Whether the next call of the engine scores the prompt."""
        return self.score_prompt and not self.text.tokens


class Scheduler(threading.Thread):
    """The thread that generates; each text is one that `Run.start` would give.

    Other threads call `submit` and `stop`. They may read `waiting` and `running`, which only this
    thread and `submit` change.
    """

    def __init__(
        self, run: Run, max_rows: int, max_waiting: int, deliver: Callable[[Deliveries], object]
    ) -> None:
        """`deliver` gets the events of each step, with the callbacks that they are for.

        It is called in this thread and decides in which one the callbacks run.
        """
        super().__init__(name="scheduler", daemon=True)
        self.max_rows = max_rows
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._run = run
        self._deliver = deliver
        self._changed = threading.Condition()  # guards `waiting` and `_stopped`
        self._stopped = False
        # Work on prompts, in tokens, since other texts last got a token.
        self._work_since_step = 0.0

    def submit(self, requests: list[Request]) -> bool:
        """Queue the texts of a caller, all or none; return False if the queue is too full."""
        with self._changed:
            if len(self.waiting) + len(requests) > self.max_waiting:
                return False
            self.waiting.extend(requests)
            self._changed.notify()
        return True

    def stop(self) -> None:
        """End the thread after the step it is in."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.join()

    @torch.inference_mode()
    def run(self) -> None:
        """Admit, prefill and step until `stop` is called."""
        with self._run.borrow_engine(self.max_rows) as engine:
            while self._admit():
                try:
                    self._advance(engine)
                except Exception as error:  # later texts still need this thread
                    logging.getLogger(__name__).exception("internal error")
                    for request in self.running:
                        request.text.finish_reason = "error"
                    self._deliver([(request.callback, error) for request in self.running])

    def _admit(self) -> bool:
        """Drop ended texts and give their rows to waiting ones; wait for work.

        Returns False when stopped.
        """
        with self._changed:
            while not self._stopped:
                self.waiting = deque(_drop_ended(self.waiting))
                self.running = _drop_ended(self.running)
                while self.waiting and len(self.running) < self.max_rows:
                    self.running.append(self.waiting.popleft())
                if self.running:
                    return True
                self._changed.wait()
        return False

    def _advance(self, engine: Engine) -> None:
        """Work on the first prompt that needs a prefill, or give every text a token."""
        for request in self.running:
            if not self._is_ready(request):
                self._prefill(engine, request)
                return
        self._step(engine, self.running)

    def _is_ready(self, request: Request) -> bool:
        """Check whether a step can give the text a token, as little is left to prefill."""
        return len(request.text.context) - request.text.n_cached <= SPARE_POSITIONS

    def _prefill(self, engine: Engine, request: Request) -> None:
        """Prefill a chunk of a prompt, or the rest of it and draw its first token."""
        start = request.text.n_cached
        n_ready = sum(self._is_ready(other) for other in self.running)
        # While others wait for their next token, a slice costs two to three times as much as that.
        max_tokens = 2 * (WEIGHTS_COST_IN_TOKENS + n_ready) if n_ready else PREFILL_CHUNK
        if request.scores_prompt_next or not engine.prefill_chunk(request.text, max_tokens):
            self._step(engine, [request])
        self._record_work(engine, WEIGHTS_COST_IN_TOKENS + request.text.n_cached - start)

    def _record_work(self, engine: Engine, work: float) -> None:
        """Add up work on prompts; once it equals that of a step, give the other texts a token."""
        self._work_since_step += work
        ready = [request for request in self.running if self._is_ready(request)]
        if ready and self._work_since_step >= WEIGHTS_COST_IN_TOKENS + len(ready):
            self._work_since_step = 0.0
            self._step(engine, ready)

    def _step(self, engine: Engine, requests: list[Request]) -> None:
        """Draw one token for each text and deliver it."""
        live = _drop_ended(requests)
        if not live:
            return
        texts = [request.text for request in live]
        for request, text in zip(live, texts, strict=True):
            text.n_logits = len(text.context) if request.scores_prompt_next else 1
        all_logits = engine(texts)  # (n_logits, V) each
        tokens = engine.draw([logits[-1] for logits in all_logits], texts)
        deliveries: Deliveries = []
        for request, text, logits in zip(live, texts, all_logits, strict=True):
            events = text.error or self._add_token(request, logits, tokens[text])
            deliveries.append((request.callback, events))
        self._deliver(deliveries)

    def _add_token(self, request: Request, logits: Tensor, token: int) -> TokenEvents:
        """Add a token, drawn from logits (n_logits, V), to its text; return its events."""
        text = request.text
        if request.n_logprobs is not None:
            logits = logits.cpu()
        events = self._score_prompt(request, logits) if request.scores_prompt_next else []
        append_token(text, token)
        logprob, top_logprobs = _find_top_logprobs(logits[-1], token, request.n_logprobs)
        characters = text.decode_token(token)
        events.append(TokenEvent(characters, token, logprob, top_logprobs, text.finish_reason))
        return events

    def _score_prompt(self, request: Request, logits: Tensor) -> TokenEvents:
        """Build the events of a prompt's T tokens from logits (T, V)."""
        tokens = request.text.prompt_tokens
        events = [TokenEvent("", tokens[0], None, [], None)]
        # The logits behind a token predict the next one; the last row predicts a new token.
        for token, row in zip(tokens[1:], logits[-len(tokens) :], strict=False):
            logprob, top_logprobs = _find_top_logprobs(row, token, request.n_logprobs)
            events.append(TokenEvent("", token, logprob, top_logprobs, None))
        return events


def _drop_ended(requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if not request.text.finish_reason]


def _find_top_logprobs(
    logits: Tensor, token: int, n_logprobs: int | None
) -> tuple[float, list[tuple[int, float]]]:
    """Return a token's log-probability, and the likeliest tokens with theirs, from logits (V,)."""
    if n_logprobs is None:
        return 0.0, []
    logprobs = logits.log_softmax(0)  # (V,)
    values, tokens = logprobs.topk(min(n_logprobs, len(logprobs)))
    return float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True))
