"""Conversations as training data: what is refused, and which tokens are learned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmini.config.settings import DataConfig
from gptmini.data import corpus
from gptmini.data.chats import IGNORED, ChatEncoder
from gptmini.data.formats import read_documents
from gptmini.data.text import find_text
from gptmini.data.token_file import Corpus
from gptmini.errors import DataError
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.chunks import Place
from gptmini.tokenizer.load import create_tokenizer, from_dict
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.samples import CHAT_TOKENIZER, TOKENIZER
from tests.support import gpt2, tiny

ASK = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A cat."}
SYSTEM = {"role": "system", "content": "Be brief"}
END = "<|im_end|>"
SHAREGPT = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A cat."}]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(path: Path, **settings: Any) -> list[Any]:
    data = DataConfig.model_validate(settings)
    (file,) = find_text([str(path)], data).files
    return list(read_documents(file, data.text_key, ""))


def with_template(template: str) -> Tokenizer:
    data = json.loads(CHAT_TOKENIZER.to_json()) | {"chat_template": template}
    return BpeTokenizer.from_dict(data)


def test_a_vocabulary_is_for_conversations_that_are_held_out_alone(tmp_path):
    """Also if the same text has one without them in the cache."""
    text = tmp_path / "a.txt"
    text.write_text("What is it? A cat. " * 9)
    held_out = write(tmp_path / "a.jsonl", *[{"messages": [ASK, ANSWER]}] * 9)
    for validation, has_template in ((text, False), (held_out, True)):
        data = {"path": str(text), "validation_path": str(validation)}
        prepared = corpus.prepare_corpus(tiny(data=data, tokenizer={"kind": "char"}))
        assert (prepared.tokenizer.chat_template is not None) == has_template


def encode(*messages: dict[str, Any], tokenizer: Tokenizer = CHAT_TOKENIZER) -> np.ndarray:
    place = Place("a.jsonl", 1, is_record=True)
    return ChatEncoder(tokenizer).encode(list(messages), place)


def spell(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    return "".join(names.get(token) or tokenizer.decode([token]) for token in tokens.tolist())


def spell_learned(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
    """The stretches of tokens that are learned."""
    starts = np.flatnonzero(np.diff(tokens >= IGNORED)) + 1
    parts = np.split(tokens, starts)
    return [spell(tokenizer, part) for part in parts if part[0] < IGNORED]


def test_messages_are_read_from_any_field_beside_others(tmp_path):
    record = {"id": 3, "messages": [ASK, {**ANSWER, "tool_calls": None, "name": None}]}
    path = write(tmp_path / "a.jsonl", record, {"text": "plain"}, {"text": "b", "messages": 1})
    first, *texts = read(path)
    assert first.messages == [ASK, ANSWER]
    assert str(first.place) == f"{path}:1"
    assert first.text == "What is it?\nA cat."
    assert [chunk.text for chunk in texts] == ["plain", "b"]
    path = write(tmp_path / "b.jsonl", {"talk": [ASK, ANSWER]})
    assert read(path, text_key="talk")[0].messages == [ASK, ANSWER]


def test_messages_are_read_from_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [[ASK, ANSWER], [SYSTEM, ASK, ANSWER]]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"messages": rows, "source": ["x", "y"]}), path)
    assert [chunk.messages for chunk in read(path)] == rows
    parquet.write_table(pyarrow.table({"messages": rows, "tools": [["a"], []]}), path)
    with pytest.raises(DataError, match=r"a\.parquet:1: tools: not supported"):
        read(path)


def test_messages_of_sharegpt_are_read_as_ours(tmp_path):
    system = {"from": "system", "value": "Be brief"}
    path = write(tmp_path / "a.jsonl", {"conversations": [system, *SHAREGPT]})
    (chunk,) = read(path)
    assert chunk.messages == [SYSTEM, ASK, ANSWER]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: empty"),
    ({"messages": ["Hi"]}, r"messages\[0\]: not an object"),
    ({"messages": [ASK]}, "messages: no assistant message"),
    ({"messages": [ANSWER]}, r"messages\[0\]: starts with the assistant"),
    ({"messages": [{"content": "a"}, ANSWER]}, r"messages\[0\]\.role: missing; use system, "),
    ({"messages": [{**ASK, "role": ["user"]}, ANSWER]}, r"messages\[0\]\.role: \['user'\]; use"),
    ({"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\]\.content: missing"),
    ({"messages": [ASK, {**ANSWER, "content": [1]}]}, r"\.content: \[1\], not text"),
    ({"conversations": [{"from": "human", "value": 5}]}, r"conversations\[0\]\.value: 5, not text"),
    ({"messages": [ASK, {**ANSWER, "content": " "}]}, r"messages\[1\]\.content: empty"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": [1]}]}, r"messages\[1\]\.tool_calls: not supp"),
    ({"messages": [ASK, {**ANSWER, "refusal": "no"}]}, r"messages\[1\]\.refusal: not supp"),
    ({"messages": [ASK, {**ANSWER, "weight": 0}]}, r"messages\[1\]\.weight: not supp"),
    ({"messages": [ASK, {**ANSWER, "role": "tool"}]}, r"messages\[1\]\.role: 'tool'; use"),
    ({"messages": [ASK, {**ANSWER, "content": None}]}, r"messages\[1\]\.content: missing"),
    ({"conversations": SHAREGPT, "tools": "[]"}, "tools: not supported"),
]


@pytest.mark.parametrize(("record", "problem"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_named(tmp_path, record, problem):
    path = write(tmp_path / "a.jsonl", {"messages": [ASK, ANSWER]}, record)
    with pytest.raises(DataError, match=problem) as error:
        read(path)
    (line,) = error.value.lines
    assert line.startswith(f"{path}:2: ")
    assert len(line) < len(str(path)) + 300


def test_answers_are_learned_up_to_their_end():
    tokens = encode(SYSTEM, ASK, ANSWER, ASK, {**ANSWER, "content": "Two\ncats"}, ASK)
    assert spell_learned(CHAT_TOKENIZER, tokens) == [f"A cat.{END}", f"Two\ncats{END}"]
    numbers = tokens & ~IGNORED
    assert numbers[0] == CHAT_TOKENIZER.eos_token_id
    assert tokens[0] >= IGNORED  # that another document begins is nothing to learn
    assert numbers[1] == CHAT_TOKENIZER.special_tokens["<|im_start|>"]


def test_a_space_at_the_end_of_a_prompt_stays_there():
    """As when generating, where transformers' prompts end with it."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = with_template(template)
    tokens = encode(ASK, ANSWER, tokenizer=tokenizer)
    assert spell_learned(tokenizer, tokens) == [f"A cat.{END}"]


