"""Several processes that train one model: the same bits as one, and failures that end them all."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

from gptmini.errors import ConfigError, MachineError, RankError
from gptmini.extras.parallel import ranks
from gptmini.runs.directory import RunDirectory
from gptmini.train.group import join_group
from tests.samples import CHAT_TOKENIZER, run_of, uneven_chats
from tests.support import ROOT, needs_posix, prose

pytestmark = needs_posix  # its launcher forks

SETTINGS = {
    "model": {"n_layer": 2, "d_model": 32, "n_head": 2, "context_length": 32, "dropout": 0.1},
    "tokenizer": {"kind": "byte"},
    "train": {
        "batch_size": 8,
        "micro_batch_size": 1,
        "reduce": "exact",
        "compile": "off",
        "warmup_steps": 0,
        "cooldown": 0,
        "dtype": "bfloat16",
        "patience": "null",
        "steps": 4,
        "eval_every": 2,
        "save_every": 2,
        "log_every": 1,
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(prose(1500))
    return path


def words(text, out, settings=SETTINGS):
    """The command's words after `gptmini`."""
    assignments = [
        f"--set={section}.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for section, values in settings.items()
        for key, value in values.items()
        if value is not None
    ]
    paths = ["--data", str(text), "--out", str(out)]
    return ["train", *paths, *assignments]


