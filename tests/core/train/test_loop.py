import json
import math
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from gptmini.config.settings import Config
from gptmini.errors import ConfigError, DataError, DivergedError
from gptmini.generate.run import Run
from gptmini.machine import catch_signals
from gptmini.model.gpt import GPT
from gptmini.plan import recipe
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from gptmini.train import build, loop, sample
from gptmini.train.checkpoint import create_or_resume, save_checkpoint
from gptmini.train.header import say_header_lines
from tests.support import prepared, tiny
from tests.support import train as begin_training

COMPUTE_LOSS = GPT.compute_loss  # as it is before a test replaces it

CLOCK = {"seconds", "wall_time", "tokens_per_second", "peak_memory"}  # what depends on the moment


@pytest.fixture
def config(text_file: Path) -> Config:
    return tiny(data={"path": str(text_file)}, model={"dropout": 0.1})


@pytest.fixture
def train(tmp_path: Path):
    def run(config: Config, name: str = "run") -> RunDirectory:
        begin_training(config, tmp_path / name)
        return RunDirectory(tmp_path / name)

    return run


def weights(run: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    path = run.checkpoints / f"step-{step:08d}" / "model.safetensors"
    return safetensors.torch.load_file(path)


def metrics(run: RunDirectory) -> list[dict]:
    """The lines of metrics without what a clock said."""
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def stop_after(monkeypatch: pytest.MonkeyPatch, updates: int, act) -> None:
    """Do something to the process in the middle of its n-th update."""
    update = loop.train_step
    made = 0

    def counting(training):
        nonlocal made
        made += 1
        if made == updates:
            act()
        return update(training)

    monkeypatch.setattr(loop, "train_step", counting)


class Killed(BaseException):
    pass


def kill() -> None:
    raise Killed


@pytest.mark.parametrize("updates", [1, 4, 5])
def test_a_killed_run_ends_in_the_same_bits(train, config, monkeypatch, updates):
    whole = train(config, "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, updates, kill)
        with pytest.raises(Killed):
            train(config, "killed")
    killed = train(config, "killed")
    assert same(weights(whole, 6), weights(killed, 6))
    assert metrics(whole) == metrics(killed)
    assert [line["step"] for line in metrics(killed)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("default_signals")
def test_a_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt), catch_signals() as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert received.stop == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("grad_clip", [1e9, 0.01])
@pytest.mark.parametrize("micro_batch_size", [4, 2, 1])
def test_an_update_is_that_of_the_large_batch(text_file, tmp_path, micro_batch_size, grad_clip):
    """Loss, gradients, their norm, clipping and rate, against one plain pass over all rows."""
    settings = {"micro_batch_size": micro_batch_size, "grad_clip": grad_clip, "warmup_steps": 5}
    config = tiny(data={"path": str(text_file)}, train=settings | {"dtype": "float32"})
    training = prepared(config, tmp_path / "run")
    model = training.model
    optimizer = training.optimizer
    rates: list[float] = []
    for step in (2, 5):
        training.progress.step = step
        tokens, targets = training.batches.get_batch(step)
        scores = model(tokens).log_softmax(-1)
        expected_loss = -scores.gather(-1, targets[..., None]).mean()
        gradients = torch.autograd.grad(expected_loss, list(model.parameters()))
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt().item()
        assert 0.01 < norm < 1e9
        optimizer.step = rates.append  # type: ignore[method-assign]
        metrics = loop.train_step(training)
        rate = config.train.lr * {2: 3 / 5, 5: 1}[step]
        assert rates.pop() == metrics["lr"] == pytest.approx(rate)
        assert metrics["train_loss"] == pytest.approx(expected_loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            clipped = gradient * min(1, grad_clip / norm)
            bound = clipped.abs().max().item()
            torch.testing.assert_close(parameter.grad, clipped, atol=1e-4 * bound, rtol=1e-3)
            parameter.grad = None


def count_steps_as_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a clock by which step n takes n seconds."""
    update = loop.train_step
    now = 0.0

    def timed(training: Any) -> Any:
        nonlocal now
        now += training.step + 1
        return update(training)

    monkeypatch.setattr(loop, "train_step", timed)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now))


def test_the_log_has_the_first_step_the_last_and_the_speed_since_the_line_before(
    train, text_file, monkeypatch
):
    """On a clock by which step n takes n seconds."""
    count_steps_as_seconds(monkeypatch)
    intervals = {"steps": 10, "log_every": 4, "eval_every": 100, "save_every": 100}
    run = train(tiny(data={"path": str(text_file)}, train=intervals))
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 10]
    assert [line["seconds"] for line in lines] == [1, 10, 36, 55]
    speeds = [64 / 1, 3 * 64 / (2 + 3 + 4), 4 * 64 / (5 + 6 + 7 + 8), 2 * 64 / (9 + 10)]
    assert [line["tokens_per_second"] for line in lines] == [round(speed, 1) for speed in speeds]


def test_a_resumed_run_logs_the_speed_since_it_was_saved(train, text_file, monkeypatch):
    """Step n takes n seconds; the first command makes 5 of them, the second one logs step 8."""
    count_steps_as_seconds(monkeypatch)
    intervals = {"log_every": 4, "eval_every": 100, "save_every": 100}
    for steps in (5, 8):
        run = train(tiny(data={"path": str(text_file)}, train=intervals | {"steps": steps}))
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 5, 8]
    assert lines[-1]["tokens_per_second"] == round(3 * 64 / (6 + 7 + 8), 1)


def test_a_longer_run_goes_on_and_a_finished_one_rests(train, config, capsys):
    train(config)
    shorter = config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})})
    assert train(shorter).load_config().train.steps == 6
    train(config)
    err = capsys.readouterr().err
    assert err.count("run: already finished at step 6; pass a larger --steps to train longer") == 2
    assert "resuming" not in err
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 9})})
    run = train(longer)
    assert run.list_steps()[0] == 9
    assert run.load_config().train.steps == 9


def test_another_micro_batch_is_said_to_change_the_bits(train, config, capsys):
    train(config.with_train(micro_batch_size=4, steps=2))
    capsys.readouterr()
    train(config.with_train(micro_batch_size=4, steps=4))
    assert "bit-identical" not in capsys.readouterr().err
    train(config.with_train(micro_batch_size=2, steps=6))
    line = "run: micro_batch_size was 4, is 2; results will no longer be bit-identical\n"
    assert capsys.readouterr().err.count(line) == 1


def test_samples_are_drawn_as_generate_draws_them(text_file, tmp_path):
    """With bias, bans and stop texts; after some updates, so that not all are alike."""
    settings = {"temperature": 0, "max_new_tokens": 20, "start": "the "}
    cases = [{}, {"bias": {"q": 50.0}}, {"ban": [" ", "o"]}, {"stop": ["o", "ck"]}]
    cases.append({"bias": {"a": 50.0, "b": 50.0}, "ban": ["a"], "stop": ["bbbb"]})
    samples = []
    for number, case in enumerate(cases):
        config = tiny(
            data={"path": str(text_file)},
            train={"dtype": "float32", "compile": "off", "micro_batch_size": 4},
            sample=settings | case,
        )
        training = prepared(config, tmp_path / f"run-{number}")
        for _ in range(30):
            loop.train_step(training)
        samples.append(sample.generate_sample(training))
        tokenizer = training.corpus.tokenizer
        model = training.model
        same_model = Run(tmp_path, training.config, tokenizer, model)
        drawn = same_model.start([""], use_cache=False, overflow="stop").finish()
        assert samples[-1] == f"the {drawn[0].text}"  # a sample shows what it begins with
    samples = [each.removeprefix("the ") for each in samples]
    assert samples[1] == "q" * len(samples[1]) != ""
    assert samples[4] == ""
    assert not {" ", "o"} & set(samples[2])
    assert len(set(samples)) > 3


@pytest.mark.parametrize(("steps", "expected"), [(1, 20), (12, 48), (25, 100), (999, 120)])
def test_little_training_gets_short_samples(steps, expected):
    train = {"steps": steps, "batch_size": 25, "eval_every": 100}
    config = tiny(train=train, sample={"max_new_tokens": 256})
    assert sample._limit_sample_tokens(config) == expected
    shorter = tiny(train=train, sample={"max_new_tokens": 8})
    assert sample._limit_sample_tokens(shorter) == 8


def test_a_ban_of_several_tokens_is_refused_before_the_first_step(text_file, tmp_path):
    config = tiny(data={"path": str(text_file)}, sample={"ban": ["the"]})
    with pytest.raises(ConfigError, match=r"sample\.ban: 'the' is not one token"):
        prepared(config, tmp_path / "run")


@pytest.mark.parametrize(("name", "other"), [("threads", 99), ("deterministic", True)])
def test_a_run_that_goes_on_elsewhere_says_that_its_bits_will_differ(
    train, config, monkeypatch, capsys, name, other
):
    begin = build._start_progress
    train(config.with_train(steps=3))
    monkeypatch.setattr(build, "_start_progress", lambda *to: replace(begin(*to), **{name: other}))
    train(config)
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "bit-identical" in line]
    assert f"run: {name} was " in line
    assert line.endswith(f", is {other}; results will no longer be bit-identical")
    monkeypatch.undo()
    train(config)  # it has ended, so nothing depends on where
    assert "bit-identical" not in capsys.readouterr().err


def test_minutes_cannot_be_given_to_a_run_that_was_trained_by_steps(train, config):
    train(config)
    words = r"^train.minutes: not set in .*run, now 2\.0; .*--out .*run-2 begins another$"
    with pytest.raises(ConfigError, match=words):
        train(config.with_train(minutes=2.0))


def test_a_run_says_its_recipe_if_asked(tmp_path, text_file, capsys):
    data = {"path": str(text_file)}
    untied = tiny(data=data, model={"tie_embeddings": False})
    say_header_lines(prepared(untied, tmp_path / "quiet"))
    assert "  recipe  " not in capsys.readouterr().err
    say_header_lines(prepared(untied, tmp_path / "run"), verbose=True)
    line = "  recipe    Muon lr 0.02, AdamW lr 0.002, embeddings lr 0.012, weight decay 0.1, "
    line += "untied head, dropout 0, 64 tokens a step\n"
    assert line in capsys.readouterr().err
    adamw = tiny(data=data, train={"optimizer": "adamw", "steps": 168})  # 4 epochs
    say_header_lines(prepared(adamw, tmp_path / "adamw"), verbose=True)
    line = "  recipe    small text: AdamW lr 0.002, weight decay 0.3, tied head, dropout 0, "
    assert line in capsys.readouterr().err  # 24,576 weights for 2,684 tokens


@pytest.mark.parametrize(
    ("width", "steps", "warning"),
    [
        (32, 6, None),
        (32, 1260, "training reads the text 30 times; little is learned after 20, so"),
        (64, 630, "training reads the text 15 times; a model of this size gets worse after 10, so"),
    ],
)
def test_more_epochs_than_are_useful_get_a_warning(
    text_file, tmp_path, monkeypatch, capsys, width, steps, warning
):
    monkeypatch.setattr(recipe, "MIN_USEFUL_TOKENS", 0)
    config = tiny(data={"path": str(text_file)}, model={"d_model": width}, train={"steps": steps})
    plan = make_plan(config, None)
    training = build.build_training(plan, RunDirectory(tmp_path / "run"))
    say_header_lines(training)
    assert ("times;" in (said := capsys.readouterr().err)) == (warning is not None)
    assert warning is None or f"warning: {warning} use more text or fewer steps\n" in said
    training.plan = replace(plan, request=replace(plan.request, stated=Config(data=config.data)))
    say_header_lines(training)  # steps that nobody stated
    assert "times;" not in capsys.readouterr().err


def test_evaluations_read_as_much_as_stated_and_say_so(train, text_file, capsys):
    def losses(**settings: int) -> tuple[list[float], str]:
        out = train(tiny(data={"path": str(text_file)}, train=settings), f"run-{len(settings)}")
        lines = (json.loads(line) for line in out.metrics_file.read_text().splitlines())
        said = capsys.readouterr().err
        return [line["val_loss"] for line in lines if "val_loss" in line], said

    part, said = losses(eval_tokens=100)
    assert "  val       the loss on 100 tokens of the end of the text, held out: " in said
    whole, said = losses()
    assert "  val       the loss on the end of the text, held out: this run" in said
    assert part != whole
    assert part == pytest.approx(whole, abs=0.3)


def test_a_window_and_single_heads_are_in_the_header(train, text_file, capsys):
    model = {"n_layer": 1, "n_head": 1, "attention": {"window": 4}}
    train(tiny(data={"path": str(text_file)}, model=model, train={"steps": 1}))
    err = capsys.readouterr().err
    assert ": 1 layer, width 32, 1 head, window 4, context 16" in err
    assert re.search("  time      about .*: 1 step, reading the text", err)


def test_a_resumed_run_deletes_what_a_kill_left(train, config, monkeypatch):
    every = config.with_train(save_every=1, eval_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "prune", lambda *_: None)
        train(every)
    run = RunDirectory(Path(config.data.path[0]).parent / "run")
    assert len(run.list_steps()) == 6
    train(every)  # finished, but still tidied
    best = json.loads((run.path / "best.json").read_text())["step"]
    assert run.list_steps() == sorted({6, 5, best}, reverse=True)


def test_other_text_under_the_same_name_is_refused(train, config, text_file):
    train(config)
    text_file.write_text(text_file.read_text().replace("fox", "cow"))
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 9})})
    written = (text_file.parent / "run" / "config.yaml").read_bytes()
    with pytest.raises(DataError, match="text has changed"):
        train(longer)
    assert (text_file.parent / "run" / "config.yaml").read_bytes() == written


def test_damaged_newer_checkpoints_do_not_push_out_new_ones(train, config):
    run = train(config)
    assert run.list_steps() == [6, 3]
    (run.checkpoints / "step-00000006" / "state.json").write_text("{")
    whole = train(config, "whole")
    again = train(config)
    assert again.list_steps() == [6, 3]
    assert same(weights(whole, 6), weights(again, 6))
    assert (run.checkpoints / "step-00000006.damaged").is_dir()


def test_a_removed_folder_of_checkpoints_is_a_fresh_start(train, config):
    run = train(config)
    before = weights(run, 6)
    shutil.rmtree(run.checkpoints)
    assert same(weights(train(config), 6), before)


def test_the_same_text_by_another_path_goes_on(train, config, text_file):
    train(config)
    data = {"path": str(text_file.parent / ".." / text_file.parent.name / text_file.name)}
    other = tiny(data=data, model={"dropout": 0.1}, train={"steps": 9})
    assert train(other).list_steps()[0] == 9


def test_a_loss_that_is_not_finite_never_reaches_the_weights(train, config, monkeypatch):
    def poison() -> None:
        def broken(*arguments: Any) -> torch.Tensor:
            return COMPUTE_LOSS(*arguments) * float("nan")

        monkeypatch.setattr(GPT, "compute_loss", broken)

    stop_after(monkeypatch, 5, poison)
    expected = r"gradient norm nan after step 4; the bad step was not saved; "
    expected += r"lower train\.muon_lr and train\.lr, and choose"
    with pytest.raises(DivergedError, match=expected):
        train(config)
    run = RunDirectory(Path(config.data.path[0]).parent / "run")
    assert run.list_steps() == [3]
    assert all(tensor.isfinite().all() for tensor in weights(run, 3).values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_saved(config, tmp_path, bad):
    training = prepared(config, tmp_path / "run")
    create_or_resume(training, None)
    parameters = list(training.model.parameters())
    for weight in (parameters[0], parameters[-1]):
        with torch.no_grad():
            kept = weight.clone()
            weight.view(-1)[-1] = bad
            with pytest.raises(DivergedError, match="weights that are not finite"):
                save_checkpoint(training)
            weight.copy_(kept)
    assert training.run.list_steps() == []
    save_checkpoint(training)
    assert training.run.list_steps() == [0]


def test_the_run_directory_holds_what_it_promises(train, config):
    run = train(config)
    assert {path.name for path in run.path.iterdir()} == {
        "best.json",
        "checkpoints",
        "config.yaml",
        "lock",
        "losses-validation.json",
        "metrics.jsonl",
        "request.yaml",
        "tokenizer.json",
    }
    started = config.sample.model_copy(update={"start": "\n"})
    chosen = config.with_tokenizer("byte", 257).with_train(
        micro_batch_size=4, compile="off", reduce="fast", weight_decay=0.1, embed_lr=0.012
    )
    assert run.load_config() == chosen.model_copy(update={"sample": started})
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    keys = {"step", "tokens", "seconds", "wall_time"}
    keys |= {"train_loss", "lr", "grad_norm", "tokens_per_second"}
    assert set(lines[0]) == keys
    evaluated = {"val_loss", "val_bpb", "sample", "peak_memory"}
    assert set(lines[2]) == keys | evaluated
    assert len(lines[2]["sample"]) > 2
    assert 50 << 20 < lines[2]["peak_memory"] < 8 << 30
    assert lines[5]["tokens"] == 6 * 4 * 16
    best = json.loads((run.path / "best.json").read_text())
    assert best["val_loss"] == min(line["val_loss"] for line in lines if "val_loss" in line)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_differs_by_seed_step_and_micro_batch(text_file, tmp_path, monkeypatch, dropout):
    """The same rows again and again, through the same weights: only noise can differ."""
    losses = []

    def note(*arguments: Any) -> Any:
        losses.append(COMPUTE_LOSS(*arguments))
        return losses[-1]

    def update(seed: int, step: int) -> list[float]:
        config = tiny(
            data={"path": str(text_file)},
            model={"dropout": dropout},
            train={"micro_batch_size": 1, "seed": seed, "dtype": "float32"},
        )
        training = prepared(config, tmp_path / "run")
        torch.manual_seed(0)
        for parameter in training.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        training.model.eval()  # as an evaluation would leave it, if it forgot
        row = torch.arange(17).expand(4, 17)
        monkeypatch.setattr(training.batches, "get_batch", lambda _: (row[:, :-1], row[:, 1:]))
        training.progress.step = step
        losses.clear()
        loop.train_step(training)
        return [value.item() for value in losses]

    monkeypatch.setattr(GPT, "compute_loss", note)
    found = [update(1, 0), update(1, 1), update(2, 0)]
    different = {value for values in found for value in values}
    assert len(different) == (12 if dropout else 1)
    assert update(1, 0) == found[0]


def test_a_run_ends_when_the_validation_loss_turns(text_file, tmp_path, monkeypatch, capsys):
    """Best at step 12 of 60, evaluated each third step: the cool-down from 18 on counts."""
    assess = loop.evaluate_validation

    def turning(training: Any) -> Any:
        found = assess(training) | {"val_loss": 5.0 + abs(training.step - 12)}
        if training.progress.best["step"] > 12:
            training.progress.best = training.progress.best | {"step": 12}
        return found

    monkeypatch.setattr(loop, "evaluate_validation", turning)
    config = tiny(
        data={"path": str(text_file)}, train={"steps": 60, "patience": 4, "warmup_steps": 2}
    )
    begin_training(config, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    assert run.list_steps()[0] == 18 + 4 * 3
    assert "ended at step 30: the validation loss was best at step 12" in capsys.readouterr().err
    begin_training(config, tmp_path / "run")
    assert "already finished at step 30; " in capsys.readouterr().err
    assert run.list_steps()[0] == 30
    more = config.with_train(patience=None)
    begin_training(more, tmp_path / "run")
    assert run.list_steps()[0] == 60
