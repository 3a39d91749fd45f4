"""Fine-tuning: a run that begins with the weights and the tokenizer of another."""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini.config.load import validate
from gptmini.config.settings import Config
from gptmini.errors import CheckpointError, ConfigError, DataError, GptminiError, Stopped
from gptmini.generate.run import load_run
from gptmini.plan import minutes, reconcile
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from gptmini.train.evaluate_run import evaluate_run, load_corpus
from tests.support import SMALL, tiny
from tests.support import train as begin_training

CLOCK = {"seconds", "wall_time", "tokens_per_second", "peak_memory"}
STEPS = {"steps": 6, "eval_every": 3, "save_every": 2, "log_every": 1, "patience": None, "keep": 9}


@pytest.fixture
def other_text(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text("".join(f"{n} apples, {n + 1} pears and the fox\n" for n in range(60)))
    return path


@pytest.fixture
def base(text_file: Path, tmp_path: Path) -> RunDirectory:
    """A run whose tokenizer was learned from its text and whose shape is not the default."""
    config = tiny(
        data={"path": str(text_file)},
        tokenizer={"kind": "bpe", "vocab_size": 300},
        model={"attention": {"variant": "gqa", "n_kv_head": 2}, "norm": "rmsnorm"},
        train={"lr": 4e-3, "embed_lr": 8e-3, "muon_lr": 0.01, "betas": [0.8, 0.9], "batch_size": 4},
    )
    begin_training(config, tmp_path / "base")
    return RunDirectory(tmp_path / "base")


@pytest.fixture
def requested(base: RunDirectory, other_text: Path) -> Config:
    return on(base, other_text)


def on(trained: RunDirectory, text: Path, **sections: dict[str, Any]) -> Config:
    """The configuration of a fine-tuning that takes a second."""
    own = {"base": {"run": str(trained.path)}, "data": {"path": str(text)}, "train": STEPS}
    names = own.keys() | sections.keys()
    tree = {name: own.get(name, {}) | sections.get(name, {}) for name in names}
    return validate({**tree, "sample": {"max_new_tokens": 8}}, {})


@pytest.fixture
def tune(tmp_path: Path):
    def run(config: Config, name: str = "tuned") -> RunDirectory:
        out = RunDirectory(tmp_path / name)
        loop.train(make_plan(config, out), out.path)
        return out

    return run


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file of a folder with its bytes and the time of its last change."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def result(run: RunDirectory) -> tuple[Any, ...]:
    """The newest weights and optimizer, and the metrics without what a clock said."""
    checkpoint = run.load_newest()
    assert checkpoint is not None
    tensors = {**checkpoint.model, **{f"o/{k}": v for k, v in checkpoint.optimizer.items()}}
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return (
        checkpoint.step,
        {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        [{key: line[key] for key in line.keys() - CLOCK} for line in lines],
    )


def test_it_begins_with_the_weights_and_tokenizer_of_a_base_that_stays_as_it_is(
    base, requested, tune
):
    before = contents(base.path)
    run = tune(requested)
    assert contents(base.path) == before
    start = run.load_checkpoint(0, with_optimizer=True)
    best = base.load_best()
    assert start.model.keys() == best.model.keys()
    assert all(torch.equal(start.model[name], best.model[name]) for name in best.model)
    assert start.optimizer == {}
    assert run.tokenizer_file.read_bytes() == base.tokenizer_file.read_bytes()
    assert run.list_steps()[0] == 6
    assert not torch.equal(run.load_newest().model["embed.weight"], best.model["embed.weight"])


def test_the_loss_of_the_base_on_the_new_text_is_step_0(base, requested, tune, tmp_path, capsys):
    run = tune(on(base, Path(requested.data.path[0]), train={**STEPS, "dtype": "float32"}))
    first, *rest = (json.loads(line) for line in run.metrics_file.read_text().splitlines())
    text = load_corpus(load_run(run.path, "cpu", "float32")).validation
    expected = evaluate_run(load_run(base.path, "cpu", "float32"), text)
    assert (first["step"], first["tokens"]) == (0, 0)
    assert first["val_loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert first["val_bpb"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert isinstance(first["sample"], str)
    assert [line["step"] for line in rest] == [1, 2, 3, 4, 5, 6]
    assert f"step 0/6   0%  val {expected.loss:.4f}" in capsys.readouterr().err


def test_if_tuning_only_harms_the_base_remains_the_best(base, text_file, tune, tmp_path):
    run = tune(on(base, text_file, train={**STEPS, "lr": 5.0, "muon_lr": 5.0, "keep": 1}))
    assert sorted(run.list_steps()) == [0, 6]
    best = load_run(run.path, "cpu", "float32")
    assert best.step == 0
    assert torch.equal(best.model.embed.weight, base.load_best().model["embed.weight"])


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("owner", "function"),
    [(RunDirectory, "create"), (loop, "evaluate_validation"), (loop, "save_checkpoint")],
)
def test_a_killed_run_needs_no_base_to_end_in_the_same_bits(
    base, requested, tune, tmp_path, monkeypatch, owner, function
):
    whole = result(tune(requested, "whole"))

    def killed(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, function, killed)
        with pytest.raises(Killed):
            tune(requested)
    if RunDirectory(tmp_path / "tuned").exists:
        shutil.rmtree(base.path)
    assert result(tune(requested)) == whole
    assert whole[0] == 6
    assert [line["step"] for line in whole[2]] == list(range(7))


@pytest.mark.usefixtures("default_signals")
def test_a_signal_during_the_first_evaluation_saves(base, requested, tune, monkeypatch):
    whole = result(tune(requested, "whole"))
    assess = loop.evaluate_validation

    def interrupted(training: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return assess(training)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate_validation", interrupted)
        with pytest.raises(Stopped, match="after step 1, saved"):
            tune(requested)
    assert result(tune(requested)) == whole


def test_without_a_checkpoint_it_never_begins_untrained(requested, tune):
    run = tune(requested)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from; delete"):
        tune(requested)


def test_what_is_not_stated_comes_from_the_base(base, other_text, tmp_path):
    def decided(**sections: dict[str, Any]) -> Config:
        return make_plan(on(base, other_text, **sections), None).config

    config = decided()
    trained = base.load_config()
    theirs = trained.model.model_dump(exclude={"dropout"})
    assert config.model.model_dump(exclude={"dropout"}) == theirs
    assert config.tokenizer == trained.tokenizer
    assert config.train.lr == pytest.approx(reconcile.LR_SHARE_OF_BASE * 4e-3)
    assert config.train.embed_lr == pytest.approx(reconcile.LR_SHARE_OF_BASE * 8e-3)
    assert config.train.muon_lr == pytest.approx(reconcile.LR_SHARE_OF_BASE * 0.01)
    assert (config.train.betas, config.train.batch_size) == ([0.8, 0.9], 4)
    assert config.train.optimizer == "muon"
    stated = decided(
        model={"dropout": 0.3, "n_layer": 2, "attention": {"weight_dropout": 0.1}},
        train={**STEPS, "lr": 1e-3, "optimizer": "adamw", "batch_size": 2, "seq_len": 8},
    )
    assert stated.model.dropout == 0.3
    assert stated.model.attention.weight_dropout == 0.1
    assert stated.model.n_kv_head == 2
    assert (stated.train.lr, stated.train.optimizer, stated.train.batch_size) == (1e-3, "adamw", 2)
    assert stated.train.embed_lr == pytest.approx(2e-3)  # twice lr, as in the base
    assert stated.seq_len == 8


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"model": {"d_model": 64}}, "model.d_model: 64, but .*base has 32; leave it out"),
        (
            {"model": {"attention": {"variant": "mqa"}}},
            "model.attention.variant: mqa, but .* has gqa; gptmini convert makes",
        ),
        ({"model": {"context_length": 8}}, "model.context_length: 8, .* 16; set train.seq_len"),
        ({"tokenizer": {"kind": "byte"}}, "tokenizer.kind: byte, but .* has bpe; leave it out"),
        ({"base": {"sha256": "ab"}}, "base.sha256: ab, but the best checkpoint of .* has "),
    ],
)
def test_what_contradicts_the_base_is_refused_by_its_key(
    base, other_text, tmp_path, sections, line
):
    with pytest.raises(ConfigError, match=line) as refused:
        make_plan(on(base, other_text, **sections), None)
    assert len(refused.value.lines) == 1


