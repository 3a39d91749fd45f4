"""Choose the kind and vocabulary size of a tokenizer, by what was measured."""

import math

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

    Bits per byte of the text's part for testing after --minutes on one core of an AMD EPYC with
    AVX512-BF16, one run each:

        text trained on, minutes        tokens read   512   1024   2048   4096
        Python's manual,     0.4 MB, 2        1.5 M  1.521  1.554  1.584  1.617
        standard library,    0.8 MB, 1        1.4 M  1.518  1.556  1.664  1.777
        German manual pages, 0.8 MB, 1        1.4 M  1.951  1.966  1.996  2.008
        Shakespeare,         0.9 MB, 1        1.3 M  2.049  2.020  1.998  2.033
        German manual pages, 2.4 MB, 1        2.1 M  1.478  1.422  1.404  1.418
        Chinese pages,       4.8 MB, 0.5      0.8 M  2.736  2.623  2.539  2.653
                                     2        3.8 M         2.090  2.038  2.050
        python-code,         10 MB,  0.5      0.8 M  1.689  1.655  1.705  1.856
                                     2        3.6 M         1.398  1.388  1.418

    docs/experiments.md has more. In 250 steps and without an induction head, the default
    configuration ends at 1.533 with 512 and at 1.589 with 4,096, on the validation part.
    """
    if kind == "auto" and text_bytes < MIN_BPE_TEXT_BYTES:
        return "byte", None
    size = min(VOCAB_ENTRIES_PER_WIDTH * d_model, text_bytes / TEXT_BYTES_PER_VOCAB_ENTRY)
    if training_tokens is not None:
        size = min(size, VOCAB_ENTRIES_PER_ROOT_TOKEN * math.sqrt(training_tokens))
    size = min(max(size, MIN_BPE_VOCAB_SIZE), MAX_BPE_VOCAB_SIZE)
    return "bpe", 1 << round(math.log2(size))
