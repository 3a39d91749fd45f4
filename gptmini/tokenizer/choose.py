"""Choose the kind and vocabulary size of a tokenizer, by what was measured."""

import math

MIN_BPE_VOCAB_SIZE = 512
MAX_BPE_VOCAB_SIZE = 32_768
TEXT_BYTES_PER_VOCAB_ENTRY = 128
TRAINING_TOKENS_PER_VOCAB_ENTRY = 1000


def choose_tokenizer(
    kind: str, text_bytes: int, d_model: int, training_tokens: int | None = None
) -> tuple[str, int | None]:
    """Choose kind and vocabulary size for `auto`, or the size for `bpe`.

    The size is the power of two nearest to 20 d_model, so that the output head costs half as much
    as four layers. A text of less than 128 bytes per entry gets a smaller one, since rare tokens
    are not learned. Best bits per byte on held-out text within 500 steps of the default model:

        corpus                    byte  bpe 512   1024   2048   4096   8192
        Shakespeare,    0.1 MB    2.33     2.21   2.18
        python-docs,    0.5 MB    1.67     1.69   1.66   1.65   1.60   1.58
        Shakespeare,    1.1 MB    2.33     2.15   2.10   2.03   1.98   1.97
        python-code,   10   MB    1.92     1.79   1.76   1.69   1.64   1.58
        seconds a step            0.13     0.14   0.15   0.16   0.19   0.25

    `training_tokens`, the number that training will read, allows one entry per 1,000 of them, but
    at least 512. Best bits per byte in equal seconds, with models of the size that `--minutes`
    chooses for them:

        corpus, tokens read              char  bpe 512   1024   2048   4096
        python-docs,  0.5 M (4 layers)   1.92     1.79
        python-docs,  0.6 M                      1.694  1.700
        python-docs,  1.2 M                      1.636  1.637         1.712
        python-code,  1.1 M                             1.898  1.913
        python-code,  2.3 M                             1.432  1.428
    """
    size = min(20 * d_model, text_bytes // TEXT_BYTES_PER_VOCAB_ENTRY, MAX_BPE_VOCAB_SIZE)
    if training_tokens is not None:
        readable = training_tokens // TRAINING_TOKENS_PER_VOCAB_ENTRY
        size = min(size, max(readable, MIN_BPE_VOCAB_SIZE))
    vocab_size = 1 << round(math.log2(max(size, 1)))
    if kind == "auto" and vocab_size < MIN_BPE_VOCAB_SIZE:
        return "byte", None
    return "bpe", max(vocab_size, MIN_BPE_VOCAB_SIZE)
