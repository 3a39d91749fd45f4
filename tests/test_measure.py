"""Figures of runs and what their differences are worth."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from conftest import new_cache, tiny, train
from hypothesis import given
from hypothesis import strategies as st

from gptmini.config.load import validate
from gptmini.config.settings import Config
from gptmini.evidence import measure
from gptmini.evidence.measure import (
    STUDENT,
    Measured,
    Variant,
    difference,
)
from gptmini.runs.directory import RunDirectory


def beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by the sum of small steps."""
    places = (np.arange(200_000) + 0.5) / 200_000
    density = places ** (a - 1) * (1 - places) ** (b - 1)
    return density[places < x].sum() / density.sum()


@pytest.mark.parametrize("freedom", range(1, len(STUDENT) + 1))
def test_the_quantiles_are_students(freedom):
    """Of t it holds that P(|t| > q) = I(n/2, 1/2) at n / (n + q²)."""
    quantile = STUDENT[freedom - 1]
    inside = 1 - beta(0.5, freedom / 2, quantile**2 / (freedom + quantile**2))
    assert inside == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize(("ours", "theirs"), [(3, 3), (2, 5), (1, 4)])
def test_intervals_cover_no_difference_nineteen_times_in_twenty(ours, theirs):
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(4000):
        gap, half = difference(chance.normal(size=ours), chance.normal(size=theirs))
        covered += abs(gap) <= half
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.floats(-5, 5))
def test_a_shift_is_the_difference_and_not_the_spread(values, shift):
    gap, half = difference([value + shift for value in values], values)
    assert gap == pytest.approx(shift, abs=1e-9)
    same, again = difference(values, values)
    assert same == 0
    if len(values) == 1:
        assert half is None
    else:
        assert half == pytest.approx(again, abs=1e-6)


def trained(text_file: Path, folder: Path, cache: Path, **train) -> tuple[Path, Config]:
    config = tiny(data={"path": str(text_file)}, train=train)
    train(config, folder, cache)
    return folder, config


def test_a_run_is_measured_once_and_as_it_is(text_file, tmp_path, monkeypatch):
    cache = new_cache(tmp_path)
    one, _ = trained(text_file, tmp_path / "one", cache)
    two, _ = trained(text_file, tmp_path / "two", cache, seed=1)
    known = tmp_path / "compare.json"
    (found,) = measure.measure({"a": [one, two]}, None, cache, known)
    weights = RunDirectory(one).newest().model.values()
    assert found.parameters == sum(tensor.numel() for tensor in weights)
    assert found.cache_bytes_per_token == 2 * 2 * 32 * 4
    assert found.cache_bytes == 16 * found.cache_bytes_per_token
    assert [run.seed for run in found.runs] == [1337, 1]
    assert found.runs[0].loss != found.runs[1].loss
    assert found.runs[0].history[-1][0] == 6 * 4 * 16
    assert list(found.decode_tokens_per_second) == [4, 8, 16]
    assert min(found.decode_tokens_per_second.values()) > 0
    lines = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert found.runs[0].peak_memory == lines[-1]["peak_memory"]
    known.write_text(json.dumps(measure.as_json([found])))
    monkeypatch.setattr(measure, "evaluate_run", lambda *_: pytest.fail("measured again"))
    (again,) = measure.measure({"a": [one, two]}, None, cache, known)
    assert [asdict(run) | {"history": 0} for run in again.runs] == [
        asdict(run) | {"history": 0} for run in found.runs
    ]


def test_other_text_or_other_weights_are_measured_anew(text_file, tmp_path):
    cache = new_cache(tmp_path)
    one, config = trained(text_file, tmp_path / "one", cache)
    known = tmp_path / "compare.json"
    (first,) = measure.measure({"a": [one]}, None, cache, known)
    known.write_text(json.dumps(measure.as_json([first])))
    other = tmp_path / "other.txt"
    other.write_text("It is another text. " * 9)
    (second,) = measure.measure({"a": [one]}, [str(other)], cache, known)
    assert second.runs[0].loss != first.runs[0].loss
    train(config.with_train(steps=9), one, cache)
    (third,) = measure.measure({"a": [one]}, None, cache, known)
    assert third.runs[0].made_of != first.runs[0].made_of
    # The same weights with a window are another model.
    narrow = RunDirectory(one).config().model_dump()
    narrow["model"]["attention"]["window"] = 2
    RunDirectory(one).write_config(validate(narrow, {}))
    (fourth,) = measure.measure({"a": [one]}, None, cache, known)
    assert fourth.runs[0].loss != third.runs[0].loss


def variant(name: str, *bits: float) -> Variant:
    way = [(1, 1.0, 9.0), (2, 2.0, 2.0)]
    runs = [
        Measured("p", "m", "t", n, 9, b, 0.1, b, 0.1, 0.5, 1e4, 60.0, 2**28, list(way))
        for n, b in enumerate(bits)
    ]
    return Variant(name, runs, 1000, 64, 512, 32_768, {16: 900.0, 32: 800.0, 64: 700.0})


def test_the_first_is_what_others_are_held_against():
    found = measure.as_json([variant("a", 2.0, 2.1, 2.2), variant("b", 2.5, 2.6, 2.7)])["variants"]
    assert found[0]["bits_per_byte"] == pytest.approx(2.1)
    assert found[0]["bits_per_byte_spread"] == pytest.approx(0.1)
    assert found[1]["to_first"] == pytest.approx(0.5)
    assert found[1]["to_first_95"] == pytest.approx(2.78 * 0.1 * math.sqrt(2 / 3))
    assert found[1]["within_spread"] is False
    assert found[0]["within_spread"] is True
