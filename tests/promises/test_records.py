"""Records that are not understood are refused wherever they come in, and none loses a word.

Each table runs its inputs through all routes that can spell them: the files to train on, and the
messages of a chat.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptmini.config.settings import DataConfig
from gptmini.data.text import find_text
from gptmini.errors import GptminiError
from gptmini.extras.serve.chat import ChatCompletion
from gptmini.extras.serve.limits import Limits
from gptmini.generate.run import Run
from tests.samples import CHAT_TOKENIZER, run_of

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Route = Callable[[Path, list[Any]], list[Any]]


def read(path: Path) -> list[Any]:
    source = find_text([str(path)], DataConfig())
    return [chunk.messages or chunk.text for chunk in source.iter_chunks()]


def read_json_lines(folder: Path, records: list[Any]) -> list[Any]:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return read(path)


def read_parquet(folder: Path, records: list[Any]) -> list[Any]:
    path = folder / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return read(path)


def read_csv(folder: Path, records: list[Any]) -> list[Any]:
    path = folder / "a.csv"
    with path.open("w", newline="") as file:
        names = list(dict.fromkeys(name for record in records for name in record))
        rows = csv.DictWriter(file, names)
        rows.writeheader()
        rows.writerows(records)
    return read(path)


FILES = {"jsonl": read_json_lines, "parquet": read_parquet, "csv": read_csv}
GOOD = {"text": "a good one"}


@pytest.mark.parametrize("route", FILES.values(), ids=FILES)
def test_texts_come_in_whole(tmp_path: Path, route: Route):
    texts = ["one", 'say "hi", you;\tall', "two\nlines\r\n", '\\"', "é東\u2028x"]
    records = [{"id": "1", "text": text} for text in texts]
    assert route(tmp_path, records) == texts


@pytest.mark.parametrize(
    ("record", "routes"),
    [
        ({"text": 1}, ["jsonl", "parquet"]),
        ({"text": ["a"]}, ["jsonl", "parquet"]),
        ({"text": "half \ud800"}, ["jsonl"]),
        ({"other": "a"}, ["jsonl", "parquet", "csv"]),
        ({"messages": "a"}, ["jsonl", "parquet", "csv"]),
        ([["text", "a"]], ["jsonl"]),
        (None, ["jsonl"]),
    ],
)
def test_a_record_without_a_text_is_refused(tmp_path: Path, record, routes):
    for name in routes:
        with pytest.raises(GptminiError, match=r"a\.\w+"):
            FILES[name](tmp_path, [record])


def test_a_record_with_no_text_among_others_is_counted(tmp_path: Path, capsys):
    """A null, or a field left out where it would be null, is no text, as an empty one is."""
    records = [GOOD, {"id": 1}, {"text": None, "id": 2}, {"text": "", "id": 3}, GOOD]
    for route, place in ((read_json_lines, "a.jsonl:2"), (read_parquet, "a.parquet:2")):
        assert route(tmp_path, records) == ["a good one"] * 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"warning: {tmp_path}/{place}: ")
        assert "2 of 5 records" in line


def test_a_first_record_without_the_field_is_refused_at_once(tmp_path: Path):
    with pytest.raises(GptminiError, match=r"a\.jsonl:1: no field 'text' .*remove"):
        read_json_lines(tmp_path, [{"id": 1}, GOOD])


def test_messages_in_parquet_are_what_they_are_in_json_lines(tmp_path: Path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    human = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    for route in (read_json_lines, read_parquet):
        (found,) = route(tmp_path, [{"conversations": messages}])
        assert found == messages
        (found,) = route(tmp_path, [{"text": messages}])
        assert found == messages
        (found,) = route(tmp_path, [{"conversations": human}])
        assert found == messages
        for record, name in (({"text": messages, "tools": ["a"]}, "tools"),):
            with pytest.raises(GptminiError, match=name):
                route(tmp_path, [record])


# -- messages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("records") / "run", CHAT_TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tool_calls": [{"id": "a", "function": {"name": "f"}}]}, "tool_calls"),
        ({"refusal": "no"}, "refusal"),
        ({"weight": 0}, "weight"),
        ({"role": "tool"}, "role"),
        ({"content": None}, "content"),
        ({"content": [{"type": "image_url"}]}, "content"),
    ],
)
def test_a_message_with_more_than_role_and_content_is_refused(tmp_path: Path, run, changes, name):
    ask = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello", **changes}
    routes = [read_json_lines]
    if isinstance(answer["content"], str | None):  # a column has one type
        routes.append(read_parquet)
    for route in routes:
        with pytest.raises(GptminiError, match=rf"messages\[1\]\.{name}: "):
            route(tmp_path, [{"messages": [ask, answer]}])
    limits = Limits(max_waiting=8, max_tokens=50)
    with pytest.raises(GptminiError, match=rf"messages\[1\]\.{name}: "):
        ChatCompletion(run, "chat", limits, {"messages": [ask, answer, ask]})


def test_nulls_of_a_message_say_nothing(tmp_path: Path, run):
    ask = {"role": "user", "content": "Hi", "name": None}
    answer = {"role": "assistant", "content": "Hello", "tool_calls": None, "refusal": None}
    assert read_json_lines(tmp_path, [{"messages": [ask, answer]}])
    assert read_parquet(tmp_path, [{"messages": [ask, answer]}])
    limits = Limits(max_waiting=8, max_tokens=50)
    assert ChatCompletion(run, "chat", limits, {"messages": [answer]}).requests