def test_a_template_that_writes_the_separator_gets_no_second():
    tokenizer = with_template("<|endoftext|>" + str(CHAT_TOKENIZER.chat_template))
    tokens = encode(ASK, ANSWER, tokenizer=tokenizer) & ~IGNORED
    assert (tokens == tokenizer.eos_token_id).sum() == 1


REFUSED = {
    # As DeepSeek-R1's, whose prompts begin the thoughts.
    "renders prompt and answer inconsistently": (
        "{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant<think>{% endif %}"
    ),
    "ends no answer": "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}",
    "messages: no system message": "{{ raise_exception('no system message') }}",
    "tokenizer.json: its chat template fails": "{% for %}",
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_template_that_hides_the_answers_is_refused(problem):
    with pytest.raises(DataError, match=f"^a.jsonl:1: .*{problem}") as error:
        encode(ASK, ANSWER, ASK, ANSWER, tokenizer=with_template(REFUSED[problem]))
    assert len(error.value.lines) == 1


# As Qwen3's, which leaves the thoughts out of all answers but the last.
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_each_answer():
    tokenizer = with_template(FORGETFUL)
    second = {**ANSWER, "content": "Two cats."}
    tokens = encode(ASK, ANSWER, ASK, second, tokenizer=tokenizer)
    begun = f"userWhat is it?{END}assistant"
    answers = [f"<think></think>A cat.{END}", f"<think></think>Two cats.{END}"]
    assert spell_learned(tokenizer, tokens) == answers
    whole = spell(tokenizer, tokens & ~IGNORED)
    document = "<|endoftext|>"
    assert whole == (
        f"{document}{begun}{answers[0]}{document}{begun}A cat.{END}{begun}{answers[1]}"
    )


def test_a_last_answer_that_is_rewritten_is_learned_as_it_was_given():
    tokenizer = with_template(FORGETFUL)
    answered = encode(ASK, ANSWER, tokenizer=tokenizer)
    assert encode(ASK, ANSWER, ASK, tokenizer=tokenizer).tolist() == answered.tolist()


def test_without_a_template_conversations_are_refused():
    with pytest.raises(DataError, match=r"a\.jsonl:1: a conversation, but the tokenizer has no"):
        encode(ASK, ANSWER, tokenizer=TOKENIZER)


def prepared(path: Path, kind: str, **data: Any) -> Corpus:
    config = tiny(data={"path": str(path), **data}, tokenizer={"kind": kind})
    return corpus.prepare_corpus(config)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "gpt2"])
