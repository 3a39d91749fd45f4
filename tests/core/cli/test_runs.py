"""`gptmini runs`: what it lists."""

import json
import os
import shutil
from pathlib import Path

import pytest

from gptmini.cli.options import find_newest_run
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import tiny


def list_runs(gptmini, *words: str) -> dict:
    code, out, err = gptmini("runs", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_run_is_listed_with_its_figures(gptmini, run):
    shutil.copytree(run, "runs/compare/a/seed-0")
    Path("runs/link").symlink_to("text")  # the same run once more
    os.utime(Path(run) / "lock", (4e9, 4e9))  # begun again, and nothing written yet
    listed = list_runs(gptmini)["runs"]
    assert [each["path"] for each in listed] == ["runs/compare/a/seed-0", "runs/text"]
    found = listed[1]
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    (validation,) = [line for line in lines if line["step"] == 4]
    assert (found["step"], found["steps"]) == (4, 4)
    assert (found["val_loss"], found["val_bpb"]) == (validation["val_loss"], validation["val_bpb"])
    files = [file for file in Path(run).rglob("*") if file.is_file()]
    assert found["bytes"] == sum(file.stat().st_size for file in files)
    assert found["written"] == max(file.stat().st_mtime for file in files if file.name != "lock")
    weights = RunDirectory(Path(run)).load_best().model.values()
    assert found["parameters"] == sum(tensor.numel() for tensor in weights)
    assert not found["being_trained"]
    out = gptmini("runs", run)[1]
    head, row, *_ = out.splitlines()
    assert head.split()[:2] == ["run", "steps"]
    assert row.split()[:2] == ["runs/text", "4/4"]
    assert f"{validation['val_bpb']:.4f}" in row
    assert "tokens" not in row  # but all of the held-out text
    assert "compare runs on one text: bits/byte, lower is better" in out
    assert "cache: " in out


def test_files_among_the_folders_are_passed_over_and_an_import_has_no_steps(gptmini, run):
    Path("runs/compare.json").write_text("{}")
    found = RunDirectory(Path(run))
    for step in found.list_steps()[1:]:
        shutil.rmtree(Path(run, f"checkpoints/step-{step:08}"))
    (state,) = Path(run).glob("checkpoints/*/state.json")
    imported = json.loads(state.read_text()) | {"step": 0, "source": "hf:a/b"}
    state.write_text(json.dumps(imported))
    state.parent.rename(state.parent.with_name("step-00000000"))
    row = gptmini("runs", run, "runs/compare.json")[1].splitlines()[1]
    assert row.split()[:2] == ["runs/text", "imported"]


def test_the_loss_of_a_part_of_the_text_is_marked(gptmini, run):
    settled = RunDirectory(Path(run))
    settled.write_config(settled.load_config().with_train(eval_tokens=1024))
    assert gptmini("runs")[1].splitlines()[1].endswith("  loss of 1,024 tokens")
    assert list_runs(gptmini)["runs"][0]["eval_tokens"] == 1024


def test_a_run_in_training_is_as_far_as_its_last_line(gptmini, run):
    fcntl = pytest.importorskip("fcntl")
    with (Path(run) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tokens": 1, "seconds": 1}\n')
    with (Path(run) / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listed = list_runs(gptmini)
        assert "being trained now" in gptmini("runs")[1]
    assert listed["runs"][0]["being_trained"]
    assert listed["runs"][0]["step"] == 5
    assert list_runs(gptmini)["runs"][0]["step"] == 4


def test_a_damaged_run_hides_no_other(gptmini, run):
    shutil.copytree(run, "runs/damaged")
    Path("runs/damaged/config.yaml").write_text("model: [")
    damaged, other = list_runs(gptmini)["runs"]
    assert "config.yaml" in damaged["problem"]
    assert other["problem"] == ""
    assert "runs/damaged/config.yaml" in gptmini("runs")[1]


@pytest.mark.parametrize(("words", "code"), [([], 0), (["nowhere"], 4)])
def test_where_no_run_is_it_says_so(gptmini, words, code):
    found, _, err = gptmini("runs", *words)
    assert found == code
    assert err.count("\n") == 1
    assert "no run here" in err or "nowhere: no such folder" in err


def test_the_newest_run_is_the_one_that_saved_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("earlier", "finished", "converted", "begun"), 1):
        run = RunDirectory(Path("runs", name))
        run.create(tiny(), ByteTokenizer())
        os.utime(run.config_file, (number, number))
        if name in ("earlier", "finished"):
            run.write_best({"step": 1, "val_loss": 1.0})
            os.utime(run.path / "best.json", (number, number))
    for name in ("finished", "earlier", "begun"):
        assert find_newest_run() == Path("runs", name)
        shutil.rmtree(Path("runs", name))
