"""Token files prepared in parts are one text, whatever the number of parts."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini import files
from gptmini.config.settings import Config
from gptmini.data import corpus as corpora
from gptmini.data import shards, token_file
from gptmini.data.formats import File
from gptmini.data.shards import ConcatTokenFile
from gptmini.data.token_file import TokenFile
from gptmini.errors import ConfigError, DataError
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import SMALL, prose, tiny, train

BYTES = ByteTokenizer()
LENGTHS = (900, 40, 2000, 0, 700, 1500, 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven texts of different lengths."""
    (tmp_path / "texts").mkdir()
    text = prose(2000)
    for number, length in enumerate(LENGTHS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text[100 * number :][:length])
    return tmp_path / "texts"


def asked(*paths: Path, kind: str = "byte", **data: Any) -> Config:
    given = {"path": [str(path) for path in paths], **data}
    return tiny(data=given, tokenizer={"kind": kind or "auto"})


def made(folder: Path, count: int, kind: str = "byte") -> Path:
    """All the parts of a folder's text, prepared in one that is named after their number."""
    out = folder.parent / f"in-{count}-parts"
    for part in range(count, 0, -1):
        shards.prepare_part(asked(folder, kind=kind), part, count, out)
    return out


def joined(out: Path) -> ConcatTokenFile:
    return shards.open_token_files(shards.find_token_files([str(out)]) or [], BYTES)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_the_parts_in_order_are_the_whole_text(folder: Path, count: int):
    out = made(folder, count)
    expected: list[int] = []
    for file in sorted(folder.iterdir()):
        text = file.read_bytes()
        expected += [256, *text] if text else []
    whole = joined(out)
    assert len(whole) == len(expected)
    assert whole.read(0, len(whole)).tolist() == expected
    assert whole.text_bytes == sum(LENGTHS)
    assert whole.documents == 6
    assert sorted(file.name for file in out.iterdir()) == [
        *(f"part-{part}-of-{count}.tokens" for part in range(1, count + 1)),
        "tokenizer.json",
    ]
    for start, length in [(0, 0), (5, 1), (899, 50), (900, 2100), (len(expected) - 1, 1)]:
        assert whole.read(start, length).tolist() == expected[start : start + length]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_shares_are_consecutive_and_none_is_empty(sizes: list[int], data: st.DataObject):
    listed = [File(Path(f"{n}"), "text", "", size, 0, "strict") for n, size in enumerate(sizes)]
    count = data.draw(st.integers(1, len(sizes)))
    shares = [shards.select_files(listed, part, count) for part in range(1, count + 1)]
    assert [file for own in shares for file in own] == listed
    assert all(shares)
    if len(set(sizes)) == 1:  # equal files are shared as equally as they can be
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_share_has_about_as_many_bytes_as_any_other():
    listed = [File(Path(f"{n}"), "text", "", 1 + n % 7, 0, "strict") for n in range(1000)]
    sizes = [sum(f.bytes for f in shards.select_files(listed, part, 16)) for part in range(1, 17)]
    assert max(sizes) - min(sizes) <= 7


def test_a_share_is_cut_at_the_nearest_file():
    listed = [File(Path(f"{n}"), "text", "", size, 0, "strict") for n, size in enumerate(LENGTHS)]
    shares = [
        [file.bytes for file in shards.select_files(listed, part, 4)] for part in (1, 2, 3, 4)
    ]
    assert shares == [[900, 40], [2000], [0, 700], [1500, 300]]


def test_any_number_of_parts_trains_to_the_same_weights(folder: Path, tmp_path: Path):
    ends = {}
    for count in (1, 4):
        config = asked(made(folder, count), kind="", test=0.1)
        train(config, tmp_path / f"run-{count}", tmp_path / "cache")
        run = RunDirectory(tmp_path / f"run-{count}")
        best = json.loads((run.path / "best.json").read_text())
        ends[count] = (run.load_best().sha256, best["val_loss"], best["val_bpb"])
        assert run.load_config().tokenizer.kind == "byte"
    assert ends[1] == ends[4]


