"""What a run chooses for itself: micro-batches, compiled blocks, sizes and steps for minutes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from gptmini import machine
from gptmini.config.load import validate
from gptmini.config.settings import Config, TrainConfig
from gptmini.errors import MachineError
from gptmini.model.gpt import GPT, loss
from gptmini.model.optim import learning_rate
from gptmini.plan import cost, fit
from gptmini.runs.directory import RunDirectory
from gptmini.train import trainer

CPU = torch.device("cpu")


def precision() -> torch.autocast:
    return machine.precision(CPU, torch.float32)


def model_of(config: Config) -> tuple[GPT, Config]:
    config = config.with_tokenizer("byte", 257)
    return GPT(config.model).train(), config


def test_what_a_window_keeps_is_what_its_graph_holds():
    """Against the sizes of the distinct tensors, no weights, that the nodes refer to."""
    model, config = model_of(tiny(model={"n_layer": 3}))
    found = fit.activation_bytes(model, config.seq_len, precision)
    tokens = torch.zeros(1, config.seq_len, dtype=torch.long)
    nodes, kept = [loss(model, tokens, tokens).grad_fn], {}
    seen = set(nodes)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            tensors = getattr(node, name) if name.startswith("_saved_") else None
            for one in tensors if isinstance(tensors, tuple) else [tensors]:
                if (
                    isinstance(one, torch.Tensor)
                    and one.untyped_storage().data_ptr() not in weights
                ):
                    kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    assert sum(kept.values()) == found


def test_the_micro_batch_divides_the_batch_and_fits(monkeypatch):
    model, config = model_of(tiny(train={"batch_size": 12}))
    window = fit.activation_bytes(model, config.seq_len, precision)
    static = 16 * sum(p.numel() for p in model.parameters())
    for windows, expected in ((1000, 12), (11, 6), (5, 4), (3, 3), (0, 1)):
        memory = static + 2 * windows * window
        monkeypatch.setattr(machine, "memory", lambda _, memory=memory: memory)
        assert fit.micro_batch_size(model, config, precision) == expected
    monkeypatch.setattr(machine, "memory", lambda _: 1 << 40)
    monkeypatch.setattr(fit, "FAST_TOKENS", 4 * config.seq_len)
    assert fit.micro_batch_size(model, config, precision) == 4


def compiling(asked: str, seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """`compile_blocks` where steps take so many seconds before and after; what it said."""
    model, config = model_of(tiny(train={"compile": asked, "steps": 100}))
    said: list[str] = []
    times = iter(seconds)
    monkeypatch.setattr(fit, "step_seconds", lambda *_: next(times))
    monkeypatch.setattr(fit, "_compiler", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    return fit.compile_blocks(model, config, precision, said.append), said


@pytest.mark.parametrize(
    ("asked", "seconds", "compiled"),
    [
        ("auto", [0.1], False),  # too short a run
        ("auto", [2.0, 1.0], True),
        ("auto", [2.0, 2.1], False),  # slower
        ("on", [0.1, 0.2], True),
        ("off", [], False),
    ],
)
def test_blocks_are_compiled_if_it_pays(monkeypatch, asked, seconds, compiled):
    assert compiling(asked, seconds, monkeypatch)[0] == compiled


def test_without_a_compiler_a_run_goes_on_without(monkeypatch):
    def broken(*_: Any) -> float:
        raise RuntimeError("no C++ compiler\nand a long story")

    said: list[str] = []
    model, config = model_of(tiny(train={"steps": 100}))
    monkeypatch.setattr(fit, "_compiler", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: broken)
    monkeypatch.setattr(fit, "COMPILE_PAYS", 0)
    assert not fit.compile_blocks(model, config, precision, said.append)
    assert said == ["compile: failed (no C++ compiler); going on without"]
    assert not any("forward" in vars(block) for block in model.blocks)
    with pytest.raises(MachineError, match=r"train\.compile: no C\+\+ compiler; take auto or off"):
        fit.compile_blocks(model, config.with_train(compile="on"), precision, said.append)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch's own
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_compiled_run_learns_the_same_and_goes_on_to_the_same_bits(
    text_file: Path, tmp_path: Path, monkeypatch
):
    def run(name: str, compile: str = "on", dropout: float = 0.1) -> dict[str, torch.Tensor]:
        settings = {"compile": compile, "dtype": "float32"}
        config = tiny(data={"path": str(text_file)}, model={"dropout": dropout}, train=settings)
        trainer.train(config, tmp_path / name, tmp_path / "cache")
        found = RunDirectory(tmp_path / name).newest()
        assert found is not None
        return found.model

    whole = run("whole")
    with monkeypatch.context() as patch:
        update = trainer.update

        def stop(training: Any) -> Any:
            if training.step == 4:
                raise KeyboardInterrupt
            return update(training)

        patch.setattr(trainer, "update", stop)
        with pytest.raises(KeyboardInterrupt):
            run("stopped")
    again = run("stopped")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    plain, compiled = run("plain", "off", 0.0), run("compiled", "on", 0.0)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, atol=2e-4, rtol=1e-3)


def planned(config: Config, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A plan on a machine that makes 10¹⁰ multiplications with a parameter in a second."""

    def reckoned(config: Config, *_: Any) -> tuple[float, float]:
        tokens = config.train.batch_size * config.seq_len
        return 6 * cost.parameter_count(config.model) * tokens / 1e11, 0.0

    monkeypatch.setattr(fit, "_seconds_by_part", reckoned)
    monkeypatch.setattr(fit, "_compiler", lambda: False)
    return fit.plan(config.with_tokenizer("byte", 257), seconds, CPU, torch.float32)


