"""metrics.jsonl, and the same metrics in TensorBoard and Weights & Biases."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from gptmini.errors import MachineError
from gptmini.runs import log
from tests.support import tiny, train

EVALUATED = {"val_loss": 1.5, "val_bpb": 2.0, "sample": "a", "peak_memory": 1}


def stamp(step: int) -> dict:
    return {"step": step, "tokens": 64 * step, "seconds": 0.5}


def lines(run: Path) -> list[dict]:
    """The lines of a run, without the time of day."""
    return without_time(
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    )


def without_time(logged: Iterable[dict]) -> list[dict]:
    return [{key: line[key] for key in line if key != "wall_time"} for line in logged]


def test_tensorboard_has_every_number_and_resumes_with_the_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    run.mkdir()
    for begun in (0, 2):
        written = log.RunLog(run, tiny(train={"log_to": ["tensorboard"]}), begun)
        for step in range(begun + 1, begun + 4):
            written.write(stamp(step) | {"lr": step / 8} | (EVALUATED if step % 2 else {}))
        written.close()
    place = f"  tracking  {run}/tensorboard; see it with: tensorboard --logdir {tmp_path}\n"
    assert capsys.readouterr().err == place * 2
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for key in ("lr", "val_bpb"):
        found = [(event.step, event.value) for event in events.Scalars(key)]
        logged = [(line["step"], line[key]) for line in lines(run) if key in line]
        assert [step for step, _ in found] == [step for step, _ in logged]
        assert [value for _, value in found] == pytest.approx([value for _, value in logged])
    assert events.Tags()["tensors"] == ["sample/text_summary"]


@pytest.mark.slow
def test_wandb_has_every_number(text_file, tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    logged = []
    log_of_wandb = wandb.Run.log
    monkeypatch.setattr(
        wandb.Run,
        "log",
        lambda self, data, step: (logged.append(data), log_of_wandb(self, data, step=step)),
    )
    config = tiny(data={"path": str(text_file)}, train={"log_to": ["wandb"]})
    train(config, run)
    assert (
        f"  tracking  {run}/wandb: offline; upload it with wandb sync\n" in capsys.readouterr().err
    )
    assert logged == lines(run)
    name = (run / "wandb.id").read_text()
    assert list((run / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))


def test_a_tracker_that_is_not_installed_is_named_before_the_first_step(
    text_file, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny(data={"path": str(text_file)}, train={"log_to": ["wandb"]})
    with pytest.raises(
        MachineError, match=r"wandb is not installed; run pip install 'gptmini\[wandb\]'"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tracker_that_fails_does_not_end_the_training(text_file, tmp_path, monkeypatch, capsys):
    def write(metrics):
        raise ConnectionError("nobody there")

    def close():
        raise AssertionError("it was dropped when it failed")

    monkeypatch.setitem(log.TRACKERS, "wandb", lambda *_: (write, close))
    config = tiny(data={"path": str(text_file)}, train={"log_to": ["wandb"]})
    train(config, tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 6
    err = capsys.readouterr().err
    failed = "wandb failed (ConnectionError('nobody there')); continuing without it"
    assert err.count(f"warning: train.log_to: {failed}") == 1


def test_a_tracker_that_cannot_start_is_named(text_file, tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("Not logged in.\nRun wandb login.")

    monkeypatch.setitem(log.TRACKERS, "wandb", broken)
    config = tiny(data={"path": str(text_file)}, train={"log_to": ["wandb"]})
    with pytest.raises(
        MachineError, match=r"wandb: Not logged in\. Run wandb login; or remove wandb"
    ):
        train(config, tmp_path / "run")


def test_a_log_drops_later_steps_and_a_line_cut_by_a_crash(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(stamp(step))}\n" for step in (1, 2, 3)) + '{"st')
    written = log.RunLog(tmp_path, tiny(), 2)
    written.write(stamp(3) | EVALUATED)
    assert lines(tmp_path) == [stamp(1), stamp(2), stamp(3) | EVALUATED]
    written.close()
    written = log.RunLog(tmp_path, tiny(), 1)
    written.write(stamp(2))
    written.close()
    assert without_time(log.read_metrics(path)) == lines(tmp_path) == [stamp(1), stamp(2)]
    assert capsys.readouterr().err == ""


def test_a_line_may_have_zeros(tmp_path, capsys):
    """As that of a base before its first update, and of a model that has learned all there is."""
    line = {"step": 0, "tokens": 0, "seconds": 0.0} | EVALUATED | {"val_loss": 0.0, "val_bpb": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert log.read_metrics(tmp_path / "metrics.jsonl") == [line]
    assert capsys.readouterr().err == ""


def test_every_line_has_the_time_of_day_in_seconds_since_1970(tmp_path, monkeypatch):
    times = iter([1.7e9, 1.7e9 + 0.25004])
    monkeypatch.setattr(log.time, "time", lambda: next(times))
    written = log.RunLog(tmp_path, tiny(), 0)
    tracked: list[dict] = []
    written._trackers["tensorboard"] = (tracked.append, lambda: None)
    written.write(stamp(1))
    written.write(stamp(2) | EVALUATED)
    written.close()
    found = log.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["wall_time"] for line in found] == [1.7e9, 1.7e9 + 0.25]
    assert tracked == without_time(found) == [stamp(1), stamp(2) | EVALUATED]


@pytest.mark.parametrize(
    "line", ["null", "[1]", "{", "[" * 100_000, '{"step": 2}', "\x00\xff"], ids=range(6)
)
def test_a_line_that_training_did_not_write_is_skipped_with_a_warning(tmp_path, capsys, line):
    path = tmp_path / "metrics.jsonl"
    first = json.dumps(stamp(1))
    last = json.dumps(stamp(3) | EVALUATED)
    path.write_text("\n".join([first, line, line, last, ""]), encoding="latin-1")
    assert log.read_metrics(path) == [stamp(1), stamp(3) | EVALUATED]
    expected = f"warning: {path}: skipped 2 lines not written by training\n"
    assert capsys.readouterr().err == expected
    log.RunLog(tmp_path, tiny(), 3).close()  # as when the run is resumed
    assert lines(tmp_path) == [stamp(1), stamp(3) | EVALUATED]
    assert capsys.readouterr().err == expected
