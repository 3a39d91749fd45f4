"""Guesses of the next tokens, checked by the model in one pass (speculative decoding).

The sampler draws every token from the model's own logits with its own random number. A guess that
equals the draw saves a pass, a wrong one is discarded. So the text is the same with and without
guessing, greedy or sampled, however bad the guesses are.
"""

from gptmini.config.settings import SampleConfig
from gptmini.generate.engine import Engine
from gptmini.generate.filters import LogitsProcessor, draw_uniform, sample_token
from gptmini.generate.texts import Text
from gptmini.model.gpt import GPT


class PromptLookup:
    """Guesses what followed the last two tokens when they last occurred (Saxena 2023)."""

    NGRAM_SIZE = 2

    def __init__(self) -> None:
        # Of each text: where its pairs of tokens end, the latest place winning, and how many
        # tokens are indexed. Only new tokens are added, so a long text stays cheap.
        self._ends: dict[Text, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[Text, int] = {}

    def __call__(self, texts: list[Text], limits: list[int]) -> list[list[int]]:
        return [self._find_match(text, limit) for text, limit in zip(texts, limits, strict=True)]

    def _find_match(self, text: Text, limit: int) -> list[int]:
        tokens = text.prompt_tokens + text.tokens
        ends = self._ends.setdefault(text, {})
        # The pair at the very end is left for later: it would only find itself.
        for end in range(self._indexed.get(text, self.NGRAM_SIZE), len(tokens)):
            ends[tuple(tokens[end - self.NGRAM_SIZE : end])] = end
        self._indexed[text] = max(self.NGRAM_SIZE, len(tokens))
        seen = ends.get(tuple(tokens[-self.NGRAM_SIZE :]))
        return [] if seen is None else tokens[seen : seen + limit]


class DraftModel:
    """Guesses what a smaller model with the same tokenizer draws with the same random numbers."""

    def __init__(self, model: GPT, engine: Engine, sample: SampleConfig) -> None:
        self._context_length, self._engine, self._sample = (
            model.config.context_length,
            engine,
            sample,
        )
        self._drafts: dict[Text, Text] = {}  # the draft's own view of each text

    def __call__(self, texts: list[Text], limits: list[int]) -> list[list[int]]:
        """Fewer tokens than a text's limit if the draft's context is full."""
        guesses: list[list[int]] = [[] for _ in texts]
        drafts = [self._sync_draft(text) for text in texts]
        logits_processor = LogitsProcessor(self._sample, None)
        for ahead in range(max(limits)):  # one token for all texts at a time
            has_room = [len(draft.context) <= self._context_length for draft in drafts]
            live = [n for n, limit in enumerate(limits) if ahead < limit and has_room[n]]
            if not live:
                break
            for n, logits in zip(live, self._engine([drafts[n] for n in live]), strict=True):
                text, guessed = texts[n], guesses[n]
                scores = logits_processor(
                    logits[-1], text.prompt_tokens, text.tokens + guessed
                )  # (V,)
                random = draw_uniform(self._sample.seed, text.number, len(text.tokens) + ahead)
                guessed.append(sample_token(scores, self._sample, random))
                drafts[n].context.append(guessed[-1])
        return guesses

    def _sync_draft(self, text: Text) -> Text:
        """The draft's view of a text, brought up to date; its cache is kept unless text slid."""
        draft = self._drafts.setdefault(
            text, Text(text.number, text.prompt_tokens, self._context_length)
        )
        slid = draft.context_start != text.context_start
        draft.context_start, draft.context = text.context_start, list(text.context)
        draft.n_cached = 0 if slid else min(draft.n_cached, len(draft.context) - 1)
        return draft
