"""The sampling loop: draw the next token of every text, until all have ended.

Texts are sampled as a batch; each gets the tokens that it would get alone: to the bit with the
compiled engine, elsewhere up to the rounding of logits. When a text fills the context of the model,
`sample.overflow` decides: `error` refuses it before it begins, `stop` ends it, and `slide` keeps
the newer half of the context and prefills it again from position 0. Sliding works for learned and
rotary positions and for windowed layers alike, costs about one prefilled token for each token
drawn, and shows the model the same tokens at the same positions with and without the cache.

`speculative.py` draws the same tokens, several in one pass.

V is the vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gptmini.config.settings import SampleConfig
from gptmini.errors import ConfigError, GptminiError
from gptmini.generate.engine import Engine
from gptmini.generate.filters import LogitsProcessor, make_random_number, sample_token
from gptmini.generate.gpu.device_draw import draw_on_device
from gptmini.generate.texts import Text

# A device of these types draws for all texts at once; for others the host draws. The GPUs of Apple
# and some of Intel's have no 64-bit floats, which the weights of tokens need.
DRAWING_DEVICES = ("cuda",)


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
    processor = LogitsProcessor(sample, bias)
    while live := [text for text in texts if text.finish_reason is None]:
        last_logits = [logits[-1] for logits in engine(live)]  # (V,) each
        drawn = draw_tokens(last_logits, live, [processor] * len(live))
        for text, logits, token in zip(live, last_logits, drawn, strict=True):
            if isinstance(token, GptminiError):
                raise token
            append_token(text, token, sample, context_length)
            yield text, token, logits


def draw_tokens(
    logits: Sequence[Tensor], texts: Sequence[Text], processors: Sequence[LogitsProcessor]
) -> Iterator[int | GptminiError]:
    """Draw the next token of each text from the model's logits, (V,) each, or give its error."""
    # Told to be deterministic, PyTorch refuses to sum weights up on a GPU.
    on_device = bool(logits) and logits[0].device.type in DRAWING_DEVICES
    if on_device and not torch.are_deterministic_algorithms_enabled():
        yield from draw_on_device(torch.stack(list(logits)), texts, processors)
        return
    for row, text, processor in zip(copy_to_host(logits), texts, processors, strict=True):
        try:
            yield draw_token(row, text, processor)
        except GptminiError as error:  # such as a ban of every token
            yield error


def draw_token(logits: Tensor, text: Text, processor: LogitsProcessor) -> int:
    """Draw the next token of a text from the model's logits (V,) on the host."""
    scores = processor(logits, text.prompt_tokens, text.tokens)  # (V,)
    if text.allowed_first is not None and not text.tokens:
        scores = scores.masked_fill(~text.allowed_first, -torch.inf)
    random = make_random_number(processor.sample.seed, text.number, len(text.tokens))
    return sample_token(scores, processor.sample, random)


def copy_to_host(logits: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy logits, (..., V) each, to the host, all at once; there, return them as they are."""
    if not logits or logits[0].device.type == "cpu":
        return logits
    rows = [each.reshape(-1, each.shape[-1]) for each in logits]
    on_host = torch.cat(rows).cpu().split([len(each) for each in rows])
    return [copy.view(each.shape) for copy, each in zip(on_host, logits, strict=True)]


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