def test_more_minutes_make_a_larger_model(monkeypatch):
    widths = []
    for seconds in (30, 300, 3000, 30_000, 300_000, 3_000_000):
        plan = planned(Config(), seconds, monkeypatch)
        widths.append(plan.model.d_model)
        tokens = plan.train.steps * plan.train.batch_size * plan.seq_len
        assert tokens * 6 * cost.parameter_count(plan.model) / 1e11 <= seconds
        assert plan.train.eval_every <= max(1, plan.train.steps // 10)
    assert widths == sorted(widths)
    assert widths[0] == 128
    assert widths[-1] == 768


def test_what_is_stated_wins_over_the_plan(monkeypatch):
    stated = {"model": {"d_model": 64, "n_head": 2}, "train": {"steps": 7, "batch_size": 3}}
    plan = planned(validate(stated, {}), 300, monkeypatch)
    assert (plan.model.d_model, plan.model.n_head, plan.model.head_dim) == (64, 2, 32)
    assert (plan.train.steps, plan.train.batch_size, plan.train.eval_every) == (7, 3, 1)


class Clock:
    """A time that passes only when steps are made."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 3.0), (0.4, 0.4), (1.0, 1.04)])
def test_a_run_ends_with_its_minutes(text_file, tmp_path, monkeypatch, speeds):
    """The plan thinks a step takes half a second; before and after step 100 it takes another."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(fit, "_seconds_by_part", lambda *_: (0.4, 0.1))
    update, first = trainer.update, fit.RUNGS[:1]
    monkeypatch.setattr(fit, "RUNGS", first)

    def timed(training: Any) -> Any:
        clock.now += speeds[training.step > 100] / 2
        return update(training)

    monkeypatch.setattr(trainer, "update", timed)
    config = tiny(data={"path": str(text_file)})
    sections = config.model_dump(exclude_unset=True)
    del sections["train"]["steps"]
    config = validate(
        sections
        | {
            "train": {
                **sections["train"],
                "minutes": 2.0,
                "patience": None,
                "eval_every": 50,
                "save_every": 50,
            }
        },
        {},
    )
    run = tmp_path / "run"
    trainer.train(config, run, tmp_path / "cache", clock.now)
    assert clock.now - 1000 == pytest.approx(120 - fit.FINISH, rel=0.05)
    finished = RunDirectory(run)
    final, checkpoint = finished.config(), finished.newest()
    assert checkpoint is not None
    assert checkpoint.step == final.train.steps
    # The configuration that it ended with makes the same run.
    weights = checkpoint.model
    trainer.train(final.with_train(minutes=None), tmp_path / "again", tmp_path / "cache")
    again = RunDirectory(tmp_path / "again").newest()
    assert again is not None
    assert all(torch.equal(weights[name], again.model[name]) for name in weights)
    # The same command finds it finished.
    trainer.train(config, run, tmp_path / "cache")


@given(
    step=st.integers(1, 1000),
    steps=st.integers(50, 5000),
    per_step=st.floats(0.01, 10),
    minutes=st.floats(0.1, 100),
    cooldown=st.floats(0.1, 0.9),
)
def test_no_step_made_depends_on_the_new_number(step, steps, per_step, minutes, cooldown):
    step = min(step, steps)
    given_ = {"minutes": minutes, "steps": steps, "warmup_steps": 5, "cooldown": cooldown}
    settings = TrainConfig.model_validate(given_)
    found = fit.paced_steps(settings, step, 0.0, per_step)
    changed = settings.model_copy(update={"steps": found})
    for made in range(step):
        assert learning_rate(changed, made) == learning_rate(settings, made)


def test_a_run_ends_when_the_validation_loss_turns(text_file, tmp_path, monkeypatch, capsys):
    """Best at step 12 of 60, evaluated each third step: the cool-down from 18 on counts."""
    assess = trainer.assess

    def turning(training: Any) -> Any:
        found = assess(training) | {"val_loss": 5.0 + abs(training.step - 12)}
        if training.best["step"] > 12:
            training.best = training.best | {"step": 12}
        return found

    monkeypatch.setattr(trainer, "assess", turning)
    config = tiny(
        data={"path": str(text_file)}, train={"steps": 60, "patience": 4, "warmup_steps": 2}
    )
    trainer.train(config, tmp_path / "run", tmp_path / "cache")
    run = RunDirectory(tmp_path / "run")
    assert run.steps()[0] == 18 + 4 * 3
    assert "ended at step 30: the validation loss was best at step 12" in capsys.readouterr().err
    trainer.train(config, tmp_path / "run", tmp_path / "cache")
    assert "already finished at step 30; " in capsys.readouterr().err
    assert run.steps()[0] == 30
    more = config.with_train(patience=None)
    trainer.train(more, tmp_path / "run", tmp_path / "cache")
    assert run.steps()[0] == 60


def test_dropout_follows_the_epochs_unless_it_is_stated(text_file, tmp_path):
    def chosen(steps: int, **model: float) -> float | None:
        config = tiny(data={"path": str(text_file)}, train={"steps": steps}, model=model)
        run = RunDirectory(tmp_path / f"{steps}{model}")
        return trainer.prepare(config, run, tmp_path / "cache", 0.0).config.model.dropout

    assert chosen(10) == 0
    assert chosen(1000) == 0.2
    assert chosen(1000, dropout=0.05) == 0.05