def test_the_origin_is_recorded_and_can_be_repeated(base, requested, tune):
    run = tune(requested)
    origin = run.load_config().base
    assert origin.run == str(base.path)
    weights = base.checkpoints / f"step-{origin.step:08d}" / "model.safetensors"
    assert origin.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert result(tune(run.load_config(), "again")) == result(run)


def test_the_same_command_resumes_and_another_base_is_refused(base, requested, tune, tmp_path):
    run = tune(requested)
    first = run.load_config()
    assert make_plan(requested, run).config == first
    assert tune(requested.with_train(steps=8)).list_steps()[0] == 8
    shutil.copytree(base.path, tmp_path / "copy")
    for other in (tmp_path / "copy", None):
        elsewhere = requested.base.model_copy(update={"run": other and str(other)})
        with pytest.raises(ConfigError, match=r"base\.run: .*base in .*tuned, now "):
            tune(requested.model_copy(update={"base": elsewhere}))


def test_a_base_that_cannot_be_used_is_named_and_nothing_is_left(base, requested, tune, tmp_path):
    def refused(kind: type[GptminiError], match: str, config: Config = requested) -> None:
        with pytest.raises(kind, match=match):
            tune(config)
        assert not (tmp_path / "tuned").exists()

    refused(CheckpointError, "no run here", on(RunDirectory(tmp_path / "x"), tmp_path))
    with pytest.raises(ConfigError, match=r"base: is the base itself; choose another"):
        tune(requested, "base")
    tokenizer = base.tokenizer_file.read_bytes()
    base.tokenizer_file.write_text(json.dumps({"format": 1, "kind": "byte"}))
    refused(DataError, "not the tokenizer of this run")
    base.tokenizer_file.write_bytes(tokenizer)
    for file in base.checkpoints.glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    refused(CheckpointError, "every checkpoint is damaged")
    shutil.rmtree(base.checkpoints)
    refused(CheckpointError, "no checkpoint yet")


