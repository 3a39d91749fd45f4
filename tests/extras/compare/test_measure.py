"""Measuring finished runs by their files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gptmini.errors import CheckpointError, DataError
from gptmini.extras.compare.measure import measure_variants
from gptmini.runs.directory import RunDirectory
from tests.support import tiny, train


def trained(text_file: Path, folder: Path, **sections: Any) -> Path:
    train(tiny(**{"data": {"path": str(text_file)}} | sections), folder)
    return folder


def test_figures_are_of_the_run(text_file, tmp_path):
    one = trained(text_file, tmp_path / "one")
    two = trained(text_file, tmp_path / "two", train={"seed": 1})
    log = [
        {"tokens_per_second": 1.0, "seconds": 3.0},  # the start of the run
        {"tokens_per_second": 5.0, "seconds": 4.0},
        {"tokens_per_second": 6.0, "seconds": 5.0},  # resumed
        {"tokens_per_second": 20.0, "seconds": 6.0},
    ]
    written: dict[str, Any] = {}  # every figure of a line
    for line in (one / "metrics.jsonl").read_text().splitlines():
        written |= json.loads(line)
    lines = [json.dumps(written | each) for each in log]
    (one / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for path in (one, two):
        shutil.rmtree(RunDirectory(path).checkpoints / "step-00000003")
        for file in RunDirectory(path).checkpoints.glob("*/model.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))  # no weights are read
    (found,) = measure_variants({"a": [one, two]})
    assert found.cache_bytes == 16 * 2 * 2 * 32 * 4
    assert [run.seed for run in found.runs] == [1337, 1]
    best = json.loads((one / "best.json").read_text())
    run = found.runs[0]
    assert (run.step, run.loss, run.bits_per_byte) == tuple(
        best[key] for key in ("step", "val_loss", "val_bpb")
    )
    assert (run.tokens_per_second, run.seconds) == (6.0, 6.0)
    assert run.history[-1][0] == 6 * 4 * 16


def test_runs_of_other_texts_are_refused(text_file, tmp_path):
    one, two = (
        trained(text_file, tmp_path / str(share), data={"validation": share})
        for share in (0.1, 0.2)
    )
    with pytest.raises(DataError, match=r"0\.2: its held-out text is not that of .*0\.1"):
        measure_variants({"a": [one], "b": [two]})


def test_a_text_keeps_its_name_in_other_tokens(text_file, tmp_path):
    runs = {
        kind: [trained(text_file, tmp_path / kind, tokenizer={"kind": kind})]
        for kind in ("byte", "char")
    }
    assert len(measure_variants(runs)) == 2


def test_a_part_of_a_text_is_not_compared_with_all_of_it(text_file, tmp_path, gptmini):
    one = trained(text_file, tmp_path / "one")
    parts = [
        trained(text_file, tmp_path / str(seed), train={"eval_tokens": size, "seed": seed})
        for seed, size in ((1, 32), (2, 32), (3, 64))
    ]
    (same,) = measure_variants({"a": parts[:2]})
    assert not same.runs[0].whole
    with pytest.raises(DataError, match="3: measured on a part of"):
        measure_variants({"a": parts[:1], "b": parts[2:]})
    with pytest.raises(DataError, match=r"1: measured on a part of .* gptmini evaluate .*1 "):
        measure_variants({"a": [one], "b": parts[:1]})
    assert gptmini("evaluate", str(parts[0]))[0] == 0
    assert len(measure_variants({"a": [one], "b": parts[:1]})) == 2


def test_a_run_without_losses_is_told_how_to_measure_them(text_file, tmp_path, gptmini):
    """As of an earlier version, or after training on from an older checkpoint."""
    one = trained(text_file, tmp_path / "one")
    file = one / "losses-validation.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | {"step": 1}))
    with pytest.raises(CheckpointError, match=r"no losses .* gptmini evaluate .*one --split valid"):
        measure_variants({"a": [one]})
    file.unlink()
    code, _, err = gptmini("compare", str(one))
    assert (code, "measure them with gptmini evaluate" in err.splitlines()[-1]) == (4, True)
    assert gptmini("evaluate", str(one))[0] == 0
    assert json.loads(file.read_text())["step"] == before["step"]
    assert gptmini("compare", str(one))[0] == 0