def test_the_held_out_text_is_the_tail_of_all_parts(folder: Path, tmp_path: Path):
    def sides(count: int, **data: Any) -> list[list[int]]:
        config = asked(made(folder, count), kind="", **data)
        corpus = corpora.prepare_corpus(config, tmp_path / "cache", with_test=True)
        return [
            [token for text in side for token in text.read(0, len(text)).tolist()]
            for side in (corpus.training, corpus.test, corpus.validation)
        ]

    whole = joined(made(folder, 1)).read(0, sum(LENGTHS) + 6).tolist()
    training, test, validation = sides(4, validation=0.3, test=0.05)
    assert training + test + validation == whole
    assert len(validation) == round(0.3 * len(whole))
    assert len(test) == round(0.05 * len(whole))
    assert sides(1, validation=0.3, test=0.05) == [training, test, validation]
    text = folder.parent / "other.txt"
    text.write_text("another text, " * 9)
    everything, none, other = sides(4, validation_path=str(text))
    assert (everything, none) == (whole, [])
    assert bytes(other[1:]) == text.read_bytes()
    assert sides(2, validation_path=str(made(folder, 4))) == [whole, [], whole]


def test_parts_with_weights_are_kept_apart(folder: Path, tmp_path: Path):
    both = asked(made(folder, 1), made(folder, 2), kind="", weights=[1, 3])
    corpus = corpora.prepare_corpus(both, tmp_path / "cache")
    assert [len(text) for text in corpus.training] == [len(corpus.training[0])] * 2
    assert len(corpus.validation) == 2
    together = corpora.prepare_corpus(
        asked(made(folder, 1), made(folder, 2), kind=""), tmp_path / "cache"
    )
    assert len(together.training) == len(together.validation) == 1


