"""Sizes and steps for a number of minutes, and keeping to them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptmini.config.load import DEFAULT_CONFIG_FILE, load_config, validate
from gptmini.config.settings import Config, TrainConfig
from gptmini.data.corpus import prepare_corpus
from gptmini.model.optim import compute_learning_rate
from gptmini.plan import cost, estimates, minutes, recipe
from gptmini.plan.recipe import (
    TextSize,
    compute_overfitting_risk,
    compute_useful_steps,
    measure_corpus,
)
from gptmini.plan.timing import Machine
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from tests.core.plan.machines import GPU, FakeMachine
from tests.support import tiny, train

LONG_TEXT = TextSize(math.inf, math.inf)


def computing(flops: float) -> Callable[[Config], float]:
    """Steps of a machine that makes so many operations in a second."""

    def compute(config: Config) -> float:
        tokens = config.train.batch_size * config.seq_len
        return 6 * cost.count_parameters(config.model) * tokens / flops

    return compute


SLOW = FakeMachine(step=computing(1e11))
FAST = FakeMachine(GPU, step=computing(2e14), memory=80 << 30)


def planned(
    config: Config, seconds: float, machine: FakeMachine = SLOW, held_out: int = 0
) -> Config:
    config = config.with_tokenizer("byte", 257)
    sizes, measured, _ = minutes.choose_sizes(config, seconds, machine, LONG_TEXT)
    assert minutes.states_all_sizes(sizes)
    return minutes.choose_steps(sizes, seconds, measured, held_out, LONG_TEXT)


@pytest.mark.parametrize("slow", [0.3, 1.0, 3.0])
def test_a_wrong_prediction_is_corrected_by_one_real_step(slow):
    right = planned(Config(), 120, FakeMachine(step=computing(1e11)))
    wrong = FakeMachine(step=computing(slow * 1e11), slow=slow)
    assert planned(Config(), 120, wrong) == right
    assert len(wrong.measured) == 1


def test_a_text_that_is_read_often_gets_a_deeper_model():
    def compute(config: Config) -> float:
        return config.model.n_layer * config.train.batch_size * config.seq_len / 5e5

    machine = FakeMachine(step=compute)
    config = Config().with_tokenizer("byte", 257)

    def choose(rows: int) -> tuple[int, int]:
        text = TextSize(math.inf, per_epoch=rows * config.seq_len)
        model = minutes.choose_sizes(config, 12, machine, text)[0].model
        return model.n_layer, model.d_model

    assert choose(4000) == (2, 192)  # training reads about 11,200 rows
    assert choose(3600) == (4, 192)


def test_more_minutes_than_a_short_text_is_good_for_are_not_used():
    machine = FakeMachine(step=0.1)
    config = Config().with_tokenizer("byte", 257)
    text = TextSize(150_000, per_epoch=140_000)
    sizes, _, _ = minutes.choose_sizes(config, 100_000, machine, text)
    # The text is read (55 * 150,000 / weights)² times, or 10. Of 3.1 M weights in 4 x 256 each
    # would see 0.45 tokens, and should see 0.7; of 1.8 M in 4 x 192 it is 1.7.
    assert (sizes.model.n_layer, sizes.model.d_model) == (4, 192)
    parts = cost.count_parameters_by_part(sizes.model)
    epochs = (55 * 150_000 / (parts["attention"] + parts["mlp"])) ** 2
    steps = epochs * 140_000 / (16 * 256)
    useful = compute_useful_steps(sizes, text)
    assert useful == pytest.approx(steps)
    assert compute_overfitting_risk(sizes.with_train(steps=int(useful)), text) == pytest.approx(
        55, rel=0.01
    )

    plan = minutes.choose_steps(sizes, 100_000, machine, 1000, text)
    assert plan.train.steps == int(useful)
    assert plan.train.eval_every < plan.train.steps / 5

    longer = minutes.choose_steps(sizes.with_train(steps=1000), 10_000, machine, 1000, text)
    assert longer.train.steps == 1000  # as stated


def test_a_large_model_reads_a_short_text_ten_times():
    config = validate({"model": {"d_model": 1024}}, {}).with_tokenizer("byte", 257)
    for text in (TextSize(500_000, per_epoch=600_000), TextSize(600_000, per_epoch=3000)):
        assert compute_useful_steps(config, text) == pytest.approx(10 * 600_000 / (16 * 256))
    # One that is shorter yet is read more often.
    assert compute_useful_steps(config, TextSize(600, 600)) == pytest.approx(1e6 / (16 * 256))


def test_a_fast_machine_gets_models_that_a_cpu_never_trains():
    shapes = []
    for seconds in (10, 60, 600, 6000, 60_000):
        model = planned(Config(), seconds, FAST).model
        shapes.append((model.n_layer, model.d_model))
    assert shapes == [(6, 384), (8, 512), (12, 768), (24, 1024), (24, 1024)]


def test_no_model_is_timed_whose_weights_do_not_fit():
    config = Config().with_tokenizer("byte", 257)
    for gigabytes, width in ((80, 1024), (3, 768), (1, 512)):
        model = planned(config, 60_000, replace(FAST, memory=gigabytes << 30)).model
        assert model.d_model == width


def test_more_minutes_make_a_larger_model():
    widths = []
    for seconds in (30, 300, 3000, 30_000, 300_000, 3_000_000):
        plan = planned(Config(), seconds)
        widths.append(plan.model.d_model)
        tokens = plan.train.steps * plan.train.batch_size * plan.seq_len
        assert tokens * 6 * cost.count_parameters(plan.model) / 1e11 <= seconds
        assert plan.train.eval_every <= max(1, plan.train.steps // 2)
    assert widths == sorted(widths)
    assert widths[0] == 128
    assert widths[-1] == 768


@pytest.mark.parametrize(
    ("seconds", "held_out"), [(30, 1_000_000), (120, 100_000), (900, 10_000), (900, 1_000_000)]
)
def test_all_held_out_text_is_read_where_that_takes_a_tenth_of_the_time(seconds, held_out):
    plan = planned(Config(), seconds, held_out=held_out)
    of_a_token = 6 * cost.count_parameters(plan.model) / 1e11
    read = plan.train.eval_tokens or held_out
    reading = of_a_token * read * minutes.TRAINED_PER_EVALUATED
    sample = of_a_token * minutes.TRAINED_PER_SAMPLE
    count = math.ceil(plan.train.steps / plan.train.eval_every)
    evaluations = count * (reading + sample)
    tokens = plan.train.steps * plan.train.batch_size * plan.seq_len
    assert count == 1 or evaluations < seconds / 20
    assert count in (1, 10) or evaluations > seconds / 40
    assert plan.train.save_every <= math.ceil(plan.train.steps / 3)  # even if it evaluates once
    if of_a_token * held_out * minutes.TRAINED_PER_EVALUATED <= seconds / 10:
        assert plan.train.eval_tokens is None
    else:  # a power of two
        assert read & (read - 1) == 0
        assert 0.009 * tokens < read <= 0.022 * tokens
    assert 0.97 * seconds < of_a_token * tokens + evaluations < seconds + 0.1


def test_the_default_configuration_leaves_rows_to_the_minutes():
    plan = planned(load_config(DEFAULT_CONFIG_FILE, []), 300)
    assert (plan.model.n_layer, plan.model.n_head, plan.model.d_model) == (2, 3, 192)
    assert (plan.model.context_length, plan.train.batch_size) == (512, 8)


def test_what_is_stated_wins_over_the_plan():
    stated = {"model": {"d_model": 64, "n_head": 2}, "train": {"steps": 7, "batch_size": 3}}
    plan = planned(validate(stated, {}), 300)
    assert (plan.model.d_model, plan.model.n_head, plan.model.head_dim) == (64, 2, 32)
    assert (plan.train.steps, plan.train.batch_size, plan.train.eval_every) == (7, 3, 1)


def test_a_model_makes_the_steps_that_are_stated_in_time():
    plan = planned(validate({"train": {"steps": 5000}}, {}), 3000)
    assert 1000 < 5000 * SLOW.predict_step(plan) <= 3000


@pytest.mark.parametrize("seconds", [10, 1000, 100_000])
def test_the_batch_of_a_stated_model_does_not_grow_with_the_minutes(seconds):
    for layers, width, rows in ((2, 64, 8), (2, 128, 8), (4, 192, 16), (6, 384, 16), (12, 768, 64)):
        for by_heads in ({"d_model": width}, {"n_head": width // 32, "head_dim": 32}):
            stated = validate({"model": {"n_layer": layers, **by_heads}}, {})
            plan = planned(stated, seconds)
            assert plan.model.d_model == width
            assert plan.train.batch_size * plan.seq_len == rows * 256


def test_rows_are_long_where_a_text_is_read_once_or_twice():
    config = Config().with_tokenizer("byte", 257)
    read_once = TextSize(1e9, per_epoch=1e9)
    read_often = TextSize(1e6, per_epoch=1e6)
    short = validate({"model": {"context_length": 100}}, {}).with_tokenizer("byte", 257)
    rows = validate({"train": {"seq_len": 128}}, {}).with_tokenizer("byte", 257)
    for requested, text, context, n_rows in (
        (config, read_once, 512, 8),
        (config, read_often, 256, 16),
        (short, read_once, 100, 41),
        (rows, read_once, 256, 32),
    ):
        sizes, _, _ = minutes.choose_sizes(requested, 300, SLOW, text)
        assert (sizes.model.context_length, sizes.train.batch_size) == (context, n_rows)


def test_stated_evaluations_take_their_time_from_the_steps():
    steps = [
        planned(validate({"train": {"eval_every": every}}, {}), 60, held_out=10**5).train.steps
        for every in (10, 10_000)
    ]
    assert steps[0] < 0.9 * steps[1]


def tuned(seconds: float, update: float = 0.5, slow: float = 1.0, **train: Any) -> Config:
    """A fine-tuning of 135 M parameters where 10¹¹ operations take a second."""

    def compute(config: Config) -> float:
        return (cost.count_step_flops(config)[0] / 1e11 + update) / slow

    machine = FakeMachine(step=compute, slow=slow)
    grouped = {"variant": "gqa", "n_kv_head": 3}
    model = {"n_layer": 30, "n_head": 9, "d_model": 576, "d_ff": 1536, "activation": "swiglu"}
    model |= {"context_length": 2048, "attention": grouped, "vocab_size": 49_152}
    train = {"optimizer": "adamw"} | train
    requested = validate({"base": {"run": "base"}, "model": model, "train": train}, {})
    measured = machine.measure(requested)
    config = minutes.choose_batch(requested, requested.train, seconds, measured, 10_000)
    return minutes.choose_steps(config, seconds, measured, 100_000, TextSize(1e6, 1e6))


def test_fine_tuning_makes_dozens_of_updates_where_the_time_allows():
    shapes = []
    for seconds in (300, 600, 6000, 60_000):
        plan = tuned(seconds)
        assert plan.train.steps > 0.7 * minutes.TARGET_UPDATES
        shapes.append((plan.train.batch_size, plan.seq_len))
        assert tuned(seconds, slow=3.0) == plan
    assert shapes == [(2, 256), (4, 256), (16, 512), (16, 2048)]


def test_fine_tuning_keeps_what_is_stated_and_no_row_is_longer_than_the_text():
    stated = tuned(120, batch_size=4, seq_len=512)
    assert (stated.train.batch_size, stated.seq_len) == (4, 512)
    assert (tuned(120, seq_len=512).train.batch_size) == 1
    config = validate({"base": {"run": "base"}}, {}).with_tokenizer("byte", 257)
    short = minutes.choose_batch(config, config.train, 60, SLOW, 40)
    assert short.seq_len == 40


def test_a_batch_is_not_cut_where_the_update_takes_the_time():
    plan = tuned(120, update=30.0, optimizer="muon")
    assert plan.train.batch_size * plan.seq_len >= 2048


@pytest.mark.parametrize(("seconds", "count"), [(120, 1), (600, 3), (60_000, 4)])
def test_a_fine_tuning_evaluates_and_saves_four_times_at_most(seconds, count):
    plan = tuned(seconds)
    assert math.ceil(plan.train.steps / plan.train.eval_every) == count
    assert math.ceil(plan.train.steps / plan.train.save_every) in (count, 4)


def test_a_batch_divides_among_ranks_and_stated_micro_batches():
    config = validate({"train": {"micro_batch_size": 16}}, {})
    config = config.with_tokenizer("byte", 257)
    machine = FakeMachine(world_size=2, step=0.5)
    sizes, _, _ = minutes.choose_sizes(config, 30, machine, LONG_TEXT)
    assert sizes.train.batch_size == 32


def test_processes_share_the_passes_but_not_the_update():
    config = validate({"train": {"eval_every": 10_000}}, {}).with_tokenizer("byte", 257)
    for world_size, per_step in ((1, 1.0), (2, 0.6), (8, 0.3)):
        machine = FakeMachine(
            world_size=world_size, step=lambda config: 0.8 * config.train.batch_size / 16 + 0.2
        )
        plan = minutes.choose_steps(config, 600, machine, 0, LONG_TEXT)
        assert plan.train.steps == pytest.approx(600 / per_step, rel=0.01)


def test_sizes_that_happen_to_be_the_defaults_are_measured():
    stated = {"model": {"n_layer": 4, "d_model": 256}, "train": {"batch_size": 16}}
    config = validate(stated, {}).with_tokenizer("byte", 257)
    # 1.5 s are for evaluations.
    assert minutes.choose_sizes(config, 30, FakeMachine(step=0.5), LONG_TEXT)[2] == 57


def test_sizes_leave_time_to_evaluate():
    machine = FakeMachine(step=0.05)
    config = Config().with_tokenizer("byte", 257)

    def choose(seconds: float) -> int:
        return minutes.choose_sizes(config, seconds, machine, LONG_TEXT)[0].model.d_model

    # 2 layers of width 192 should see 2 tokens for each of 884,992 weights: 433 steps, 21.7 s.
    assert choose(22) == 128
    assert choose(23) == 192


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256, 320, 768])
def test_a_stated_width_gets_heads_that_fit_it(width):
    model = planned(validate({"model": {"d_model": width}}, {}), 3e5).model
    assert model.d_model == width
    assert width % (2 * model.n_head) == 0
    assert 43 < model.head_dim < 100


@pytest.mark.parametrize("head", [16, 32, 128])
def test_heads_of_a_stated_size_fill_the_width(head):
    for stated in ({}, {"d_model": 256}):
        model = planned(validate({"model": {"head_dim": head, **stated}}, {}), 300).model
        assert model.n_head * head == model.d_model


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("seconds", [30, 300, 3000, 30_000, 300_000])
def test_planned_heads_can_share_the_kv_heads(kv_heads, seconds):
    model = {"attention": {"variant": "gqa", "n_kv_head": kv_heads}}
    plan = planned(validate({"model": model}, {}), seconds).model
    assert plan.n_head % kv_heads == 0
    assert plan.d_model == plan.n_head * plan.head_dim


def test_a_planned_width_fits_stated_heads():
    plan = planned(validate({"model": {"n_head": 6}}, {}), 30).model
    assert (plan.n_head, plan.d_model) == (6, 132)


def test_minutes_that_are_too_short_are_said_to_be(capsys):
    assert planned(Config().with_train(minutes=0.001), 0.06).train.steps == 1
    assert capsys.readouterr().err.splitlines() == [
        "warning: train.minutes: too short for this machine: about 1 step, 0.0% of the text; use "
        "more minutes or a smaller model"
    ]


def test_minutes_that_are_too_short_for_a_base_are_said_to_be(capsys):
    assert tuned(6000).train.steps > minutes.MIN_UPDATES
    assert "warning" not in capsys.readouterr().err
    plan = tuned(50)
    read = plan.train.steps * plan.train.batch_size * plan.seq_len / 1e6
    steps = f"about {plan.train.steps} steps, {read:.1%} of the text"
    said = capsys.readouterr().err
    assert f"too short for this machine: {steps}; use more minutes" in said


def test_all_that_took_time_counts():
    settings = {"minutes": 1.0, "steps": 100, "warmup_steps": 5, "eval_every": 10, "save_every": 10}
    config = tiny(train=settings | {"seq_len": 10, "batch_size": 10})

    def steps(step: int, elapsed: float, held_out: int = 0) -> int:
        return minutes.compute_steps_for_minutes(config, (1, 1.0), (step, elapsed), held_out)

    # A hundredth of the minute is for the last sample.
    assert steps(9, 5.0) == 9 + int(54.4 / 0.5)
    assert steps(9, 9.0) == 9 + 50  # a checkpoint or a sample took four seconds
    # An evaluation takes as long as eight steps: with one of ten so far, 18 steps in nine seconds.
    assert steps(11, 10.0, 2000) == 11 + int((49.4 / 0.5 - 8) / 1.8)


def test_a_stall_leaves_a_run_that_can_be_read():
    """Asleep in the first steps, it has no time left: the warm-up and the plateau are made."""
    train = {"minutes": 1.0, "steps": 4000, "warmup_steps": 100}
    config = tiny(train=train)
    for step, fewest in ((3, 100), (80, 274)):
        steps = minutes.compute_steps_for_minutes(config, (1, 1.0), (step, 4000.0), 1000)
        assert steps == fewest
        assert validate(config.with_train(steps=steps).model_dump(exclude_unset=True), {})


class Clock:
    """A time that passes only when steps are made."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("planned_seconds", "speeds"),
    [
        (1.0, (3.0, 3.0)),
        (1.0, (1.0, 1.04)),
        (50.0, (4.0, 4.0)),  # two steps would have been made
    ],
)
def test_a_run_ends_with_its_minutes(text_file, tmp_path, monkeypatch, planned_seconds, speeds):
    """The plan is wrong about the time of a step; before and after step 50 it takes another.

    An evaluation takes half a second, and a quarter of the time of the steps on as many tokens.
    """
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(Machine, "predict_step", lambda *_: planned_seconds)
    monkeypatch.setattr(Machine, "measure", lambda here, _: replace(here, slowness=1.0))
    update = loop.train_step
    evaluation = loop.evaluate_validation
    smallest = estimates.CPU.few_epochs[:1]
    one_model = replace(estimates.CPU, few_epochs=smallest, many_epochs=smallest)
    monkeypatch.setattr(estimates, "CPU", one_model)

    def timed(training: Any) -> Any:
        clock.now += speeds[training.step > 50]
        return update(training)

    def evaluated(training: Any) -> Any:
        steps = training.corpus.held_out / (training.config.train.batch_size * 8)
        clock.now += 0.5 + steps / 4 * speeds[training.step > 50]
        return evaluation(training)

    monkeypatch.setattr(loop, "train_step", timed)
    monkeypatch.setattr(loop, "evaluate_validation", evaluated)
    config = tiny(model={"n_layer": 1}, data={"path": str(text_file)})
    sections = config.model_dump(exclude_unset=True)
    del sections["train"]["steps"]
    config = validate(
        sections
        | {
            "train": {
                **sections["train"],
                "minutes": 2.0,
                "patience": None,
                "optimizer": "adamw",
                "eval_every": 25,
                "save_every": 25,
            }
        },
        {},
    )
    run = tmp_path / "run"
    train(config, run, clock.now)
    assert clock.now - 1000 == pytest.approx(120, abs=6 + speeds[0])  # a step more or less
    finished = RunDirectory(run)
    final = finished.load_config()
    checkpoint = finished.load_newest()
    assert checkpoint is not None
    assert checkpoint.step == final.train.steps
    # The configuration that it ended with makes the same run.
    weights = checkpoint.model
    train(final.with_train(minutes=None), tmp_path / "again")
    again = RunDirectory(tmp_path / "again").load_newest()
    assert again is not None
    assert all(torch.equal(weights[name], again.model[name]) for name in weights)
    # The same command finds it finished.
    train(config, run)