def test_a_base_that_changes_meanwhile_is_noticed(base, requested, tmp_path):
    out = RunDirectory(tmp_path / "tuned")
    plan = make_plan(requested, out)
    (base.path / "best.json").unlink()
    longer = base.load_config().with_train(steps=8)
    begin_training(longer, base.path)
    assert base.load_best().step != plan.config.base.step
    with pytest.raises(CheckpointError, match="damaged or has changed"):
        loop.train(plan, out.path)
    assert not out.exists


def test_a_text_shorter_than_a_window_is_refused(base, tmp_path, tune):
    short = tmp_path / "short.txt"
    short.write_text("the fox")
    with pytest.raises(DataError, match="too short"):
        tune(on(base, short))


def test_minutes_choose_the_steps_and_not_the_model(base, other_text, tune, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: 0.01 * next(ticks))  # the same on any machine
    monkeypatch.setattr(minutes, "TARGET_UPDATES", 1)
    requested = on(base, other_text)
    steps = {key: value for key, value in STEPS.items() if key in ("patience", "keep")}
    requested = validate(
        {**requested.model_dump(exclude_unset=True), "train": {**steps, "minutes": 0.05}}, {}
    )
    run = tune(requested)
    config = run.load_config()
    assert config.model.model_copy(update={"dropout": 0}) == base.load_config().model.model_copy(
        update={"dropout": 0}
    )
    assert (config.train.batch_size, config.base.step) == (4, base.load_best().step)
    assert run.list_steps()[0] == config.train.steps
    assert make_plan(requested, run).config == config


@pytest.mark.parametrize(
    ("train", "warmup"),
    [
        ({"steps": 1}, 1),
        ({"steps": 6}, 2),
        ({"steps": 16}, 4),
        ({"steps": 100}, 10),
        ({"steps": 800}, 20),
        ({"steps": 16, "warmup_steps": 0}, 0),
    ],
)
def test_few_steps_from_a_base_warm_up(base, other_text, tmp_path, train, warmup):
    sections = on(base, other_text).model_dump(exclude_unset=True) | {"train": train}
    plan = make_plan(validate(sections, {}), None, dry_run=True)
    assert plan.config.train.warmup_steps == warmup


def test_a_plan_needs_no_weights(base, requested, tmp_path):
    for file in base.checkpoints.glob("*/model.safetensors"):
        file.unlink()
    config = make_plan(requested, None, dry_run=True).config
    assert config.model.n_kv_head == 2
    assert config.base.sha256 is None


# -- the command line ------------------------------------------------------------------------------


def test_the_command_line_tunes_and_shows_the_origin(gptmini, text_file, other_text):
    assert gptmini("train", "--data", "text.txt", *SMALL)[0] == 0
    small = ["--steps", "2", "--set", "sample.max_new_tokens=4"]
    words = ["--from", "runs/text/", "--data", "other.txt", *small]
    code, _, err = gptmini("train", *words)
    assert code == 0, err
    assert "  base      runs/text, step 4: its weights and tokenizer\n" in err
    assert math.isfinite(float(err.partition("step 0/2   0%  val ")[2].split()[0]))
    assert RunDirectory(Path("runs/other-from-text")).load_config().base.run == "runs/text"
    shutil.rmtree("runs/text")
    assert "already finished at step 2" in gptmini("train", *words)[2]
    assert "already finished at step 2" in gptmini("train", "runs/other-from-text")[2]


def test_mistakes_are_one_line(gptmini, text_file, other_text):
    assert gptmini("train", "--data", "text.txt", *SMALL)[0] == 0
    data = ["--data", "other.txt"]
    for words, code, line in [
        (["--from", "runs/text"], 2, "--from runs/text: needs a text; add --data PATH"),
        (["--from", "runs/txt", *data], 4, "runs/txt: no run here; did you mean runs/text?"),
        (["--from", "runs/text", *data, "--out", "runs/text"], 2, "runs/text: is the base itself"),
        (["--from", "runs/text", *data, "--attention", "mqa"], 2, "model.attention.variant: mqa"),
        (["--from", "runs/text", "--data", "missing.txt"], 3, "missing.txt"),
    ]:
        found, _, err = gptmini("train", *words)
        assert found == code, err
        assert line in err
        assert err.count("gptmini: ") == 1


def test_the_memory_that_training_takes_is_said_before_it_begins(tune, requested, base, capsys):
    tune(requested, "tuned")
    header = capsys.readouterr().err.split("step 0/6")[0]
    (line,) = [each for each in header.splitlines() if each.startswith("  memory    about ")]
    weights = sum(tensor.nbytes for tensor in base.load_best().model.values())
    assert line.endswith("kB at the peak")
    assert float(line.split()[2]) * 1000 > 4 * weights  # also gradients and two moments
