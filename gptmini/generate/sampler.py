"""The sampling loop: draw the next token of every text, until all have ended.

Texts are sampled as a batch; each gets the tokens that it would get alone: to the bit with the
compiled engine, elsewhere up to the rounding of logits. When a text fills the context of the model,
`sample.overflow` decides: `error` refuses it before it begins, `stop` ends it, and `slide` keeps
the newer half of the context and prefills it again from position 0. Sliding works for learned and
rotary positions and for windowed layers alike, costs about one prefilled token for each token
drawn, and shows the model the same tokens at the same positions with and without the cache.

V is the vocabulary.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptmini.errors import ConfigError
from gptmini.generate.sequence import Sequence

if TYPE_CHECKING:
    from gptmini.generate.engine import Engine


def check_overflow(text: Sequence) -> None:
    """Refuse a text that would not fit the context, under `overflow: error`."""
    n_prompt = len(text.prompt_tokens)
    n_new = text.sample.max_new_tokens
    # The last token is never fed to the model, so it needs no room.
    if text.sample.overflow == "error" and n_prompt + n_new - 1 > text.context_length:
        raise ConfigError(
            f"sample.overflow: {n_prompt} prompt tokens and {n_new} new ones "
            f"do not fit the context of {text.context_length}; "
            f"lower max_new_tokens or set overflow to slide"
        )


@torch.inference_mode()
def sample_tokens(
    engine: "Engine", texts: list[Sequence]
) -> Iterator[tuple[Sequence, int, Tensor]]:
    """Draw tokens until every text has a `finish_reason`.

    Yields each text with its new token and the model's logits (V,) for it. Sets the reasons
    "length" and "context"; the caller may end a text by setting another.
    """
    while live := [text for text in texts if text.finish_reason is None]:
        last_logits = [logits[-1] for logits in engine(live)]  # (V,) each
        tokens = engine.draw(last_logits, live)  # as filters.draw_tokens does
        for text, logits in zip(live, last_logits, strict=True):
            if text.error is not None:
                raise text.error
            append_token(text, tokens[text])
            yield text, tokens[text], logits


def append_token(text: Sequence, token: int) -> None:
    """Add a drawn token to a text; end the text or slide its context if that is full."""
    text.tokens.append(token)
    text.context.append(token)
    if len(text.tokens) == text.sample.max_new_tokens:
        text.finish_reason = "length"
    elif len(text.context) > text.context_length:
        if text.sample.overflow == "stop":
            text.finish_reason = "context"
            return
        # Slide (`error` was refused by check_overflow), and keep half: sliding by one would
        # recompute the whole context for each token.
        kept = max(1, text.context_length // 2)
        text.context_start += len(text.context) - kept
        text.context = text.context[-kept:]
        text.n_cached = 0