def test_only_the_blocks_that_are_read_are_touched(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_file, "HASH_BLOCK_BYTES", 256)
    out = made(folder, 4)
    touched: list[tuple[str, int]] = []
    plain = TokenFile._bytes

    def noted(self: TokenFile, start: int, count: int) -> bytes:
        if start < 2 * len(self):  # tokens, not the table behind them
            touched.append((self.path.name, start))
        return plain(self, start, count)

    monkeypatch.setattr(TokenFile, "_bytes", noted)
    whole = joined(out)
    assert touched == []
    whole.read(len(whole) - 1802, 20)  # the first tokens of the last part
    assert {name for name, _ in touched} == {"part-4-of-4.tokens"}
    assert len({start // 256 for _, start in touched}) == 1


def test_damage_names_the_part(folder: Path):
    out = made(folder, 4)
    file = out / "part-2-of-4.tokens"
    damaged = bytearray(file.read_bytes())
    damaged[token_file.HEADER.size + 5] ^= 1
    file.write_bytes(damaged)
    whole = joined(out)
    whole.read(0, 100)  # of the first part
    with pytest.raises(DataError, match=r"part-2-of-4.tokens: damaged after .*; prepare it again"):
        whole.read(0, len(whole))


def test_a_learned_tokenizer_comes_from_a_file(folder: Path, tmp_path: Path):
    learned = tmp_path / "my.json"
    learned.write_text(create_tokenizer("bpe", 300, [prose(500)]).to_json())
    out = made(folder, 3, str(learned))
    learned.unlink()
    corpus = corpora.prepare_corpus(asked(out, kind=""), tmp_path / "cache")
    assert corpus.tokenizer.vocab_size == 300
    read = corpus.training[0].read(0, len(corpus.training[0]))
    text = b"".join(file.read_bytes() for file in sorted(folder.iterdir())).decode()
    assert text.startswith(corpus.tokenizer.decode(read.tolist()))
    assert not np.isin(read, range(256)).all()


def test_the_tokenizer_is_synced_before_its_name_appears(folder: Path, monkeypatch):
    synced: set[int] = set()
    named: set[str] = set()
    sync = files.sync
    replace = os.replace

    def note_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def check_rename(source: Path, target: Path) -> None:
        assert source.stat().st_ino in synced, target
        named.add(target.name)
        replace(source, target)

    monkeypatch.setattr(files, "sync", note_sync)
    monkeypatch.setattr(os, "replace", check_rename)
    out = made(folder, 1)
    assert named == {"tokenizer.json", "part-1-of-1.tokens"}
    assert out.stat().st_ino in synced


def test_plain_texts_may_be_named_tokens(tmp_path: Path):
    path = tmp_path / "wiki.train.tokens"
    path.write_text(" = Robert Boulter = \n" * 100)
    assert shards.find_token_files([str(path)]) is None
    assert shards.find_token_files([str(tmp_path)]) is None
    corpus = corpora.prepare_corpus(asked(path), tmp_path / "cache")
    assert corpus.training[0].text_bytes > 1000


def test_misuse_is_one_line_with_a_remedy(folder: Path, tmp_path: Path):
    whole, half = made(folder, 2), made(folder, 4)
    (half / "part-3-of-4.tokens").unlink()
    text, cache = str(folder / "0.txt"), tmp_path / "cache"

    def prepared(*paths: Path, **settings: Any) -> None:
        corpora.prepare_corpus(asked(*paths, **settings), cache)

    for kind in ("auto", "bpe", "char"):
        with pytest.raises(ConfigError, match=f"kind: {kind} is learned .* set it to gpt2, byte"):
            shards.prepare_part(asked(folder, kind=kind), 1, 2, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="--part 9/9: the text has 7 files; use at most as many"):
        shards.prepare_part(asked(folder), 9, 9, tmp_path / "new")
    (tmp_path / "my.json").write_text(create_tokenizer("bpe", 300, [prose(500)]).to_json())
    with pytest.raises(ConfigError, match="not bpe, the tokenizer asked for; choose another --out"):
        shards.prepare_part(asked(folder, kind=str(tmp_path / "my.json")), 1, 2, whole)
    with pytest.raises(DataError, match=r"lacks part 3/4; make it with .* --part 3/4"):
        prepared(half, kind="")
    with pytest.raises(DataError, match=r"0.txt: a text beside token files; prepare it too"):
        prepared(whole, Path(text), kind="")
    with pytest.raises(DataError, match="prepared with byte, 257 tokens, not with char"):
        prepared(whole, kind="char")
    with pytest.raises(ConfigError, match="token files do not say where documents begin"):
        prepared(whole, kind="", split="documents")
    (folder / "8.txt").write_text("a file that came later")
    shards.prepare_part(asked(folder), 2, 2, whole)
    with pytest.raises(DataError, match=r"part-2-of-2.tokens: prepared from other files than part"):
        prepared(whole, kind="")
    shards.prepare_part(asked(folder), 1, 1, whole)
    with pytest.raises(DataError, match="has parts of 1 and of 2; keep one kind"):
        prepared(whole, kind="")
    (whole / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json: no such file"):
        prepared(whole / "part-1-of-1.tokens", kind="")


def test_prepared_on_two_machines_and_trained_on_one(gptmini, folder: Path, tmp_path: Path):
    words = ["--data", f"{folder}/*.txt", "--set", "tokenizer.kind=byte", "--out", "tokens"]
    code, out, err = gptmini("data", "prepare", *words, "--part", "2/2")
    assert (code, out.split(":")[0]) == (0, "tokens/part-2-of-2.tokens")
    assert err.splitlines()[-1] == "train on all parts with: gptmini train --data tokens"
    code, _, err = gptmini("train", "--data", "tokens", *SMALL)
    assert (code, err.count("\n")) == (3, 1)
    assert "tokens: lacks part 1/2" in err
    assert gptmini("data", "prepare", *words, "--part", "1/2")[0] == 0
    code, _, err = gptmini("train", "--data", "tokens", *SMALL)
    assert code == 0
    assert "  data      tokens: 5.44 kB -> 5,446 tokens (byte, vocabulary 257)" in err
    assert "already finished" in gptmini("train", "--data", "tokens", *SMALL)[2]
    assert gptmini("evaluate", "runs/tokens")[0] == 0
    assert gptmini("evaluate", "runs/tokens", "--data", "tokens/part-1-of-2.tokens")[0] == 0
    for bad in ("0/2", "3/2", "2", "a/b"):
        code, _, err = gptmini("data", "prepare", *words, "--part", bad)
        assert code == 2
        assert err == f"gptmini: --part {bad}: must be K/N, with K from 1 to N; write 3/16\n"
    code, _, err = gptmini("data", "prepare", *words[:-2], "--part", "1/2")
    assert err == "gptmini: --part 1/2: where to? add --out DIR, a folder for all parts\n"