def test_a_new_model_gets_the_tokens_and_the_template_of_chatml(tmp_path, kind):
    if kind == "gpt2":
        gpt2()
    turns = [SYSTEM, {**ASK, "content": "Why?"}, ANSWER, ASK, {**ANSWER, "content": "No."}]
    records = [{"messages": turns}] * 40 + [{"text": "plain prose. " * 10}] * 9
    learned = prepared(write(tmp_path / "a.jsonl", *records), kind)
    tokenizer = learned.tokenizer
    names = ["<|endoftext|>", "<|im_start|>", END]
    assert list(tokenizer.special_tokens) == names
    if kind != "gpt2":
        assert sorted(tokenizer.special_tokens.values())[-1] == tokenizer.vocab_size - 1
    ends = [tokenizer.special_tokens[name] for name in (END, "<|endoftext|>")]
    assert tokenizer.end_tokens == ends
    marked = learned.training[0].read_marked(0, len(learned.training[0]))
    whole = spell(tokenizer, marked & ~IGNORED)
    assert whole.startswith(
        f"<|endoftext|><|im_start|>system\nBe brief{END}\n<|im_start|>user\nWhy?{END}\n"
        f"<|im_start|>assistant\nA cat.{END}\n"
    )
    answers = {f"A cat.{END}", f"No.{END}"}
    found = spell_learned(tokenizer, marked)
    assert set(found[:-1]) == answers
    assert found[-1].startswith("<|endoftext|>plain prose.")  # beside them, prose counts whole
    again = from_dict(json.loads(tokenizer.to_json()))
    assert again.to_json() == tokenizer.to_json()
    assert again.chat_fingerprint == tokenizer.chat_fingerprint != tokenizer.fingerprint
    assert again.fingerprint != create_tokenizer("byte").fingerprint


def test_a_question_to_validate_on_is_read(tmp_path):
    records = [{"messages": [ASK, ANSWER]}] * 90
    learned = prepared(write(tmp_path / "a.jsonl", *records), "bpe")
    question = spell(learned.tokenizer, np.array(learned.read_question()))
    asked = f"<|im_start|>user\nWhat is it?{END}\n<|im_start|>assistant\n"
    assert question == f"<|endoftext|>{asked}"


def test_prose_alone_gets_neither(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"text": "plain prose. " * 10}] * 9)
    tokenizer = prepared(path, "byte").tokenizer
    assert (tokenizer.chat_template, tokenizer.vocab_size) == (None, 257)


def test_too_few_conversations_are_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"messages": [ASK, ANSWER]}] * 2)
    config = tiny(data={"path": str(path)}, model={"context_length": 256})
    with pytest.raises(DataError, match=r"too short: 2 conversations, .* bytes; "):
        corpus.prepare_corpus(config)


@pytest.mark.parametrize("split", ["tail", "documents"])
def test_conversations_are_held_out_whole(tmp_path, split):
    records = [{"messages": [ASK, {**ANSWER, "content": f"{n}."}]} for n in range(200)]
    path = write(tmp_path / "a.jsonl", *records)
    settings = DataConfig(split=split)
    parts = replace(find_text([str(path)], settings), validation=0.1, test=0.1)
    found: dict[str, list[int]] = {"training": [], "validation": [], "test": []}
    for side, chunk in parts.iter_splits(found.keys()):  # type: ignore[arg-type]
        assert chunk.messages is not None
        found[side].append(int(chunk.messages[1]["content"][:-1]))
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(200))
    assert all(5 <= len(found[side]) <= 40 for side in ("validation", "test"))
    if split == "tail":
        assert found["training"] + found["test"] + found["validation"] == list(range(200))


def test_an_answer_may_have_more_than_one_end():
    """What the template writes behind the first end belongs to the answer up to the last."""
    template = CHAT_TOKENIZER.chat_template.replace(
        "<|im_end|>\n{% endfor %}",
        "<|im_end|>{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}",
    )
    tokenizer = with_template(template)
    tokens = encode(ASK, ANSWER, tokenizer=tokenizer)
    assert spell_learned(tokenizer, tokens) == [f"A cat.{END}<|endoftext|>"]


def test_a_user_may_say_nothing():
    tokens = encode({"role": "user", "content": ""}, ANSWER)
    assert "<|im_start|>user\n<|im_end|>\n" in spell(CHAT_TOKENIZER, tokens & ~IGNORED)
    assert spell_learned(CHAT_TOKENIZER, tokens) == [f"A cat.{END}"]