@pytest.mark.parametrize("log_every", [None, 10_000])  # a rare log does not turn this off
def test_a_run_that_is_faster_than_planned_ends_before_it_memorizes_its_text(
    text_file, tmp_path, monkeypatch, capsys, log_every
):
    monkeypatch.setattr(recipe, "MIN_USEFUL_TOKENS", 0)
    monkeypatch.setattr(Machine, "predict_step", lambda *_: 5.0)
    monkeypatch.setattr(Machine, "measure", lambda here, _: replace(here, slowness=1.0))
    sections = tiny(model={"n_layer": 1, "d_model": 64}, data={"path": str(text_file)}).model_dump(
        exclude_unset=True
    )
    sections["train"] = {"batch_size": 16, "minutes": 5.0, "eval_every": 1000, "save_every": 1000}
    if log_every is not None:
        sections["train"]["log_every"] = log_every
    config = validate(sections, {})
    train(config, tmp_path / "run")
    final = RunDirectory(tmp_path / "run").load_config()
    corpus = prepare_corpus(config)
    useful = compute_useful_steps(final, measure_corpus(final, corpus))
    assert 100 < useful < 110  # ten epochs of 2,684 tokens in 256 a step; the plan was about 50
    assert final.train.steps == int(useful)
    # More minutes add nothing that is worth having.
    train(config.with_train(minutes=50.0), tmp_path / "run")
    said = f"already finished at step {int(useful)}; more epochs of so short a text would make"
    assert said in capsys.readouterr().err


@given(
    step=st.integers(1, 1000),
    steps=st.integers(50, 5000),
    per_step=st.floats(0.01, 10),
    given_minutes=st.floats(0.1, 100),
    cooldown=st.floats(0.1, 0.9) | st.just(1.0),
    held_out=st.integers(0, 1_000_000),
)
def test_no_step_made_depends_on_the_new_number(
    step, steps, per_step, given_minutes, cooldown, held_out
):
    step = min(step, steps)
    given_ = {"minutes": given_minutes, "steps": steps, "warmup_steps": 5, "cooldown": cooldown}
    settings = TrainConfig.model_validate(given_)
    now = (step, step * per_step)
    found = minutes.compute_steps_for_minutes(Config(train=settings), (0, 0.0), now, held_out)
    changed = settings.model_copy(update={"steps": found})
    for made in range(step):
        assert compute_learning_rate(changed, made) == compute_learning_rate(settings, made)
