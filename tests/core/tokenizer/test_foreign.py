"""Tokenizers of others: as the library `tokenizers` runs them, whole or in parts."""

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmini.errors import DataError, MachineError
from gptmini.tokenizer import foreign
from gptmini.tokenizer.foreign import ForeignTokenizer, load_library
from gptmini.tokenizer.load import from_dict, load_tokenizer
from tests.foreign import MAKERS, MENTIONED, ODD, TEXT, tokenizers


def build(library: Any, eos_token: str = "<s>") -> ForeignTokenizer:
    file = library.to_str()
    return ForeignTokenizer(file, load_library(file), 2000, eos_token, ["</s>"])


class Pair:
    """One tokenizer, there and here."""

    def __init__(self, name: str) -> None:
        self.library = MAKERS[name]()
        self.plain = tokenizers.Tokenizer.from_str(self.library.to_str())
        self.plain.encode_special_tokens = True  # as text
        self.ours = build(self.library)

    def check(self, text: str) -> None:
        expected = self.plain.encode(text, add_special_tokens=False).ids
        tokens = self.ours.encode(text).tolist()
        assert tokens == expected, text
        read = self.library.encode(text, add_special_tokens=False).ids
        assert self.ours.encode_special(text).tolist() == read, text
        for each in (tokens, read):
            kept = [token for token in each if token != self.ours.eos_token_id]
            assert self.ours.decode(each) == self.library.decode(kept, skip_special_tokens=False)
        # The parts of a stream make the same text.
        streamed = b"".join(map(self.ours.decode_token, tokens)).decode(errors="replace")
        first = " " if self.ours.drops_first_space else ""
        assert streamed.removeprefix(first) == self.ours.decode(tokens)


PAIRS = {name: Pair(name) for name in MAKERS}


@pytest.mark.parametrize("name", PAIRS)
def test_the_tokens_are_those_of_the_library(name):
    for text in (TEXT, "", MENTIONED, "don't I'LL", " " * 99 + "a", "é" * 99):
        PAIRS[name].check(text)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(PAIRS)),
    st.text(st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_the_tokens_of_any_text_are_those_of_the_library(name, text):
    PAIRS[name].check(text)


@pytest.mark.parametrize("name", PAIRS)
def test_a_text_in_parts_has_the_tokens_of_the_whole(name, monkeypatch):
    """A space that is put before a text is not put before its parts."""
    ours = PAIRS[name].ours
    text = (TEXT + " été, x1 \n\n東京。 It's 12 o'clock!\n  def f():\n") * 2
    whole = ours.encode(text).tolist()
    monkeypatch.setattr(foreign, "BLOCK_SIZE", 100)
    assert ours.encode(text).tolist() == whole
    cut = text.index(" ", 200)
    parts = ours.encode(text[:cut]).tolist() + ours.encode(text[cut:], continues=True).tolist()
    assert parts == whole
    assert ours.encode("", continues=True).tolist() == []


def test_a_part_that_joins_with_what_stands_before_it_loses_nothing():
    vocab = {character: number for number, character in enumerate(["</s>", "\n", "a", "t", "\nt"])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("\n", "t")]))
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens(["</s>"])
    assert build(library, "</s>").encode("tat", continues=True).tolist() == [3, 2, 3]


def test_an_answer_begins_as_a_model_would_write_it():
    """In a chat it is encoded apart from the prompt."""
    for name in ("Llama 2", "Mistral", "Gemma", "Qwen"):
        ours = PAIRS[name].ours
        prompt, answer = "<s>It was\n", "the best</s>"
        tokens = ours.encode_special(prompt).tolist()
        tokens += ours.encode_special(answer, continues=True).tolist()
        assert tokens == ours.encode_special(prompt + answer).tolist(), name


