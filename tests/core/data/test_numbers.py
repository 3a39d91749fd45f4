"""Token numbers as input: the .bin files of nanoGPT and llm.c."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmini.data import corpus
from gptmini.data.numbers import read_numbers
from gptmini.data.token_file import Corpus
from gptmini.errors import ConfigError, DataError
from gptmini.files import get_cache_folder
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import gpt2, tiny

NUMBERS = [*range(40)] * 60


def write(path: Path, numbers: list[int] = NUMBERS) -> Path:
    """Write as the program does that the name stands for."""
    dtype = np.uint32 if path.stem.endswith("32") else np.uint16
    header = b""
    if path.stem.startswith("llmc"):
        version = 20240801 if dtype is np.uint32 else 20240520
        header = np.array([version, 1, len(numbers), *[0] * 253], np.int32).tobytes()
    path.write_bytes(header + np.array(numbers, dtype).tobytes())
    return path


def prepared(path: Path, /, kind: str = "byte", **data: Any) -> Corpus:
    settings = {"path": str(path), "validation": 0.1} | data
    config = tiny(data=settings, tokenizer={"kind": kind})
    return corpus.prepare_corpus(config)


def read(*texts: Any) -> list[int]:
    return [token for text in texts for token in text.read(0, len(text)).tolist()]


@pytest.mark.parametrize("name", ["a.bin", "a32.bin", "llmc16.bin", "llmc32.bin"])
def test_a_stream_is_read_as_it_is(tmp_path, name):
    found = prepared(write(tmp_path / name))
    assert read(*found.training, *found.validation) == NUMBERS
    assert len(found.validation[0]) == 240


@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1, 100_000])
def test_the_width_of_numbers_is_that_in_which_all_are_tokens(tmp_path, vocab_size):
    numbers = [65_535, 7, 0, 12] * 100
    for name in ("a.bin", "a32.bin"):
        path = write(tmp_path / name, numbers)
        tokenizer = ByteTokenizer()
        tokenizer.vocab_size = vocab_size
        stretches = list(read_numbers([path], tokenizer, lambda _: None))
        assert [int(number) for _, part in stretches for number in part] == numbers


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
    with pytest.raises(DataError, match=r"train\.bin: \d+ at number 0 "):
        prepared(path, "byte")


def test_the_tail_of_all_files_is_held_out(tmp_path):
    paths = [write(tmp_path / "a.bin"), write(tmp_path / "b.bin", NUMBERS[::-1])]
    whole = [*NUMBERS, *NUMBERS[::-1]]
    config = tiny(
        data={"path": f"{tmp_path}/*.bin", "validation": 0.3, "test": 0.05},
        tokenizer={"kind": "byte"},
    )
    found = corpus.prepare_corpus(config, with_test=True)
    parts = [read(*found.training), read(*found.test), read(*found.validation)]
    assert parts == [whole[:3120], whole[3120:3360], whole[3360:]]
    apart = prepared(paths[0], path=[str(path) for path in paths], weights=[1, 3])
    assert [read(text)[:3] for text in apart.training] == [[0, 1, 2], [39, 38, 37]]
    assert len(apart.validation) == 2


def test_a_cached_copy_is_checked_and_made_again(tmp_path):
    path = write(tmp_path / "a.bin")
    made = prepared(path).content
    (copied,) = get_cache_folder().glob("*.bin")
    copied.write_bytes(b"damaged")
    assert prepared(path).content == made
    assert copied.stat().st_size == 2 * len(NUMBERS)
    write(path, [*NUMBERS, 7])
    assert prepared(path).content != made


def test_what_holds_no_numbers_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.split: "):
        prepared(write(tmp_path / "a.bin"), split="documents")
    (tmp_path / "e.txt").write_text("a text")
    with pytest.raises(DataError, match=r"e\.txt: a text beside token numbers"):
        prepared(tmp_path / "e.txt", path=[f"{tmp_path}/a.bin", f"{tmp_path}/e.txt"])
    (tmp_path / "d.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"d\.bin"):
        prepared(tmp_path / "d.bin")


def test_numbers_are_trained_on_and_generated(gptmini, tmp_path):
    write(tmp_path / "tune.bin")
    small = ("--set", "model.n_layer=1", "--set", "model.d_model=32", "--set", "train.seq_len=32")
    words = ("train", "--data", "tune.bin", "--set", "tokenizer.kind=byte", "--steps", "2", *small)
    code, _, err = gptmini(*words)
    assert code == 0, err
    assert gptmini("generate", "runs/tune", "--max-new-tokens", "3")[0] == 0
    assert gptmini("evaluate", "runs/tune")[0] == 0
