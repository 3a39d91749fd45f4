"""Token numbers as input: the files of nanoGPT, llm.c and numpy, and lists in JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmini.data import corpus
from gptmini.data.token_file import Corpus
from gptmini.errors import ConfigError, DataError
from gptmini.tokenizer.load import parse_tokenizer
from tests.support import gpt2, tiny

NUMBERS = [*range(40)] * 60


def write(path: Path, numbers: list[int] = NUMBERS) -> Path:
    """Write as the program does that the name stands for."""
    if path.stem.startswith("llmc"):
        wide = path.stem == "llmc32"
        header = np.zeros(256, np.int32)
        header[:3] = 20240801 if wide else 20240520, 1, len(numbers)
        data = np.array(numbers, np.uint32 if wide else np.uint16)
        path.write_bytes(header.tobytes() + data.tobytes())
    elif path.suffix == ".bin":
        np.array(numbers, np.uint16).tofile(path)
    elif path.suffix == ".npy":
        np.save(path, np.array(numbers, np.int64))
    else:
        path.write_text(json.dumps(numbers) + "\n")
    return path


def prepared(path: Path, kind: str = "ids", **data: Any) -> Corpus:
    settings = {"path": str(path), "validation": 0.1, **data}
    config = tiny(data=settings, tokenizer={"kind": kind})
    return corpus.prepare_corpus(config, path.parent / "cache")


def read(*texts: Any) -> list[int]:
    return [token for text in texts for token in text.read(0, len(text)).tolist()]


@pytest.mark.parametrize("name", ["a.bin", "llmc16.bin", "llmc32.bin", "a.npy"])
def test_a_stream_is_read_as_it_is(tmp_path, name):
    found = prepared(write(tmp_path / name))
    assert read(*found.training, *found.validation) == NUMBERS
    assert len(found.validation[0]) == 240
    assert (found.tokenizer.kind, found.tokenizer.vocab_size) == ("ids", 41)
    again = parse_tokenizer(found.tokenizer.to_json())
    assert again.fingerprint == found.tokenizer.fingerprint
    assert found.tokenizer.encode("3, 7 39").tolist() == [3, 7, 39]
    assert found.tokenizer.decode([3, 7]) == " 3 7"
    with pytest.raises(DataError, match=r"^40: "):
        found.tokenizer.encode("3 40")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.npy"])
def test_lists_and_rows_are_documents(tmp_path, name):
    rows = [[1, 2, 3, 4]] * 200
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, np.array(rows, np.uint8))
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]")
    found = prepared(path)
    assert read(*found.training, *found.validation) == [5, 1, 2, 3, 4] * 200


def test_the_tokenizer_that_made_them_is_named(tmp_path):
    tokenizer = gpt2()
    text = "The cat sat on the mat. " * 300
    path = write(tmp_path / "train.bin", tokenizer.encode(text).tolist())
    found = prepared(path, "gpt2", validation_path=str(write(tmp_path / "val.bin")))
    assert tokenizer.decode(read(*found.training)) == text
    assert found.training[0].text_bytes == len(text)
    assert read(*found.validation) == NUMBERS
    with pytest.raises(ConfigError, match=r"tokenizer\.kind"):
        prepared(path, "auto")
    with pytest.raises(DataError, match=r"train\.bin: from 0: \d+ at number 0 "):
        prepared(path, "byte")


def test_what_is_no_number_is_named(tmp_path):
    for name, content in (("a.jsonl", "[1, 2]\n[1, true]\n"), ("b.json", "[1, 2.5]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=name):
            prepared(tmp_path / name)
    np.save(tmp_path / "c.npy", np.array([1.5]))
    with pytest.raises(DataError, match=r"c\.npy"):
        prepared(tmp_path / "c.npy")
    (tmp_path / "d.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"d\.bin"):
        prepared(tmp_path / "d.bin")
    (tmp_path / "e.txt").write_text("a text")
    with pytest.raises(ConfigError, match=r"tokenizer\.kind"):
        prepared(tmp_path / "e.txt")


def test_numbers_are_trained_on_and_generated(gptmini, tmp_path):
    write(tmp_path / "tune.npy")
    small = ("--set", "model.n_layer=1", "--set", "model.d_model=32", "--set", "train.seq_len=32")
    words = ("train", "--data", "tune.npy", "--set", "tokenizer.kind=ids", "--steps", "2", *small)
    code, out, err = gptmini(*words)
    assert code == 0, err
    code, out, err = gptmini("generate", "runs/tune", "--prompt", "1 2", "--max-new-tokens", "3")
    assert code == 0, err
    assert [int(word) for word in out.split()][:2] == [1, 2]
    assert gptmini("generate", "runs/tune", "--max-new-tokens", "3")[0] == 0
    assert gptmini("generate", "runs/tune", "--prompt", "a")[0] == 3
    assert gptmini("evaluate", "runs/tune")[0] == 0