def test_text_is_no_special_token_but_may_be_another_added_token():
    ours = PAIRS["GPT-2"].ours
    assert list(ours.special_tokens) == ["<unk>", "<s>", "</s>", "<mask>"]
    think = PAIRS["GPT-2"].library.token_to_id("<think>")
    assert think in ours.encode("a<think>b").tolist()
    assert ours.decode_token(think) == b"<think>"
    special = set(ours.special_tokens.values())
    assert not special & set(ours.encode("a<s></s><mask>").tolist())
    assert {1, 2} < set(ours.encode_special("a<s></s>  <mask>").tolist())
    assert ours.encode_special("b  <mask>").tolist()[-2:] == [
        *ours.encode("b").tolist(),
        ours.special_tokens["<mask>"],
    ]  # it takes the spaces before it
    lengths = ours.compute_byte_lengths()
    assert lengths[think] == 7
    assert not lengths[list(special)].any()


def test_dropout_truncation_and_padding_are_off():
    library = MAKERS["GPT-2"]()
    expected = library.encode(TEXT, add_special_tokens=False).ids
    library.enable_truncation(5)
    library.enable_padding(length=9000)
    library.model.dropout = 0.9
    ours = build(library)
    assert json.loads(ours.file)["model"]["dropout"] == pytest.approx(0.9)
    for _ in range(3):
        assert ours.encode(TEXT).tolist() == expected
        assert ours.encode_special(TEXT).tolist() == expected


def test_the_file_is_kept_and_copies_are_equal(tmp_path):
    library = MAKERS["Llama 2"]()
    library.model.dropout = 0.5
    file = json.dumps(json.loads(library.to_str()), indent=3) + "\r\n\n"
    ours = ForeignTokenizer(file, load_library(file), 2000, "<s>", ["</s>"], True, "A", {})
    (tmp_path / "t.json").write_text(ours.to_json())
    copies = [load_tokenizer(tmp_path / "t.json"), from_dict(json.loads(ours.to_json()))]
    copies += [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for each in copies:
        assert isinstance(each, ForeignTokenizer)
        assert each.file == file
        assert each.to_json() == ours.to_json()
        assert each.fingerprint == ours.fingerprint
        assert each.encode(TEXT + MENTIONED).tolist() == ours.encode(TEXT + MENTIONED).tolist()
    other = build(library)
    assert other.fingerprint != ours.fingerprint


def test_lone_surrogates_are_refused_as_elsewhere():
    for encode in (PAIRS["GPT-2"].ours.encode, PAIRS["GPT-2"].ours.encode_special):
        with pytest.raises(UnicodeEncodeError):
            encode("a\ud800")


@pytest.mark.parametrize(
    "change",
    [{"file": "{}"}, {"file": 3}, {"document": "x"}, {"vocab_size": "9"}, {"chat_template": 5}],
)
def test_a_damaged_file_is_reported(change, tmp_path):
    data = json.loads(PAIRS["GPT-2"].ours.to_json())
    (tmp_path / "t.json").write_text(json.dumps(data | change))
    with pytest.raises(DataError, match=r"t\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_a_panic_of_the_library_at_a_text_is_an_error_in_one_line():
    """Its regular expressions give up where they would backtrack for minutes."""
    library = MAKERS["GPT-2"]()
    decoders = tokenizers.decoders
    pre_tokenizers = tokenizers.pre_tokenizers
    by_words = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([by_words, pre_tokenizers.ByteLevel(False)])
    ours = build(library)
    assert ours.encode("ab").tolist()
    with pytest.raises(DataError, match=r"tokenizer imported: fails with a text .*; choose"):
        ours.encode("a" * 40 + "b")
    by_words = decoders.Replace(tokenizers.Regex("(a+)+$"), "")
    library.decoder = decoders.Sequence([decoders.Fuse(), by_words])
    ours = build(library)
    many = ours.encode("aa").tolist() * 20
    with pytest.raises(DataError, match="tokenizer imported: fails with a text"):
        ours.decode([*many, *ours.encode("b").tolist()])


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MachineError, match=r"tokenizers .*\[hub\]"):
        from_dict(json.loads(PAIRS["GPT-2"].ours.to_json()))
