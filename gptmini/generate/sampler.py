"""The sampling loop: draw the next token of every text, until all have ended.

Texts are sampled as a batch; each gets exactly the tokens that it would get alone. When a text
fills the context of the model, `sample.overflow` decides: `error` refuses it before it begins,
`stop` ends it, and `slide` keeps the newer half of the context and prefills it again from position
0. Sliding works for learned and rotary positions and for windowed layers alike, costs about one
prefilled token for each token drawn, and shows the model the same tokens at the same positions with
and without the cache.

`speculative.py` draws the same tokens, several in one pass.

V is the vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError
from gptmini.generate.engine import Engine
from gptmini.generate.filters import LogitsProcessor, draw_uniform, sample_token
from gptmini.generate.texts import Text


def check_overflow(n_prompt: int, sample: SampleConfig, context_length: int) -> None:
    """Refuse a prompt whose text would not fit the context, under `overflow: error`."""
    # The last token is never fed to the model, so it needs no room.
    if sample.overflow == "error" and n_prompt + sample.max_new_tokens - 1 > context_length:
        raise ConfigError(
            f"sample.overflow: {n_prompt} prompt tokens and {sample.max_new_tokens} new ones "
            f"do not fit the context of {context_length}; "
            f"lower max_new_tokens or set overflow to slide"
        )


@torch.inference_mode()
def sample_tokens(
    engine: Engine,
    texts: Sequence[Text],
    sample: SampleConfig,
    context_length: int,
    bias: Tensor | None = None,
) -> Iterator[tuple[Text, int, Tensor]]:
    """Draw tokens until every text has a `finish_reason`.

    Yields each text with its new token and the model's logits (V,) for it. Sets the reasons
    "length" and "context"; the caller may end a text by setting another. `bias` (V,) is added to
    all logits.
    """
    logits_processor = LogitsProcessor(sample, bias)
    while live := [text for text in texts if text.finish_reason is None]:
        for text, logits in zip(live, engine(live), strict=True):
            last = logits[-1]  # (1, V) -> (V,)
            token = draw_token(text, last, logits_processor, sample, context_length)
            yield text, token, last


def draw_token(
    text: Text,
    logits: Tensor,
    logits_processor: LogitsProcessor,
    sample: SampleConfig,
    context_length: int,
) -> int:
    """Draw the next token of a text from the model's logits (V,), and add it to the text."""
    scores = logits_processor(logits, text.prompt_tokens, text.tokens)  # (V,)
    if text.allowed_first is not None and not text.tokens:
        scores = scores.masked_fill(~text.allowed_first, -torch.inf)
    random = draw_uniform(sample.seed, text.number, len(text.tokens))
    token = sample_token(scores, sample, random)
    append_token(text, token, sample, context_length)
    return token


def append_token(text: Text, token: int, sample: SampleConfig, context_length: int) -> None:
    """Add a drawn token to a text; end the text or slide its context if that is full."""
    text.tokens.append(token)
    text.context.append(token)
    if len(text.tokens) == sample.max_new_tokens:
        text.finish_reason = "length"
    elif len(text.context) > context_length:
        if sample.overflow == "stop":
            text.finish_reason = "context"
        # Slide (`error` was refused by check_overflow), and keep half: sliding by one would
        # recompute the whole context for each token.
        kept = max(1, context_length // 2)
        text.context_start += len(text.context) - kept
        text.context = text.context[-kept:]
        text.n_cached = 0