@pytest.fixture
def train(tmp_path, text, start_ranks):
    """Trains on so many ranks; returns the run, the exit codes and what was said."""

    def run(n_ranks, name="run", fault="none", **changes):
        out = tmp_path / name
        settings = {key: values | changes.get(key, {}) for key, values in SETTINGS.items()}
        codes, said = start_ranks(n_ranks, *words(text, out, settings), fault=fault)
        return RunDirectory(out), codes, said

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text, start_ranks):
    """A run of two ranks that nothing has disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert start_ranks(2, *words(text, out))[0] == [0, 0]
    return RunDirectory(out)


def weights(run, step=4):
    return load_file(run.checkpoints / f"step-{step:08d}" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(run):
    names = ("step", "train_loss", "val_loss", "grad_norm")
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{name: line.get(name) for name in names} for line in lines]


def errors(said):
    return [line for line in said.splitlines() if line.startswith("gptmini:")]


@pytest.mark.parametrize(
    ("optimizer", "numbers", "settings"),
    [
        ("muon", (2, 4), {}),
        ("adamw", (4,), {"dtype": "float32", "batch_size": 12}),  # 3 micro-batches on each rank
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_ranks(train, optimizer, numbers, settings):
    """Dropout, accumulation, bfloat16; weights, losses, gradient norms and evaluations."""
    settings = {"optimizer": optimizer, **settings}
    one, _, said = train(1, "one", train=settings)
    assert "step 4/4" in said
    for n_ranks in numbers:
        several, codes, said = train(n_ranks, f"on-{n_ranks}", train=settings)
        assert codes == [0] * n_ranks
        assert said.count("step 4/4 100%  val") == 1
        assert same(weights(one), weights(several))
        assert losses(one) == losses(several)


@pytest.mark.parametrize(("reduce", "n_ranks"), [("exact", 4), ("fast", 3)])
def test_ranks_whose_rows_have_unequal_answers_train_as_one(start_ranks, tmp_path, reduce, n_ranks):
    base = run_of(tmp_path / "base", CHAT_TOKENIZER)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(uneven_chats())
    changes = {"batch_size": 12, "seq_len": 16, "dtype": "float32", "reduce": reduce}
    settings = {"model": {"dropout": 0.1}, "train": SETTINGS["train"] | changes}
    runs = []
    for size in (1, n_ranks):
        out = tmp_path / f"on-{size}"
        command = [*words(chats, out, settings), "--from", str(base.path)]
        codes, said = start_ranks(size, *command)
        assert codes == [0] * size, said
        runs.append(RunDirectory(out))
    one, several = runs
    if reduce == "exact":
        assert losses(one) == losses(several)
        assert same(weights(one), weights(several))
    # The first line is the evaluation of the base.
    for ours, theirs in zip(losses(one)[1:], losses(several)[1:], strict=True):
        for name in ("train_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


def test_a_run_continues_on_any_number_of_ranks(train):
    straight, *_ = train(1, "straight", train={"steps": 6})
    for steps, n_ranks in ((2, 2), (4, 1), (6, 4)):
        run, codes, said = train(n_ranks, train={"steps": steps, "reduce": "exact"})
        assert codes == [0] * n_ranks, said
        assert "bit-identical" not in said
    assert same(weights(straight, 6), weights(run, 6))
    assert losses(straight)[-1] == losses(run)[-1]


def test_a_run_continues_on_more_ranks_than_it_has_micro_batches(train):
    settings = {"micro_batch_size": None, "reduce": "fast"}
    train(1, train=settings | {"steps": 2})
    run, codes, said = train(2, train=settings)
    assert codes == [0] * 2
    assert "8 does not divide the 4 rows of each of 2 processes; choosing another" in said
    assert "micro_batch_size was 8, is 4; results will no longer be bit-identical" in said
    assert run.load_config().train.micro_batch_size == 4


def test_only_rank_0_writes_into_the_run(train, tmp_path):
    _, codes, said = train(2, fault="watched")
    assert codes == [0, 0]
    written = re.findall(r"rank 1 writes (\S+)", said)
    assert not [path for path in written if str(tmp_path / "run") in path]


def test_a_rank_that_dies_ends_the_others(train):
    """And torchrun, below, starts them again."""
    run, codes, said = train(2, fault="killed")
    assert codes == [-9, 7]
    (line,) = errors(said)
    assert line.startswith("gptmini: rank 1: ")
    assert run.list_steps() == [2]


@pytest.mark.parametrize("fault", ["silent", "stuck"])
def test_a_rank_that_hangs_ends_the_others_after_a_while(train, fault):
    run, codes, said = train(2, fault=fault)
    assert codes[0] == 7
    (line,) = errors(said)
    assert line.startswith("gptmini: rank 0: ")
    assert run.list_steps() == ([2] if fault == "stuck" else [])


def test_a_signal_to_one_rank_stops_all_at_the_same_step(train, whole):
    run, codes, said = train(2, fault="stopped")
    assert codes == [143, 143]
    (line,) = errors(said)
    assert "stopped by SIGTERM after step 3, saved" in line
    assert run.list_steps()[0] == 3
    train(2)
    assert same(weights(whole), weights(run))


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(train):
    run, codes, said = train(2, fault="nan", train={"micro_batch_size": 4})
    assert codes == [6, 6]
    (line,) = errors(said)
    assert "loss nan" in line
    assert run.list_steps() == [2]


def test_an_overflow_on_one_rank_makes_all_repeat_the_step_at_the_same_scale(train):
    half = {"dtype": "float16", "micro_batch_size": 2}
    one, *_ = train(1, "one", train=half)
    for name, sums in (("whole", {"reduce": "exact"}), ("sharded", {"reduce": "fast"})):
        changes = half | sums | {"shard": name == "sharded"}
        run, codes, said = train(2, name, fault="overflowing", train=changes)
        assert codes == [0, 0]
        assert said.count("step 2: gradients overflow float16; again with") == 1
        lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
        assert [line["loss_scale"] for line in lines] == [2**16, 2**15, 2**15, 2**15]
        for line, loss in zip(lines, losses(one), strict=True):
            assert line["train_loss"] == pytest.approx(loss["train_loss"], abs=1e-3)
            assert line["grad_norm"] == pytest.approx(loss["grad_norm"], rel=1e-2)


def test_ranks_with_other_weights_are_found_before_anything_is_saved(train):
    run, codes, said = train(2, fault="seeded")
    assert codes == [7, 7]
    assert "rank 1: embed.weight is" in errors(said)[0]
    assert run.list_steps() == []


def test_a_checkpoint_that_rank_0_cannot_read_ends_all_with_its_line(train):
    train(1, train={"steps": 2})
    _, codes, said = train(2, fault="unreadable")
    assert codes == [4, 4]
    first, second = errors(said)
    assert first.endswith("step 2: damaged")
    assert "every checkpoint is damaged" in second


def test_a_full_disk_on_rank_0_ends_all_with_its_line(train):
    _, codes, said = train(2, fault="full")
    assert codes == [5, 5]
    (line,) = errors(said)
    assert "could not save step 2 (no space left on device)" in line


def test_ranks_with_other_settings_are_refused(train):
    _, codes, said = train(2, train={"lr": "1e-{rank}"})
    assert codes == [7, 7]
    (line,) = errors(said)
    assert "rank 1: train.lr is 0.1, on rank 0 1.0; start all ranks" in line


def test_ranks_with_another_text_are_refused(train):
    _, codes, said = train(2, fault="misread")
    assert codes == [7, 7]
    assert "rank 1: the text is another, on rank 0 " in errors(said)[0]


def test_half_of_torchruns_variables_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE: not set, but RANK is"), join_group():
        pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_PORT", "abc", "MASTER_PORT: must be a number below 65536, not abc"),
        ("MASTER_PORT", "70000", "MASTER_PORT: must be a number below 65536, not 70000"),
        ("RANK", "2", "RANK: must be a number below 2, not 2"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK: must be a number below 2, not -1"),
        ("MASTER_ADDR", "", "MASTER_ADDR: not set"),
    ],
)
def test_wrong_variables_of_torchrun_are_refused(name, value, message, monkeypatch):
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for each, text in (values | {"MASTER_PORT": "1", name: value}).items():
        monkeypatch.setenv(each, text)
    with pytest.raises(ConfigError, match=message), join_group():
        pass


def test_empty_variables_of_torchrun_are_a_single_process(monkeypatch):
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "")
    with join_group() as group:
        assert group.world_size == 1


def test_several_processes_without_the_folder_are_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "gptmini.extras.parallel", None)
    with pytest.raises(MachineError, match="extras/parallel is not in this copy"), join_group():
        pass


def test_ranks_that_never_come_are_counted(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(ranks, "COLLECTIVE_TIMEOUT_SECONDS", 1)
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4}
    for name, value in (values | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankError, match="1/4"), join_group():
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_others_ends_at_a_signal(number, default_signals):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    waits = "from gptmini.train.group import join_group\nwith join_group(): pass"
    with subprocess.Popen(
        [sys.executable, "-c", waits],
        env=os.environ | values | {"MASTER_PORT": port, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr.readline() == "waiting for all 2 processes\n"
        while True:  # until it listens, so that it waits in torch
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
                break
        process.send_signal(number)
        try:
            assert process.wait(60) == -number
        finally:
            process.kill()


DIES_ONCE = """
import os, signal
from gptmini.cli import app
from gptmini.train import loop
update = loop.train_step
def dying(training):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if training.step == 3 and os.environ["RANK"] == "1" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(training)
loop.train_step = dying
app.main()
"""


def test_torchrun_starts_a_run_again_after_a_rank_died(whole, tmp_path, text):
    script = tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "--max-restarts=1", script, *words(text, tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "resuming after step 2" in done.stderr
    assert same(weights(whole), weights(RunDirectory(tmp_path / "run")))
