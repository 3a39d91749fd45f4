"""Token files prepared anywhere are one text, whatever their number."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmini.config.settings import Config
from gptmini.data import corpus as corpora
from gptmini.data import token_file
from gptmini.data.token_file import ConcatTokenFile, TokenFile
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
    """A folder with the text of another in so many token files."""
    out = folder.parent / f"in-{count}-files"
    texts = np.array_split(sorted(folder.iterdir()), count)
    for number, share in enumerate(texts):
        asked_for = asked(*share, kind=kind)
        corpora.prepare_token_file(asked_for, out / f"{number}.tokens", folder.parent / "cache")
    return out


def joined(out: Path) -> ConcatTokenFile:
    paths = corpora.find_token_files([str(out)]) or []
    return ConcatTokenFile([TokenFile(path, BYTES, prepared=True) for path in paths])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_files_in_order_are_the_whole_text(folder: Path, count: int):
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
    assert sorted(file.name for file in out.iterdir()) == [f"{n}.tokens" for n in range(count)]
    for start, length in [(0, 0), (5, 1), (899, 50), (900, 2100), (len(expected) - 1, 1)]:
        assert whole.read(start, length).tolist() == expected[start : start + length]


def test_any_number_of_files_trains_to_the_same_weights(folder: Path, tmp_path: Path):
    ends = {}
    for count in (1, 3):
        config = asked(made(folder, count), kind="", test=0.1)
        train(config, tmp_path / f"run-{count}", tmp_path / "cache")
        run = RunDirectory(tmp_path / f"run-{count}")
        best = json.loads((run.path / "best.json").read_text())
        ends[count] = (run.load_best().sha256, best["val_loss"], best["val_bpb"])
        assert run.load_config().tokenizer.kind == "byte"
    assert ends[1] == ends[3]


def test_the_held_out_text_is_the_tail_of_all_files(folder: Path, tmp_path: Path):
    def sides(count: int, **data: Any) -> list[list[int]]:
        config = asked(made(folder, count), kind="", **data)
        corpus = corpora.prepare_corpus(config, tmp_path / "cache", with_test=True)
        return [
            [token for text in side for token in text.read(0, len(text)).tolist()]
            for side in (corpus.training, corpus.test, corpus.validation)
        ]

    whole = joined(made(folder, 1)).read(0, sum(LENGTHS) + 6).tolist()
    training, test, validation = sides(3, validation=0.3, test=0.05)
    assert training + test + validation == whole
    assert len(validation) == round(0.3 * len(whole))
    assert len(test) == round(0.05 * len(whole))
    assert sides(1, validation=0.3, test=0.05) == [training, test, validation]
    text = folder.parent / "other.txt"
    text.write_text("another text, " * 9)
    everything, none, other = sides(3, validation_path=str(text))
    assert (everything, none) == (whole, [])
    assert bytes(other[1:]) == text.read_bytes()
    assert sides(2, validation_path=str(made(folder, 3))) == [whole, [], whole]


def test_files_with_weights_are_kept_apart(folder: Path, tmp_path: Path):
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
    out = made(folder, 3)
    touched: list[tuple[str, int]] = []
    plain = TokenFile._bytes

    def noted(self: TokenFile, start: int, count: int) -> bytes:
        if start < 2 * len(self):  # tokens, not the table behind them
            touched.append((self.path.name, start))
        return plain(self, start, count)

    monkeypatch.setattr(TokenFile, "_bytes", noted)
    whole = joined(out)
    assert touched == []
    whole.read(len(whole) - 1802, 20)  # the first tokens of the last file
    assert {name for name, _ in touched} == {"2.tokens"}
    assert len({start // 256 for _, start in touched}) == 1


def test_damage_names_the_file(folder: Path):
    out = made(folder, 3)
    file = out / "1.tokens"
    damaged = bytearray(file.read_bytes())
    damaged[token_file.HEADER.size + 5] ^= 1
    file.write_bytes(damaged)
    whole = joined(out)
    whole.read(0, 100)  # of the first file
    with pytest.raises(DataError, match=r"1.tokens: damaged"):
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


def test_plain_texts_may_be_named_tokens(tmp_path: Path):
    path = tmp_path / "wiki.train.tokens"
    path.write_text(" = Robert Boulter = \n" * 100)
    assert corpora.find_token_files([str(path)]) is None
    assert corpora.find_token_files([str(tmp_path)]) is None
    corpus = corpora.prepare_corpus(asked(path), tmp_path / "cache")
    assert corpus.training[0].text_bytes > 1000


def test_a_tokenizer_is_learned_from_what_is_trained_on(folder: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(prose(20_000))
    cache, out = tmp_path / "cache", tmp_path / "my.tokens"
    corpora.prepare_token_file(asked(text, kind=""), out, cache)
    direct = corpora.prepare_corpus(asked(text, kind=""), cache)
    prepared = corpora.prepare_corpus(asked(out, kind=""), cache)
    assert prepared.tokenizer.kind == "bpe"
    assert prepared.tokenizer.fingerprint == direct.tokenizer.fingerprint


def test_misuse_names_the_file(folder: Path, tmp_path: Path):
    whole = made(folder, 2)
    text, cache = folder / "0.txt", tmp_path / "cache"

    def prepared(*paths: Path, **settings: Any) -> None:
        corpora.prepare_corpus(asked(*paths, **settings), cache)

    with pytest.raises(DataError, match=r"0\.txt: "):
        prepared(whole, text, kind="")
    with pytest.raises(DataError, match=r"0\.tokens: .*char"):
        prepared(whole, kind="char")
    with pytest.raises(ConfigError, match=r"data\.split: "):
        prepared(whole, kind="", split="documents")
    other = tmp_path / "other.tokens"
    corpora.prepare_token_file(asked(text, kind="char"), other, cache)
    with pytest.raises(DataError, match=r"other\.tokens: .*gptmini tokenizer train"):
        prepared(whole, other, kind="")
    cached = corpora.prepare_corpus(asked(text), cache).training[0].path
    with pytest.raises(DataError, match=f"{cached.name}: .*gptmini data prepare --out"):
        prepared(cached, kind="")
    file = whole / "0.tokens"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"0\.tokens: "):
        prepared(whole, kind="")


def test_prepared_on_two_machines_and_trained_on_one(gptmini, folder: Path, tmp_path: Path):
    for name, pattern in (("a", "[0-3].txt"), ("b", "[4-6].txt")):
        words = ["--data", f"{folder}/{pattern}", "--set", "tokenizer.kind=byte"]
        words += ["--cache", f"cache-{name}", "--out", f"{name}.tokens"]
        code, out, err = gptmini("data", "prepare", *words)
        assert (code, out.split(":")[0]) == (0, f"{name}.tokens")
        assert err.splitlines()[-1].endswith(f"gptmini train --data {name}.tokens")
    both = ["--data", "a.tokens", "--data", "b.tokens", "--out", "runs/tokens"]
    code, _, err = gptmini("train", *both, *SMALL)
    assert code == 0
    assert "  data      a.tokens, b.tokens: 5.44 kB -> 5,446 tokens (byte, vocabulary 257)" in err
    assert "already finished" in gptmini("train", *both, *SMALL)[2]
    assert gptmini("evaluate", "runs/tokens")[0] == 0
    assert gptmini("evaluate", "runs/tokens", "--data", "a.tokens")[0] == 0
    code, _, err = gptmini("data", "prepare", "--data", f"{folder}/0.txt", "--out", "tokens")
    assert (code, err.count("\n")) == (2, 1)
    assert "--out tokens: " in err
