"""Choose the kind and vocabulary size of a tokenizer, by what was measured."""

import math

# On average within 1 % of the best of four vocabularies (scripts/LOG.md: How large should the
# vocabulary be?).
MIN_BPE_VOCAB_SIZE = 512
MAX_BPE_VOCAB_SIZE = 32_768
MIN_BPE_TEXT_BYTES = 40_000
VOCAB_ENTRIES_PER_WIDTH = 20
TEXT_BYTES_PER_VOCAB_ENTRY = 1000
VOCAB_ENTRIES_PER_ROOT_TOKEN = 1.1


def choose_tokenizer(
    kind: str, text_bytes: int, d_model: int, training_tokens: int | None = None
) -> tuple[str, int | None]:
    """Choose kind and vocabulary size for `auto`, or the size for `bpe`.

    The size is the power of two nearest to the least of these, but at least 512: 20 d_model, so
    that the output head costs half as much as four layers; an entry per 1,000 bytes of training
    text, since rare tokens are not learned; and 1.1 sqrt(training_tokens), if the number that
    training will read is given. With `auto`, less than 40 KB of text become bytes.
    """
    if kind == "auto" and text_bytes < MIN_BPE_TEXT_BYTES:
        return "byte", None
    size = min(VOCAB_ENTRIES_PER_WIDTH * d_model, text_bytes / TEXT_BYTES_PER_VOCAB_ENTRY)
    if training_tokens is not None:
        size = min(size, VOCAB_ENTRIES_PER_ROOT_TOKEN * math.sqrt(training_tokens))
    size = min(max(size, MIN_BPE_VOCAB_SIZE), MAX_BPE_VOCAB_SIZE)
    return "bpe", 1 << round(math.log2(size))
