"""The one place where the plan of a run is made."""

import io
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptmini.config.load import validate
from gptmini.config.settings import Config
from gptmini.data.corpus import prepare_corpus
from gptmini.errors import DataError, MachineError
from gptmini.plan import settle
from gptmini.plan.recipe import (
    TextSize,
    compute_overfitting_risk,
    compute_useful_steps,
    count_epochs,
    measure_corpus,
)
from gptmini.plan.settle import Plan, make_plan
from gptmini.runs.directory import RunDirectory
from tests.core.plan.machines import GPU, FakeMachine
from tests.support import tiny

HALF_A_SECOND = FakeMachine(step=0.5)  # seconds for each step


def plan_on(machine: FakeMachine, sections: dict[str, Any], folder: Path) -> Plan:
    return make_plan(validate(sections, {}), None, machine=machine)


def test_dropout_follows_the_risk_of_overfitting_unless_it_is_stated(
    text_file: Path, tmp_path: Path
):
    def chosen(steps: int, **model: float | None) -> float | None:
        config = tiny(data={"path": str(text_file)}, train={"steps": steps}, model=model)
        return make_plan(config, None).config.model.dropout

    epoch = 2684 // 64  # in steps: of 2,991 tokens 307 are held out
    assert chosen(10) == 0
    assert chosen(15 * epoch, d_model=16) == 0  # too small to memorize its text
    assert chosen(5 * epoch, d_model=64) == 0
    assert chosen(7 * epoch, d_model=32) == 0.1
    assert chosen(15 * epoch, d_model=32) == 0.1  # a risk of 36
    assert chosen(20 * epoch, d_model=32) == 0.2  # a risk of 41
    assert chosen(1000, d_model=64, dropout=0.05) == 0.05
    assert chosen(1000, d_model=64, dropout=None) == 0.2


