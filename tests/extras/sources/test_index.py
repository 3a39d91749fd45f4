"""The index of a run's training text: what is in it, where it says that stands, what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gptmini.data.corpus import prepare_corpus
from gptmini.errors import DataError
from gptmini.extras.sources import index as indexes
from gptmini.extras.sources import training_text
from gptmini.extras.sources.find import Copies, search
from gptmini.extras.sources.index import TextIndex
from gptmini.extras.sources.training_text import load_index
from tests.support import tiny

SEA = "The sea was calm and the sky was grey that day."
HILL = "".join(map(chr, range(0x4E00, 0x4E18)))
FILLER = "".join(f"{n:06} " for n in range(400))
RUN = Path("runs/my")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def open_of(path: str | list[str], kind: str = "byte", **data) -> TextIndex:
    """The index of what a run would be trained on."""
    config = tiny(data={"path": path, **data}, tokenizer={"kind": kind})
    cache = Path("cache")
    corpus = prepare_corpus(config, cache)
    return load_index(RUN, config.data, corpus.content, cache)


def places(index: TextIndex, text: str) -> list[str]:
    found: Copies = search(index, text)
    return [f"{copy.place} #{copy.document} {copy.length}" for copy in found.copies]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_files_and_lines_of_plain_texts(kind):
    Path("notes").mkdir()
    Path("notes/a.md").write_bytes(f"one\r\ntwo\r\n{SEA}\r\n".encode())
    Path("notes/b.md").write_text(f"\ufeff{HILL}\n{FILLER}{FILLER}")
    index = open_of("notes", kind)
    assert places(index, f"? {SEA} ?") == ["notes/a.md:3 #1 47"]
    assert places(index, HILL) == [f"notes/b.md:1 #2 {len(HILL)}"]
    assert places(index, f"two\n{SEA}\n") == ["notes/a.md:2 #1 52"]
    assert places(index, f"two\r\n{SEA}") == ["notes/a.md:3 #1 48"]  # with the line break


def test_lines_behind_separators_and_in_long_files(monkeypatch):
    Path("a.txt").write_text(f"one\n\n\n\n{SEA}\n\n{FILLER}\nnext\n\n\n{HILL}\n\n{FILLER}")
    index = open_of("a.txt", separator="\n\n")
    assert places(index, SEA) == ["a.txt:5 #2 47"]
    assert places(index, HILL) == [f"a.txt:11 #4 {len(HILL)}"]
    assert places(index, f"{SEA}?{HILL}") == ["a.txt:5 #2 47", f"a.txt:11 #4 {len(HILL)}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptmini.tokenizer.chunks.TEXT_BLOCK_SIZE", 100)
        patch.setattr("gptmini.data.formats.TEXT_BLOCK_SIZE", 100)
        Path("b.txt").write_text(f"{FILLER}\n{SEA}\n" * 3 + f"{HILL}\n" + FILLER)
        pieces = open_of("b.txt")
    assert len(pieces.pieces) > 50
    assert places(pieces, HILL) == [f"b.txt:7 #1 {len(HILL)}"]


def test_lines_of_records():
    rows = [{"text": FILLER}, {"text": f"a\n{SEA}"}, {"text": f"{HILL}\n{FILLER}"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert places(open_of("a.jsonl.gz"), SEA) == ["a.jsonl.gz:2 #2 47"]
    Path("a.csv").write_text(f'id,text\n1,"x\ny"\n2,"{FILLER}"\n3,"{SEA}"\n4,"{FILLER}"\n')
    assert places(open_of("a.csv"), SEA) == ["a.csv:5 #3 47"]


def test_the_topics_of_python_have_names():
    text = "The assert statement is a convenient way to insert debugging"
    index = open_of("builtin:python-docs")
    (copy,) = search(index, "Assert statements are a convenient way to insert debugging").copies
    assert copy.file == "builtin:python-docs, assert"
    assert copy.line is not None
    assert search(index, text).longest is not None


def test_messages_of_a_conversation_are_texts_of_their_own():
    rows = []
    for n in range(60):
        ask = {"role": "user", "content": f"{n} {FILLER[:200]}"}
        answer = {"role": "assistant", "content": f"of {n}, that is: {SEA}"}
        rows.append(json.dumps({"messages": [ask, answer]}))
    Path("a.jsonl").write_text("\n".join(rows))
    index = open_of("a.jsonl")
    found = search(index, f"of 7, that is: {SEA}")
    assert (found.share, found.longest.line) == (1, 8)
    assert len(search(index, f"{FILLER[:200]}of 7, that is: {SEA}").copies) == 2


def test_only_what_was_trained_on_is_in_it():
    Path("a.txt").write_text(f"{FILLER}\n{SEA}")
    index = open_of("a.txt", validation=0.05)
    assert places(index, SEA) == []
    assert search(index, FILLER[:100]).share == 1
    Path("b.txt").write_text(f"{SEA}\n{FILLER}")
    Path("c.txt").write_text(f"{HILL}\n{FILLER}")
    both = open_of(["b.txt", "c.txt"], weights=[1, 3])
    assert places(both, SEA + HILL) == ["b.txt:1 #1 47", f"c.txt:1 #2 {len(HILL)}"]


def test_its_order_is_made_once_and_again_if_it_is_damaged():
    Path("a.txt").write_text(f"{SEA}\n{FILLER}")
    made = open_of("a.txt").order
    (path,) = Path("cache").glob("*-order.npz")
    whole = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "sort_suffixes", None)
        assert places(open_of("a.txt", "char"), SEA) == ["a.txt:1 #1 47"]
        Path("b.txt").write_text(Path("a.txt").read_text())
        assert places(open_of("b.txt"), SEA) == ["b.txt:1 #1 47"]
    middle = len(whole) // 2
    flipped = [whole[:at] + b"?" + whole[at + 1 :] for at in (0, 500, middle)]
    for damaged in (whole[:-1], whole[:5], b"", b"\n" * 99, *flipped):
        path.write_bytes(damaged)
        assert open_of("a.txt").order.tolist() == made.tolist()
        assert len(path.read_bytes()) == len(whole)
    Path("a.txt").write_text(f"{FILLER}\n{SEA}{FILLER}")
    assert places(open_of("a.txt"), SEA) == ["a.txt:2 #1 47"]
    assert len(list(Path("cache").glob("*-order.npz"))) == 2


def test_a_text_that_changed_or_is_gone_is_refused(monkeypatch):
    Path("a.txt").write_text(f"{SEA}\n{FILLER}")
    config = tiny(data={"path": "a.txt"})
    corpus = prepare_corpus(config, Path("cache"))
    arguments = (RUN, config.data)
    load_index(*arguments, corpus.content, Path("cache"))
    Path("a.txt").write_text(f"{SEA}\n{FILLER}".replace("calm", "wild"))
    with pytest.raises(DataError, match=r"a\.txt: .*runs.my.*restore"):
        load_index(*arguments, corpus.content, Path("cache"))
    Path("a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: no such file"):
        load_index(*arguments, corpus.content, Path("cache"))
    with pytest.raises(DataError, match=r"runs.my: .*no record of a text"):
        load_index(*arguments, "", Path("cache"))
    np.zeros(2000, np.uint16).tofile("a.bin")
    numbers = tiny(data={"path": "a.bin"}, tokenizer={"kind": "byte"})
    with pytest.raises(DataError, match=r"runs.my: .*token numbers"):
        load_index(RUN, numbers.data, corpus.content, Path("cache"))
    piped = tiny(data={"path": "-"})
    with pytest.raises(DataError, match=r"runs.my: .*standard input"):
        load_index(RUN, piped.data, corpus.content, Path("cache"))


def test_a_text_that_is_too_large_is_refused(monkeypatch):
    Path("a.txt").write_text(f"{SEA}\n{FILLER}")
    monkeypatch.setattr(training_text, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(DataError, match=r"a\.txt: .*too much"):
        open_of("a.txt")
    assert not list(Path("cache").glob("*-order.npz"))
