"""The training text of a run: what is in it, where it says that stands, what is refused."""

import gzip
import json
from pathlib import Path

import pytest

from gptmini.data.corpus import prepare_corpus
from gptmini.errors import DataError
from gptmini.extras.sources import training_text
from gptmini.extras.sources.find import Copies, SourceText
from gptmini.extras.sources.training_text import read_training_text
from tests.support import tiny

SEA = "The sea was calm and the sky was grey that day."
HILL = "".join(map(chr, range(0x4E00, 0x4E18)))
FILLER = "".join(f"{n:06} " for n in range(400))
RUN = Path("runs/my")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def open_of(path: str | list[str], kind: str = "byte", **data) -> SourceText:
    """What a run would be trained on."""
    config = tiny(data={"path": path, **data}, tokenizer={"kind": kind})
    corpus = prepare_corpus(config)
    return read_training_text(RUN, config.data, corpus.content)


def places(source: SourceText, text: str) -> list[str]:
    copies = Copies(source, text).copies
    return [f"{copy.place} #{copy.document} {copy.length}" for copy in copies]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_files_and_lines_of_plain_texts(kind):
    Path("notes").mkdir()
    Path("notes/a.md").write_bytes(f"one\r\ntwo\r\n{SEA}\r\n".encode())
    Path("notes/b.md").write_text(f"\ufeff{HILL}\n{FILLER}{FILLER}")
    source = open_of("notes", kind)
    assert places(source, f"? {SEA} ?") == ["notes/a.md:3 #1 47"]
    assert places(source, HILL) == [f"notes/b.md:1 #2 {len(HILL)}"]
    assert places(source, f"two\n{SEA}\n") == ["notes/a.md:2 #1 52"]
    assert places(source, f"two\r\n{SEA}") == ["notes/a.md:3 #1 48"]  # with the line break


def test_lines_behind_separators_and_in_long_files(monkeypatch):
    Path("a.txt").write_text(f"one\n\n\n\n{SEA}\n\n{FILLER}\nnext\n\n\n{HILL}\n\n{FILLER}")
    source = open_of("a.txt", separator="\n\n")
    assert places(source, SEA) == ["a.txt:5 #2 47"]
    assert places(source, HILL) == [f"a.txt:11 #4 {len(HILL)}"]
    assert places(source, f"{SEA}?{HILL}") == ["a.txt:5 #2 47", f"a.txt:11 #4 {len(HILL)}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptmini.tokenizer.chunks.TEXT_BLOCK_SIZE", 100)
        patch.setattr("gptmini.data.formats.TEXT_BLOCK_SIZE", 100)
        Path("b.txt").write_text(f"{FILLER}\n{SEA}\n" * 3 + f"{HILL}\n" + FILLER)
        pieces = open_of("b.txt")
    assert len(pieces.begins) > 50
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
    source = open_of("builtin:python-docs")
    (copy,) = Copies(source, "Assert statements are a convenient way to insert debugging").copies
    assert copy.file == "builtin:python-docs, assert"
    assert copy.line is not None
    assert Copies(source, text).longest is not None


def test_messages_of_a_conversation_are_texts_of_their_own():
    rows = []
    for n in range(60):
        ask = {"role": "user", "content": f"{n} {FILLER[:200]}"}
        answer = {"role": "assistant", "content": f"of {n}, that is: {SEA}"}
        rows.append(json.dumps({"messages": [ask, answer]}))
    Path("a.jsonl").write_text("\n".join(rows))
    source = open_of("a.jsonl")
    found = Copies(source, f"of 7, that is: {SEA}")
    assert (found.share, found.longest.line) == (1, 8)
    assert len(Copies(source, f"{FILLER[:200]}of 7, that is: {SEA}").copies) == 2


def test_only_what_was_trained_on_is_in_it():
    Path("a.txt").write_text(f"{FILLER}\n{SEA}")
    source = open_of("a.txt", validation=0.05)
    assert places(source, SEA) == []
    assert Copies(source, FILLER[:100]).share == 1
    Path("b.txt").write_text(f"{SEA}\n{FILLER}")
    Path("c.txt").write_text(f"{HILL}\n{FILLER}")
    both = open_of(["b.txt", "c.txt"], weights=[1, 3])
    assert places(both, SEA + HILL) == ["b.txt:1 #1 47", f"c.txt:1 #2 {len(HILL)}"]


def test_a_text_that_changed_or_is_gone_is_refused(monkeypatch):
    Path("a.txt").write_text(f"{SEA}\n{FILLER}")
    config = tiny(data={"path": "a.txt"})
    corpus = prepare_corpus(config)
    arguments = (RUN, config.data)
    read_training_text(*arguments, corpus.content)
    Path("a.txt").write_text(f"{SEA}\n{FILLER}".replace("calm", "wild"))
    with pytest.raises(DataError, match=r"a\.txt: .*runs.my.*restore"):
        read_training_text(*arguments, corpus.content)
    Path("a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: no such file"):
        read_training_text(*arguments, corpus.content)
    with pytest.raises(DataError, match=r"runs.my: .*no training text on record"):
        read_training_text(*arguments, "")
    piped = tiny(data={"path": "-"})
    with pytest.raises(DataError, match=r"runs.my: .*standard input"):
        read_training_text(RUN, piped.data, corpus.content)


def test_a_text_that_is_too_large_is_refused(monkeypatch):
    Path("a.txt").write_text(f"{SEA}\n{FILLER}")
    monkeypatch.setattr(training_text, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr("gptmini.data.formats.TEXT_BLOCK_SIZE", 100)  # no chunk is too large
    with pytest.raises(DataError, match=r"a\.txt: .*too long"):
        open_of("a.txt")
