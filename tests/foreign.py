"""Tokenizers as other models have them, learned by the package `tokenizers` itself."""

import json
from typing import Any

import pytest

from tests.support import prose

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hub")
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer

TEXT = prose()
ODD = "ab zé東\u00a0'1.\n\t\r!Z²٣\u017f👍\x1c\u2028\u0301\u0130\u1e0b\u0323\u2581 _<s>"
ADDED = [
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("left", special=False, lstrip=True, normalized=False),
    AddedToken("right", special=False, rstrip=True, normalized=False),
    AddedToken("word", special=False, single_word=True, normalized=False),
    AddedToken("Été", special=False, normalized=True),
    AddedToken("\n\n", special=False, normalized=False),
]
SPECIAL = [
    AddedToken("<unk>", special=True),
    AddedToken("<s>", special=True),
    AddedToken("</s>", special=True),
    AddedToken("<mask>", special=True, lstrip=True, normalized=False),
]
MENTIONED = "<think> x left right  word words  été Été \n\n\n <s></s>  <mask> </think>"
BPE: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
BYTES = [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
SENTENCEPIECE = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def learn(model: Any, trainer: Any, **parts: Any) -> Any:
    """A tokenizer of some parts, learned from a text, with added tokens of every flag."""
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator([TEXT, ODD * 9, "a   1  \n" * 99], trainer)
    made.add_special_tokens(SPECIAL)
    made.add_tokens(ADDED)
    return made


def learn_bpe(model: dict[str, Any], pre_tokenizer: Any = None, **parts: Any) -> Any:
    """A BPE whose tokens are within words, also where the tokenizer does not split words."""
    special = ["<unk>", "<s>", "</s>", *(token.content for token in BYTES)]
    alphabet = []
    words = pre_tokenizers.Metaspace("\u2581", "never", split=True)
    if not model:
        special = special[:3]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        words = pre_tokenizer
        parts["decoder"] = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    made = learn(models.BPE(**model), trainer, pre_tokenizer=words, **parts)
    made.pre_tokenizer = pre_tokenizer
    content = json.loads(made.to_str())
    # The bytes were special for the trainer only.
    kept = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": kept}))


def split(pattern: str) -> Any:
    by_words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_words, pre_tokenizers.ByteLevel(False, use_regex=False)])


def add_bos(tokenizer: Any) -> Any:
    template = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.post_processor = template
    return tokenizer


def make_llama() -> Any:
    """As Llama 2's: a space is put before every text."""
    prepend = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    decoder = decoders.Sequence([*SENTENCEPIECE, decoders.Strip(" ", 1, 0)])
    content = json.loads(learn_bpe(BPE, normalizer=prepend, decoder=decoder).to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    # Other pairs that make the same tokens, behind all those that count.
    pairs = [[token[0], token[1:]] for token in vocab if token[0] in vocab and token[1:] in vocab]
    merges += [pair for pair in pairs if pair not in merges]
    return add_bos(tokenizers.Tokenizer.from_str(json.dumps(content)))


def make_mistral() -> Any:
    """As Mistral 0.3's: a space is put before a text, but not behind a special token."""
    metaspace = pre_tokenizers.Metaspace("\u2581", "first", split=False)
    decoder = decoders.Sequence([*SENTENCEPIECE, decoders.Strip(" ", 1, 0)])
    return add_bos(learn_bpe(BPE, pre_tokenizer=metaspace, decoder=decoder))


def make_gemma() -> Any:
    decoder = decoders.Sequence(SENTENCEPIECE)
    return add_bos(learn_bpe(BPE, normalizer=normalizers.Replace(" ", "\u2581"), decoder=decoder))


def make_unigram() -> Any:
    trainer = UnigramTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<unk>", "<s>"], unk_token="<unk>"
    )
    parts = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    return learn(models.Unigram(), trainer, normalizer=normalizers.NFKC(), **parts)


GPT2 = pre_tokenizers.ByteLevel(False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), GPT2])
QWEN = split(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MAKERS = {
    "GPT-2": lambda: learn_bpe({}, pre_tokenizer=GPT2),
    "SmolLM2": lambda: learn_bpe({}, pre_tokenizer=DIGITS),
    "Qwen": lambda: learn_bpe({}, pre_tokenizer=QWEN, normalizer=normalizers.NFC()),
    "prefix": lambda: learn_bpe({}, pre_tokenizer=pre_tokenizers.ByteLevel(True)),
    "Llama 2": make_llama,
    "Mistral": make_mistral,
    "Gemma": make_gemma,
    "Unigram": make_unigram,
}