def test_the_risk_grows_with_weights_for_a_token_and_the_root_of_epochs():
    config = validate({"model": {"n_layer": 2, "d_model": 192, "n_head": 3}}, {})
    config = config.with_tokenizer("byte", 257).with_train(steps=3600)
    weights = 2 * (4 + 8) * 192**2  # four square matrices, and two of the MLP
    tokens = 3600 * 16 * 256

    def compute(total: float, epochs: float) -> float:
        return compute_overfitting_risk(config, TextSize(total, per_epoch=tokens / epochs))

    assert compute(weights, 4.0) == pytest.approx(2.0, rel=0.01)
    assert compute(weights // 3, 9.0) == pytest.approx(9.0, rel=0.01)
    assert compute(weights // 1000, 2.9) == 0


def test_a_fine_tuning_uses_all_its_minutes_however_short_its_text():
    text = TextSize(100, per_epoch=100)
    assert compute_useful_steps(Config().with_tokenizer("byte", 257), text) < 300
    assert compute_useful_steps(validate({"base": {"run": "base"}}, {}), text) == math.inf


def test_epochs_of_weighted_texts_are_those_of_the_most_visited(tmp_path: Path):
    paths = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    for path in paths:
        Path(path).write_text("the cat sat on the mat. " * 1000)
    sections: dict[str, Any] = {"data": {"path": paths, "weights": [1, 3]}}
    config = validate(sections | {"tokenizer": {"kind": "byte"}}, {})
    text = measure_corpus(config, prepare_corpus(config))
    assert text.total == pytest.approx(2 * 0.9 * 24_000, rel=0.01)
    assert text.per_epoch == pytest.approx(0.9 * 24_000 * 4 / 3, rel=0.02)


def test_rates_and_tying_follow_the_risk_unless_they_are_stated(text_file: Path, tmp_path: Path):
    def chosen(
        steps: int, optimizer: str = "muon", **model: int
    ) -> tuple[bool, float, float | None, float, float]:
        sizes = {"n_layer": 1, "n_head": 2, "d_model": 32, "context_length": 16}
        train = {"steps": steps, "batch_size": 4, "optimizer": optimizer, "compile": "off"}
        sections = {"data": {"path": str(text_file)}, "tokenizer": {"kind": "byte"}}
        config = validate(sections | {"model": sizes | model, "train": train}, {})
        config = make_plan(config, None).config
        settled = config.train
        rates = settled.lr, settled.embed_lr, settled.muon_lr
        return config.model.tie_embeddings, *rates, settled.weight_decay

    # Of 2,991 tokens 307 are held out; 12,288 weights in blocks are 4.6 for each of the others.
    twice = 2 * 2684 // 64
    assert chosen(twice) == (False, 12e-3, 72e-3, 0.02, 0.1)
    assert chosen(2 * twice) == (True, 2e-3, 12e-3, 0.01, 1.0)
    assert chosen(2 * twice, d_model=16, n_head=1) == (False, 12e-3, 72e-3, 0.02, 0.1)
    assert chosen(twice, tie_embeddings=True) == (True, 12e-3, 72e-3, 0.02, 0.1)
    assert chosen(7 * twice, tie_embeddings=False) == (False, 2e-3, 12e-3, 0.01, 1.0)
    assert chosen(twice, optimizer="adamw") == (True, 2e-3, None, 0.02, 0.3)


def test_dropout_follows_the_steps_that_the_minutes_allow(tmp_path: Path):
    """400 steps, the default, would read this text 45 times; a minute suffices for 0.7 epochs."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 105)  # 2520 tokens
    for seconds, dropout in ((10.0, 0.0), (0.2, 0.2)):
        machine = FakeMachine(step=seconds)
        train = {"minutes": 1.0, "batch_size": 16, "compile": "off"}
        sections = {"data": {"path": str(tmp_path / "text.txt")}, "train": train}
        sections["model"] = {"n_layer": 1, "n_head": 2, "d_model": 64, "context_length": 16}
        sections["tokenizer"] = {"kind": "byte"}
        config = plan_on(machine, sections, tmp_path).config
        epochs = config.train.steps * 16 * 16 / 2268  # 9 of 10 tokens are to train on
        assert (epochs > 6) == (dropout == 0.2)
        assert (epochs < 1) == (dropout == 0)
        assert config.model.dropout == dropout


def test_nothing_is_left_open(text_file: Path, tmp_path: Path):
    config = make_plan(tiny(data={"path": str(text_file)}), None).config
    assert config.model.vocab_size == 257
    assert config.model.dropout is not None
    assert config.train.micro_batch_size is not None
    assert config.train.compile in ("on", "off")


@pytest.mark.parametrize(
    ("documents", "steps", "text", "start"),
    [
        (1, 10_000, "the cat\nsat ", "\n"),  # its only end-of-text token is hardly ever read
        (1, 10_000, "the cat\n\nsat ", "\n\n"),  # a single line break is never read
        (1, 1000, "a cat in a hat ", " "),
        (1, 1000, "猫猫坐", "猫"),
        (3, 10_000, "the cat\nsat ", None),
        (3, 2, "the cat\nsat ", "\n"),
        (300, 100, "the cat\nsat ", None),
    ],
)
def test_a_text_without_a_prompt_starts_at_a_token_that_training_reads(
    documents: int, steps: int, text: str, start: str | None, tmp_path: Path
):
    each = json.dumps({"text": text * (600 // documents)}) + "\n"
    (tmp_path / "text.jsonl").write_text(each * documents)
    data = {"path": str(tmp_path / "text.jsonl")}
    config = tiny(data=data, train={"steps": steps, "compile": "off"})
    assert make_plan(config, None).config.sample.start == start
    for stated in ("cat", None):
        config = tiny(data=data, sample={"start": stated})
        assert make_plan(config, None).config.sample.start == stated


def test_a_resumed_run_keeps_what_it_chose_and_measures_nothing(text_file: Path, tmp_path: Path):
    requested = tiny(data={"path": str(text_file)})
    run = RunDirectory(tmp_path / "run")
    plan = make_plan(requested, run)
    run.create(plan.config, plan.corpus.tokenizer, requested)
    unmeasured = FakeMachine(compiler=True)
    assert make_plan(requested, run, machine=unmeasured).config == plan.config


def test_exact_sums_without_their_folder_are_refused_in_one_line(text_file: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gptmini.extras.parallel", None)
    config = tiny(data={"path": str(text_file)}, train={"reduce": "exact"})
    with pytest.raises(MachineError, match=r"exact sums: gptmini/extras.* is not in this copy"):
        make_plan(config, None, dry_run=True)


@pytest.mark.parametrize(
    ("asked", "machine", "compiled"),
    [
        ("auto", FakeMachine(step=1.0, compiler=True), "off"),  # 300 seconds
        ("auto", FakeMachine(step=1.1, compiler=True), "on"),
        ("auto", FakeMachine(step=1.0, slow=1.1, compiler=True), "on"),
        ("auto", FakeMachine(step=1.1), "off"),
        ("auto", FakeMachine(GPU, step=0.1), "on"),
        ("on", FakeMachine(step=0.1), "on"),
        ("off", FakeMachine(step=9.0, compiler=True), "off"),
    ],
)
def test_what_takes_long_is_compiled(
    text_file: Path, asked: str, machine: FakeMachine, compiled: str, monkeypatch
):
    monkeypatch.setattr(settle, "release_freed_memory", lambda _: None)
    config = tiny(data={"path": str(text_file)}, train={"steps": 300, "compile": asked})
    assert make_plan(config, None, machine=machine).config.train.compile == compiled
    assert len(machine.measured) == 1


def test_minutes_that_are_few_leave_no_time_to_compile(text_file: Path, tmp_path: Path):
    machine = FakeMachine(step=0.001, compiler=True)
    sections = tiny(data={"path": str(text_file)}).model_dump(exclude_unset=True)
    for given, compiled in ((4.9, "off"), (60.0, "on")):
        train = {"minutes": given, "steps": 1_000_000}
        machine = FakeMachine(step=0.06 * given / 1000, compiler=True)
        config = plan_on(machine, {**sections, "train": train}, tmp_path).config
        assert config.train.compile == compiled


def test_a_model_that_cannot_fit_is_refused_before_it_is_made(text_file: Path, tmp_path: Path):
    machine = FakeMachine(memory=1 << 10, compiler=True)
    with pytest.raises(MachineError, match="parameters needs"):
        make_plan(tiny(data={"path": str(text_file)}), None, machine=machine)


@pytest.mark.parametrize(("given", "vocabulary"), [(1, 512), (10, 2048)])
def test_minutes_choose_a_vocabulary_that_the_tokens_read_can_fill(
    tmp_path: Path, given: int, vocabulary: int
):
    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefghijklmnop", k=5)) for _ in range(20_000)]
    (tmp_path / "text.txt").write_text(" ".join(25 * words))  # 3 MB
    sections = {"data": {"path": str(tmp_path / "text.txt")}}
    sections["train"] = {"minutes": given, "compile": "off", "device": "cpu", "dtype": "float32"}
    config = plan_on(HALF_A_SECOND, sections, tmp_path).config
    assert config.model.vocab_size == vocabulary
    assert config.train.steps == pytest.approx(120 * given, rel=0.1)
    assert config.model.n_layer == (2 if given == 1 else 6)  # read 0.2 or 4 times


@pytest.mark.parametrize(("size", "layers"), [(2_000_000, 2), (1_000_000, 6)])
def test_minutes_choose_deeper_models_for_texts_that_are_read_often(
    tmp_path: Path, size: int, layers: int
):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * (size // 24))
    sections = {"data": {"path": str(tmp_path / "text.txt")}, "tokenizer": {"kind": "byte"}}
    sections["train"] = {"minutes": 10, "compile": "off", "device": "cpu", "dtype": "float32"}
    config = plan_on(HALF_A_SECOND, sections, tmp_path).config
    assert (config.model.n_layer, config.model.d_model) == (layers, 256)
    assert config.model.tie_embeddings == (layers == 6)


def test_training_by_minutes_ends_before_a_short_text_is_memorized(tmp_path: Path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 1000)
    sections = {"data": {"path": str(tmp_path / "text.txt")}, "tokenizer": {"kind": "byte"}}
    sections["train"] = {"minutes": 100, "compile": "off", "device": "cpu", "dtype": "float32"}
    plan = plan_on(HALF_A_SECOND, sections, tmp_path)
    text = measure_corpus(plan.config, plan.corpus)
    # A million tokens of it, as it is so short; the minutes suffice for 12,000 steps.
    assert count_epochs(plan.config, text) == pytest.approx(1e6 / text.per_epoch, rel=0.02)


def test_minutes_for_an_empty_file_are_refused_as_steps_are(tmp_path: Path):
    (tmp_path / "text.txt").write_text("")
    for train in ({"minutes": 1}, {"steps": 10}):
        config = validate({"data": {"path": str(tmp_path / "text.txt")}, "train": train}, {})
        with pytest.raises(DataError, match=r"text\.txt"):
            make_plan(config, None, machine=HALF_A_SECOND)


def test_a_step_is_measured_once(tmp_path: Path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 100_000)
    for kind in ("auto", "byte"):
        machine = replace(HALF_A_SECOND, measured=[])
        train = {"minutes": 10, "compile": "off", "device": "cpu", "dtype": "float32"}
        sections = {"data": {"path": str(tmp_path / "text.txt")}, "tokenizer": {"kind": kind}}
        plan_on(machine, {**sections, "train": train}, tmp_path)
        assert len(machine.measured) == 1


@pytest.mark.parametrize("kind", ["auto", "byte"])
@pytest.mark.parametrize(("held_out", "context"), [(3000, 512), (400, 256)])
def test_minutes_choose_rows_that_fit_the_held_out_text(
    tmp_path: Path, kind: str, held_out: int, context: int
):
    letters = random.Random(0)
    text = " ".join("".join(letters.choices("abcdefghijklmnop", k=5)) for _ in range(100_000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "other.txt").write_text(text[: held_out * (1 if kind == "byte" else 2)])
    paths = {"path": str(tmp_path / "text.txt"), "validation_path": str(tmp_path / "other.txt")}
    train = {"minutes": 0.5, "compile": "off", "device": "cpu", "dtype": "float32"}
    sections = {"data": paths, "tokenizer": {"kind": kind}, "train": train}
    plan = plan_on(HALF_A_SECOND, sections, tmp_path)
    assert plan.config.model.context_length == context
    assert plan.config.train.batch_size * context == 2048
    assert plan.text_size == measure_corpus(plan.config, plan.corpus)


def test_standard_input_gets_the_sizes_of_the_same_text_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 2000)
    machine = FakeMachine(step=lambda config: config.model.n_layer / 100)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    plans = []
    for path in ("-", str(text)):
        sections = {"data": {"path": path}, "train": {"minutes": 10.0, "compile": "off"}}
        plans.append(plan_on(machine, sections, tmp_path).config)
    assert plans[0].model == plans[1].model
    assert plans[0].train == plans[1].train
