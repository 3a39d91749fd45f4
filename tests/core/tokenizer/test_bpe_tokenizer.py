from pathlib import Path

import tiktoken

from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from tests.support import WORDS, bpe_file, gpt2


def test_bpe_round_trips_and_keeps_special_text_as_text(tiny_encoding: tiktoken.Encoding):
    tokenizer = BpeTokenizer(tiny_encoding)
    for text in ["the thermos", "<|endoftext|>", "naïve 東京", ""]:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eos_token_id not in tokens
    assert tokenizer.encode("the").tolist() == [257]


def test_bpe_takes_a_million_spaces(tiny_encoding: tiktoken.Encoding):
    text = " " * 1_000_000 + "the " + "x" * 250_000
    for tokenizer in (BpeTokenizer(tiny_encoding), create_tokenizer("bpe", 300, [WORDS])):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_agrees_with_published_tokens():
    tokenizer = gpt2()
    assert tokenizer.vocab_size == 50257
    assert tokenizer.eos_token_id == 50256
    # "hello world" in the documentation of tiktoken, the prompt of GPT-2's own paper page
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    text = "It's naïve: <|endoftext|> 東京 \n\n\t  def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ends_and_chat_template_are_kept_and_do_not_change_the_tokens(tmp_path: Path):
    special = {"<|endoftext|>": 256, "<|im_end|>": 257}
    files = []
    for more in ({}, {"ends": ["<|im_end|>", "<|endoftext|>"], "chat_template": "{{ messages }}"}):
        (tmp_path / "t.json").write_text(bpe_file(special_tokens=special, **more))
        files.append(load_tokenizer(tmp_path / "t.json"))
    plain, chat = files
    assert (plain.end_tokens, plain.chat_template) == ([256], None)
    assert (chat.end_tokens, chat.chat_template) == ([257, 256], "{{ messages }}")
    assert plain.fingerprint == chat.fingerprint  # one may guess for the other
    (tmp_path / "t.json").write_text(chat.to_json())
    again = load_tokenizer(tmp_path / "t.json")
    assert (again.end_tokens, again.chat_template) == ([257, 256], "{{ messages }}")
