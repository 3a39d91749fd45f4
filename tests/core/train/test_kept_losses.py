"""The losses that a run keeps of its held-out text, by which it is compared without its model."""

import json
from pathlib import Path

import numpy as np
import pytest

import gptmini
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from gptmini.train.kept_losses import read_losses
from tests.support import tiny, train


def trained(text_file: Path, folder: Path, **settings: object) -> Path:
    config = tiny(data={"path": str(text_file), "test": 0.2}, train=settings)
    train(config, folder / "run")
    return folder / "run"


def test_training_keeps_the_losses_of_its_best_step(text_file, tmp_path):
    path = trained(text_file, tmp_path, dtype="float32")
    kept = read_losses(path, "validation")
    best = json.loads((path / "best.json").read_text())
    assert (kept.step, kept.whole) == (best["step"], True)
    assert (kept.evaluation.loss, kept.evaluation.bits_per_byte) == (
        best["val_loss"],
        best["val_bpb"],
    )
    weights = RunDirectory(path).load_best().model.values()
    assert kept.parameters == sum(tensor.numel() for tensor in weights)
    found = gptmini.evaluate(path)
    np.testing.assert_allclose(kept.evaluation.nats, found.nats, rtol=1e-5)
    assert kept.evaluation.tokens.tolist() == found.tokens.tolist()
    assert kept.evaluation.bytes.tolist() == found.bytes.tolist()
    assert kept.evaluation.correct == found.correct
    assert read_losses(path, "test") is None


def test_a_kill_between_losses_and_checkpoint_changes_neither(text_file, tmp_path, monkeypatch):
    whole = trained(text_file, tmp_path)
    (tmp_path / "killed").mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "save_checkpoint", lambda training: (_ for _ in ()).throw(Killed()))
        trained(text_file, tmp_path / "killed")
    path = tmp_path / "killed" / "run"
    assert read_losses(path, "validation").step == 3
    config = RunDirectory(path).load_request()
    train(config, path)
    name = "losses-validation.json"
    assert (path / name).read_bytes() == (whole / name).read_bytes()


class Killed(KeyboardInterrupt):
    """Ends a run before a checkpoint is saved."""


def test_evaluate_keeps_what_training_has_not_read(text_file, tmp_path):
    path = trained(text_file, tmp_path, eval_tokens=32)
    assert not read_losses(path, "validation").whole
    for split in ("validation", "test"):
        found = gptmini.evaluate(path, split=split)
        kept = read_losses(path, split)
        assert (kept.whole, kept.step) == (
            True,
            RunDirectory(path).load_best(with_model=False).step,
        )
        assert kept.evaluation.nats.tolist() == found.nats.tolist()


def test_losses_of_other_weights_or_windows_are_not_kept(text_file, tmp_path):
    path = trained(text_file, tmp_path)
    rounded = gptmini.load(path, "cpu", "bfloat16", rounds_model=True)
    changed = gptmini.load(path, "cpu", "float32")
    changed.model.final_norm.weight.data[0] += 1
    for run in (rounded, changed):
        gptmini.evaluate(run, split="test")
    gptmini.evaluate(path, split="test", stride=3)
    gptmini.evaluate(path, str(text_file))
    assert not (path / "losses-test.json").exists()


def test_a_run_that_is_not_saved_is_evaluated_and_keeps_nothing(text_file, tmp_path):
    path = trained(text_file, tmp_path)
    saved = gptmini.load(path, "cpu", "float32")
    run = gptmini.Run(tmp_path / "new", saved.config, saved.tokenizer, saved.model, saved.state)
    for split in ("validation", "test"):
        found = gptmini.evaluate(run, split=split)
        assert found.loss == gptmini.evaluate(path, split=split).loss
    assert not run.path.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"step": 3}', '{"nats": ["a"], "tokens": []}'])
def test_a_damaged_file_counts_as_none(content, tmp_path):
    (tmp_path / "losses-test.json").write_text(content)
    assert read_losses(tmp_path, "test") is None
