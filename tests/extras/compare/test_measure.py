"""Measuring trained runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmini.config.settings import Config
from gptmini.extras.compare import measure
from gptmini.extras.compare.variants import list_warnings
from gptmini.runs.directory import RunDirectory
from tests.support import new_cache, tiny, train


def trained(text_file: Path, folder: Path, cache: Path, **settings) -> tuple[Path, Config]:
    config = tiny(data={"path": str(text_file)}, train=settings)
    train(config, folder, cache)
    return folder, config


def test_figures_are_of_the_run(text_file, tmp_path):
    cache = new_cache(tmp_path)
    one, _ = trained(text_file, tmp_path / "one", cache)
    two, _ = trained(text_file, tmp_path / "two", cache, seed=1)
    (found,) = measure.measure_variants({"a": [one, two]}, None, cache)
    weights = RunDirectory(one).load_newest().model.values()
    assert found.parameters == sum(tensor.numel() for tensor in weights)
    assert found.cache_bytes_per_token == 2 * 2 * 32 * 4
    assert found.cache_bytes == 16 * found.cache_bytes_per_token
    assert [run.seed for run in found.runs] == [1337, 1]
    assert found.runs[0].loss != found.runs[1].loss
    assert found.runs[0].history[-1][0] == 6 * 4 * 16
    assert list(found.decode_tokens_per_second) == [4, 8, 16]
    for speeds in found.decode_tokens_per_second.values():
        assert len(speeds) == measure.TIMING_ROUNDS
        assert min(speeds) > 0
    lines = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert found.runs[0].peak_memory == lines[-1]["peak_memory"]


def test_other_shares_of_token_numbers_are_other_texts(text_file, tmp_path):
    cache, tokens = new_cache(tmp_path), tmp_path / "my.bin"
    np.frombuffer(text_file.read_bytes(), np.uint8).astype(np.uint16).tofile(tokens)
    runs = {}
    for share in (0.1, 0.2):
        data = {"path": str(tokens), "validation": share}
        config = tiny(data=data, tokenizer={"kind": "byte"})
        train(config, tmp_path / str(share), cache)
        runs[str(share)] = [tmp_path / str(share)]
    variants = measure.measure_variants(runs, None, cache)
    assert "measured on different texts" in list_warnings(variants)[0]
    twice = {"a": runs["0.1"], "b": runs["0.1"]}
    same = measure.measure_variants(twice, None, cache)
    assert list_warnings(same) == []


def test_a_text_keeps_its_name_in_other_tokens(text_file, tmp_path):
    cache, runs = new_cache(tmp_path), {}
    for kind in ("byte", "char"):
        config = tiny(data={"path": str(text_file)}, tokenizer={"kind": kind})
        train(config, tmp_path / kind, cache)
        runs[kind] = [tmp_path / kind]
    variants = measure.measure_variants(runs, None, cache)
    assert list_warnings(variants) == []


def test_variants_are_read_with_equal_context_whatever_their_windows(text_file, tmp_path):
    """A model that looks back 4 positions knows as much in windows of 8 as in windows of 16."""
    cache = new_cache(tmp_path)
    runs = {}
    for seq_len in (8, 16):
        path = tmp_path / str(seq_len)
        model = {"n_layer": 1, "attention": {"window": 4}}
        config = tiny(data={"path": str(text_file)}, model=model, train={"dtype": "float32"})
        train(config, path, cache)
        RunDirectory(path).write_config(
            RunDirectory(path).load_config().with_train(seq_len=seq_len)
        )
        runs[str(seq_len)] = [path]
    unlike = measure.measure_variants(runs, None, cache)
    short, long = (variant.runs[0] for variant in unlike)
    assert (short.seq_len, short.stride, long.seq_len, long.stride) == (8, 4, 16, 8)
    assert short.bits_per_byte == pytest.approx(long.bits_per_byte, rel=1e-6)
    alone = {"8": runs["8"]}  # nothing to agree with: windows side by side, as evaluate has them
    ((side_by_side,),) = (variant.runs for variant in measure.measure_variants(alone, None, cache))
    assert side_by_side.stride == 8
    assert side_by_side.bits_per_byte != pytest.approx(short.bits_per_byte, rel=1e-4)


def test_a_timing_lasts_long_enough_to_mean_something(monkeypatch):
    """Ten steps of 1 ms by the clock are repeated until they add up to 50 ms."""
    now = 0.0

    def engine(texts):
        nonlocal now
        now += 0.001

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    assert measure._measure_decode_speed(engine, 11) == pytest.approx(1000)
    assert now == pytest.approx(0.055)  # five texts, each with a prompt of one token


def test_figures_of_training_are_read_from_all_of_its_log(text_file, tmp_path, monkeypatch):
    cache = new_cache(tmp_path)
    one, _ = trained(text_file, tmp_path / "one", cache)
    log = [
        {"tokens_per_second": 1.0, "seconds": 3.0, "peak_memory": 9},  # the start of the run
        {"tokens_per_second": 5.0, "seconds": 4.0, "peak_memory": 11},
        {"tokens_per_second": 6.0, "seconds": 5.0, "peak_memory": 7},  # resumed
        {"tokens_per_second": 20.0, "seconds": 6.0, "peak_memory": 7},
    ]
    file = one / "metrics.jsonl"
    written: dict[str, Any] = {}  # every figure of a line
    for line in file.read_text().splitlines():
        written |= json.loads(line)
    file.write_text("".join(json.dumps(written | each) + "\n" for each in log))
    (found,) = measure.measure_variants({"a": [one]}, None, cache)
    (run,) = found.runs
    assert (run.tokens_per_second, run.seconds, run.peak_memory) == (6.0, 6.0, 11)
