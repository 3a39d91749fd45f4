"""Draft the next tokens cheaply; the model verifies them in one pass (speculative decoding).

Every token is drawn from the model's own logits with the random number of its position, as in the
plain sampling loop. A drafted token that equals the draw saves a pass; any other is discarded. So
the text is the same with and without drafting, greedy or sampled, however bad the drafts are: with
PyTorch's engine, up to the rounding of logits.

V is the vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gptmini.generate.engine import Engine, copy_to_host
from gptmini.generate.filters import draw_token
from gptmini.generate.sampler import append_token
from gptmini.generate.sequence import Sequence

# Four tokens take less than twice as long as one (scripts/LOG.md: How many tokens should be
# drafted?)
MAX_DRAFT_TOKENS = 3


@torch.inference_mode()
def sample_speculatively(
    engine: Engine, drafter: "PromptLookup | DraftModel", texts: list[Sequence]
) -> Iterator[tuple[Sequence, int, Tensor]]:
    """Yield what `sampler.sample_tokens` yields, in fewer passes where the drafts are right."""
    while live := [text for text in texts if text.finish_reason is None]:
        # Drafted tokens go through the model behind the known ones, so that one pass gives the
        # logits after the last known token and after each drafted one.
        drafts = _draft_tokens(drafter, live)
        for text, draft in zip(live, drafts, strict=True):
            text.context += draft
            text.n_logits = 1 + len(draft)
        all_logits = copy_to_host(engine(live))
        for text, logits, draft in zip(live, all_logits, drafts, strict=True):
            # logits: (1 + drafted, V). Take the draft back: every token is drawn in any case, so a
            # draft saves a pass or costs a little time, but never changes the text.
            del text.context[len(text.context) - len(draft) :]
            text.drafted += len(draft)
            for position in range(len(logits)):
                at_position = logits[position]  # (V,)
                token = draw_token(at_position, text)
                append_token(text, token)
                yield text, token, at_position
                # The next logits hold only if this token is the drafted one.
                is_drafted = position < len(draft) and draft[position] == token
                if text.finish_reason or not is_drafted:
                    break
                text.accepted += 1
            # The model has not seen the last token; wrong drafts in its cache do not count.
            text.n_cached = min(text.n_cached, len(text.context) - 1)


def _draft_tokens(drafter: "PromptLookup | DraftModel", texts: list[Sequence]) -> list[list[int]]:
    """Draft tokens for each text, none where the model could not verify them cheaply."""
    limits = []
    for text in texts:
        new_tokens_left = text.sample.max_new_tokens - len(text.tokens) - 1
        context_left = text.context_length - len(text.context)
        # A single step waits for memory, so drafts are nearly free; a prefill would pay for them.
        is_single_step = text.n_cached == len(text.context) - 1
        limit = min(MAX_DRAFT_TOKENS, new_tokens_left, context_left)
        limits.append(limit if is_single_step else 0)
    return drafter(texts, limits)


class PromptLookup:
    """Drafts what followed the last two tokens when they last occurred (Saxena 2023)."""

    NGRAM_SIZE = 2

    def __init__(self) -> None:
        # For each text: where each n-gram last ended, and how many tokens are indexed. A call adds
        # only the new tokens, so a long text stays cheap.
        self._ends: dict[Sequence, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[Sequence, int] = {}

    def __call__(self, texts: list[Sequence], limits: list[int]) -> list[list[int]]:
        return [self._find_match(text, limit) for text, limit in zip(texts, limits, strict=True)]

    def _find_match(self, text: Sequence, limit: int) -> list[int]:
        tokens = text.prompt_tokens + text.tokens
        ends = self._ends.setdefault(text, {})
        # Index the last n-gram in the next call: now it would only find itself.
        for end in range(self._indexed.get(text, self.NGRAM_SIZE), len(tokens)):
            ends[tuple(tokens[end - self.NGRAM_SIZE : end])] = end
        self._indexed[text] = max(self.NGRAM_SIZE, len(tokens))
        match = ends.get(tuple(tokens[-self.NGRAM_SIZE :]))
        return [] if match is None else tokens[match : match + limit]


class DraftModel:
    """Drafts what a smaller model with the same tokenizer draws with the same random numbers."""

    def __init__(self, context_length: int, engine: Engine) -> None:
        self._context_length = context_length
        self._engine = engine
        self._views: dict[Sequence, Sequence] = {}  # each text as the draft model's engine sees it

    def __call__(self, texts: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Draft up to `limits` tokens for each text, fewer if the draft model's context is full."""
        views = [self._sync_view(text) for text in texts]
        for ahead in range(max(limits)):  # one token for all texts at a time
            live = [
                view
                for view, limit in zip(views, limits, strict=True)
                if ahead < limit and len(view.context) <= self._context_length
            ]
            if not live:
                break
            for view, logits in zip(live, copy_to_host(self._engine(live)), strict=True):
                token = draw_token(logits[-1], view)
                view.tokens.append(token)
                view.context.append(token)
        return [view.tokens[len(text.tokens) :] for view, text in zip(views, texts, strict=True)]

    def _sync_view(self, text: Sequence) -> Sequence:
        """Update the draft model's view of a text; keep its cache unless the text slid."""
        view = self._views.get(text)
        if view is None:
            view = Sequence(text.number, text.prompt_tokens, self._context_length, text.sample)
            self._views[text] = view
        slid = view.context_start != text.context_start
        view.tokens = list(text.tokens)
        view.context = list(text.context)
        view.context_start = text.context_start
        view.n_cached = 0 if slid else min(view.n_cached, len(view.context) - 1)
        return view
