"""Several processes that share the weights of one model, with the variables of torchrun."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptmini.config.settings import Config
from gptmini.errors import ConfigError, MachineError
from gptmini.plan.cost import count_parameters
from gptmini.plan.settle import make_plan
from gptmini.plan.timing import Machine
from gptmini.runs.directory import Checkpoint, RunDirectory
from tests.support import tiny, train

TRAIN = {
    "steps": 4,
    "eval_every": 2,
    "save_every": 2,
    "log_every": 1,
    "keep": 1,
    "reduce": "fast",
    "compile": "off",
    "dtype": "bfloat16",
    "shard": True,
}
# Widths whose rows do not fill vectors, fewer rows than ranks, a single one, several micro-batches,
# and a clip that acts. No dropout, which the groups of rows would draw otherwise.
CASES: dict[str, dict[str, Any]] = {
    "muon": {
        "model": {"d_model": 35, "n_head": 2, "head_dim": 10, "d_ff": 1, "dropout": 0}
        | {"attention": {"variant": "mqa"}, "position": "alibi"},
        "train": TRAIN
        | {"batch_size": 12, "micro_batch_size": 1, "grad_clip": 0.1, "dtype": "float32"},
    },
    "adamw": {
        "model": {"d_model": 12, "n_head": 6, "dropout": 0, "bias": True, "norm": "rmsnorm"}
        | {"tie_embeddings": False, "position": "rope", "activation": "swiglu"},
        "train": TRAIN
        | {"batch_size": 8, "micro_batch_size": 1, "optimizer": "adamw", "grad_clip": 0.1}
        | {"gradient_checkpointing": True},
    },
}
# No cool-down, so that more steps are the same run.
CHAIN = CASES["muon"]["train"] | {"batch_size": 8, "warmup_steps": 0, "cooldown": 0.0}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, start_ranks: Callable[..., tuple[list[int], str]]
) -> Path:
    """Every case on 1 and 4 processes as runs/CASE-N, and a chain of resumes against a whole."""
    folder = tmp_path_factory.mktemp("sharded")
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{n}. the quick brown fox jumps over the lazy dog\n" for n in range(60))
    )

    def config(case: str, **changes: Any) -> Config:
        settings = CASES[case] | {"data": {"path": str(text)}}
        return tiny(**settings | {"train": settings["train"] | changes})

    def launch(processes: int, name: str, requested: Config) -> None:
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(requested.model_dump(exclude_unset=True)))
        words = ["train", str(file), "--out", str(folder / name)]
        codes, said = start_ranks(processes, *words)
        assert codes == [0] * processes, said

    for case in CASES:
        train(config(case), folder / f"{case}-1")
        launch(4, f"{case}-4", config(case))
    train(config("muon", **CHAIN | {"steps": 6}), folder / "whole")
    launch(2, "chain", config("muon", **CHAIN | {"steps": 2}))
    launch(1, "chain", config("muon", **CHAIN | {"steps": 6}))
    return folder


def last(run: Path) -> Checkpoint:
    checkpoint = RunDirectory(run).load_newest()
    assert checkpoint is not None
    return checkpoint


def read_losses(run: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["grad_norm"], line["train_loss"]) for line in lines]


def assert_agree(run: Path, other: Path, tolerance: float) -> None:
    ours = read_losses(run)
    theirs = read_losses(other)
    assert len(ours) == len(theirs) >= 4
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, rel=tolerance)


@pytest.mark.parametrize(("case", "tolerance"), [("muon", 2e-3), ("adamw", 0.02)])
def test_sharded_training_agrees_with_one_process_but_for_rounding(
    runs: Path, case: str, tolerance: float
):
    """In float32, and in bfloat16, in which matrices are gathered."""
    alone = runs / f"{case}-1"
    assert min(norm for norm, _ in read_losses(alone)) > 0.1  # each step is clipped
    assert_agree(runs / f"{case}-4", alone, tolerance)


def test_a_run_resumed_on_2_then_1_processes_is_one_that_never_stopped(runs: Path):
    assert_agree(runs / "chain", runs / "whole", 5e-3)


def test_the_files_are_those_of_one_process(runs: Path):
    alone, sharded = (
        {file.name for file in (runs / f"adamw-{size}" / "checkpoints").glob("*4/*")}
        for size in (1, 4)
    )
    assert alone == sharded
    assert last(runs / "adamw-1").model.keys() == last(runs / "adamw-4").model.keys()


def test_a_model_is_sharded_by_itself_where_it_does_not_fit_whole(text_file, tmp_path, monkeypatch):
    config = tiny(data={"path": str(text_file)}, train={"micro_batch_size": 1})
    decided = make_plan(config, None, world_size=2)
    assert not decided.config.train.shard
    assert decided.config.train.reduce == "exact"
    whole = 16 * count_parameters(decided.config.model)
    monkeypatch.setattr(Machine, "get_total_memory", lambda _: 2 * whole - 1)  # of two processes
    sharded = make_plan(config, None, world_size=2).config.train
    assert (sharded.shard, sharded.reduce) == (True, "fast")
    assert not make_plan(config, None, world_size=1).config.train.shard
    monkeypatch.setattr(Machine, "get_total_memory", lambda _: whole - 1)
    with pytest.raises(MachineError, match="bytes"):
        make_plan(config, None, world_size=2)


def test_exact_needs_whole_models(text_file, tmp_path, monkeypatch):
    def request(**settings: Any) -> Config:
        train = {"micro_batch_size": 1, **settings}
        return tiny(data={"path": str(text_file)}, train=train)

    assert make_plan(request(shard=True), None, world_size=2).config.train.reduce == "fast"
    decided = make_plan(request(reduce="exact", shard=True), None, world_size=1)
    assert decided.config.train.reduce == "exact"
    with pytest.raises(ConfigError, match=r"train\.reduce: .*train\.shard"):
        make_plan(request(reduce="exact", shard=True), None, world_size=2)
    whole = 16 * count_parameters(decided.config.model)
    monkeypatch.setattr(Machine, "get_total_memory", lambda _: 2 * whole - 1)
    with pytest.raises(ConfigError, match=r"train\.reduce"):
        make_plan(request(reduce="exact"), None, world_size=2)


def test_a_run_that_was_exact_goes_on_in_shards(text_file, tmp_path):
    requested = tiny(data={"path": str(text_file)}, train={"compile": "off"})
    run = RunDirectory(tmp_path / "run")
    plan = make_plan(requested, run, world_size=2)
    assert plan.config.train.reduce == "exact"
    run.create(plan.config, plan.corpus.tokenizer, requested)
    sharded = make_plan(requested.with_train(shard=True), run, world_size=2)
    assert sharded.config.train.reduce == "fast"
