import pytest

from gptmini.tokenizer.choose import choose_tokenizer


@pytest.mark.parametrize(("tokens", "vocab_size"), [(0, 512), (850_000, 1024), (10**8, 4096)])
def test_few_tokens_get_a_small_vocabulary(tokens, vocab_size):
    assert choose_tokenizer("auto", 10**7, 192, tokens) == ("bpe", vocab_size)
    assert choose_tokenizer("auto", 30_000, 192, tokens) == ("byte", None)


@pytest.mark.parametrize(
    ("text_bytes", "d_model", "expected"),
    [
        (39_000, 192, ("byte", None)),
        (41_000, 192, ("bpe", 512)),
        (1_000_000, 192, ("bpe", 1024)),
        (10**12, 192, ("bpe", 4096)),
        (10**12, 16, ("bpe", 512)),
        (10**12, 10**6, ("bpe", 32768)),
    ],
)
def test_the_vocabulary_fits_text_and_model(text_bytes, d_model, expected):
    assert choose_tokenizer("auto", text_bytes, d_model, 10**12) == expected
    assert choose_tokenizer("auto", text_bytes, d_model) == expected
    kind, vocab_size = choose_tokenizer("bpe", text_bytes, d_model)
    assert (kind, vocab_size) == ("bpe", expected[1] or 512)
