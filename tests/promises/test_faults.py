"""Runs survive crashes, power cuts, full disks, signals, divergence and bad files."""

import errno
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

resource = pytest.importorskip("resource", reason="kills, signals and limits of POSIX")

from gptmini import files
from gptmini.config import load
from gptmini.config.load import list_config_files
from gptmini.config.settings import Config
from gptmini.errors import ConfigError, GptminiError, MachineError, Stopped
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.runs import tensors
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.tokenizer.tokenizers import ByteTokenizer
from gptmini.train import loop
from tests.support import SMALL, tiny
from tests.support import train as begin_training

COMPUTE_LOSS = GPT.compute_loss  # as it is before a test replaces it

TRAIN = {"steps": 6, "save_every": 2, "eval_every": 3, "log_every": 1}


@pytest.fixture
def config(text_file: Path) -> Config:
    """A run with dropout, so that random numbers matter."""
    return tiny(data={"path": str(text_file)}, model={"dropout": 0.2}, train=TRAIN)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., RunDirectory]:
    def run(config: Config, name: str = "run") -> RunDirectory:
        begin_training(config, tmp_path / name)
        return RunDirectory(tmp_path / name)

    return run


def result(run: RunDirectory) -> tuple[bytes, list[dict[str, Any]]]:
    """The final weights and all metrics that do not depend on the clock."""
    final = run.checkpoints / f"step-{run.list_steps()[0]:08d}" / "model.safetensors"
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    for line in lines:
        del line["seconds"]
        del line["wall_time"]
        line.pop("tokens_per_second", None)
        line.pop("peak_memory", None)
    return final.read_bytes(), lines


# The paths in a folder, with the contents of the files.
Remains = tuple[tuple[Path, bytes | None], ...]


class Disk:
    """Remembers what a power cut before and after each call to the disk would leave of a run.

    Every file loses half of its bytes that were not synced. Equal remains are the same run from
    there on, so each is kept once.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.calls = 0
        self.remains: dict[Remains, None] = {}  # an ordered set
        self.contents: dict[bytes, bytes] = {}  # most files are in many remains
        self.synced: dict[int, int] = {}
        for owner, name in [
            (os, "replace"),
            (os, "fsync"),
            (os, "open"),
            (os, "unlink"),
            (shutil, "rmtree"),
            (safetensors.torch, "save_file"),
            (files, "write_and_sync"),
            (files, "sync_directory"),
            (Path, "mkdir"),
            (Path, "unlink"),
        ]:
            patch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and str(self.folder) not in str(arguments[0]):
                return function(*arguments, **options)
            self.calls += 1
            self._remember()
            answer = function(*arguments, **options)
            if name == "fsync":
                status = os.fstat(arguments[0])
                self.synced[status.st_ino] = status.st_size
            self._remember()
            return answer

        return call

    def _remember(self) -> None:
        found: list[tuple[Path, bytes | None]] = []
        for path in sorted(self.folder.rglob("*")):
            content = None
            if path.is_file():
                content = path.read_bytes()
                kept = min(self.synced.get(path.stat().st_ino, 0), len(content))
                content = content[: kept + (len(content) - kept) // 2]
                content = self.contents.setdefault(content, content)
            found.append((path, content))
        self.remains[tuple(found)] = None


def restore(remains: Remains, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in remains:
        if content is None:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def lost(
    train: Callable[..., RunDirectory], config: Config, stride: int, tmp: Path
) -> Iterator[str]:
    """Cut the power at every stride-th moment and resume; yield what ends unlike an uncut run."""
    run = tmp / "run"
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(run, patch)
        whole = result(train(config))
    assert disk.calls > 50
    for number, remains in enumerate(disk.remains):
        if number % stride:
            continue
        restore(remains, run)
        try:
            if result(train(config)) != whole:
                yield f"moment {number}: other bits"
        except GptminiError as error:
            yield f"moment {number}: {error}"


def test_a_power_cut_at_any_call_to_the_disk_loses_nothing(train, config, tmp_path, capsys):
    """At the first checkpoint, and at one that removes another."""
    config = config.with_train(steps=4, save_every=2, eval_every=2, keep=1)
    assert list(lost(train, config, 1, tmp_path)) == []


@pytest.mark.parametrize("mutant", ["no sync", "no check", "no rename", "no seed", "no optimizer"])
def test_the_test_above_would_notice(train, config, tmp_path, monkeypatch, mutant):
    if mutant == "no sync":
        monkeypatch.setattr(files, "sync", lambda descriptor: None)
    elif mutant == "no check":  # of what a power cut has left of files that were not synced
        monkeypatch.setattr(files, "sync", lambda descriptor: None)
        monkeypatch.setattr(tensors, "check_file", lambda path, _: None)
    elif mutant == "no rename":
        monkeypatch.setattr(files, "atomic_write_bytes", lambda path, data: path.write_bytes(data))
    elif mutant == "no seed":
        seed = torch.manual_seed
        monkeypatch.setattr(torch, "manual_seed", lambda n: seed(1) if n < 9 else None)
    else:
        monkeypatch.setattr(Optimizer, "load_state_dict", lambda *_: None)
    try:
        found = next(lost(train, config, 3, tmp_path), None)
    except Exception as error:  # a mutant may also fail in worse ways
        found = repr(error)
    assert found


def test_every_error_of_the_disk_keeps_the_checkpoint_before(tmp_path: Path):
    numbers = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE)
    run = RunDirectory(tmp_path / "run")
    run.create(tiny(), ByteTokenizer())

    def state(step: int) -> Checkpoint:
        tensors = {"a": torch.full((5,), float(step))}
        return Checkpoint({"step": step, "best": {"step": 1, "val_loss": 1.0}}, tensors, tensors)

    run.save(state(1))
    step = tried = 1
    for number in numbers:
        at = 0
        while True:
            at += 1
            step += 1
            with pytest.MonkeyPatch.context() as patch:
                calls = _failing(patch, at, number)
                try:
                    run.save(state(step))
                except MachineError as error:
                    tried += 1
                    text = error.lines[0]
                    assert f"could not save step {step} ({os.strerror(number).lower()})" in text
                    assert " bytes free; " in text
            newest = run.load_newest()
            assert newest is not None
            assert newest.model["a"].tolist() == [newest.step] * 5
            assert run.load_best().step == 1
            if calls[0] < at:  # the save is over before the call that should fail
                assert newest.step == step
                break
    assert tried > 60


def _failing(patch: pytest.MonkeyPatch, at: int, number: int) -> list[int]:
    """Let this call to the disk fail; the list counts the calls."""
    calls = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise OSError(number, os.strerror(number))
            return function(*arguments, **options)

        return call

    for owner, name in [
        (os, "replace"),
        (os, "fsync"),
        (files, "sync_and_hash"),
        (files, "write_and_sync"),
        (Path, "mkdir"),
    ]:
        patch.setattr(owner, name, counted(getattr(owner, name)))
    return calls


def in_a_child(function: Callable[[], None]) -> int:
    """The exit status of a function run in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except GptminiError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_disk_that_fills_up_keeps_what_is_there(train, config, tmp_path: Path):
    whole = result(train(config, "whole"))
    largest = max(file.stat().st_size for file in (tmp_path / "whole").rglob("*") if file.is_file())

    def limited(size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            train(config)
        except OSError as error:
            raise MachineError(str(error)) from None

    for size in range(0, largest, largest // 6):
        assert in_a_child(lambda size=size: limited(size)) == 5
        assert result(train(config)) == whole
        shutil.rmtree(tmp_path / "run")


def test_a_full_disk_is_reported_before_the_first_step(train, config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    monkeypatch.setattr(loop, "train_step", None)
    with pytest.raises(
        MachineError, match=r"a checkpoint needs [\d,]+ bytes, 1,000 are free; make"
    ):
        train(config)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("train_step", "SIGHUP"),
        ("train_step", "SIGTERM"),
        ("train_step", "SIGINT"),
        ("evaluate_validation", "SIGTERM"),
        ("save_checkpoint", "SIGTERM"),
    ],
)
def test_after_a_signal_anywhere_the_same_command_resumes(train, config, monkeypatch, where, name):
    whole = result(train(config, "whole"))
    number = getattr(signal, name)
    shown_name = name.replace("SIGINT", "Ctrl-C")
    function = getattr(loop, where)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), number)
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, where, interrupted)
        expected = f"stopped by {shown_name} after step .*saved"
        with pytest.raises(Stopped, match=expected) as stopped:
            train(config)
    assert stopped.value.exit_code == 128 + number
    assert result(train(config)) == whole


@pytest.mark.usefixtures("default_signals")
def test_under_nohup_the_end_of_the_terminal_is_ignored(train, config, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    update = loop.train_step

    def hang_up(training: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return update(training)

    monkeypatch.setattr(loop, "train_step", hang_up)
    try:
        assert train(config).list_steps()[0] == 6
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigusr1_saves_one_checkpoint_and_training_continues(train, config, monkeypatch):
    """Asked for in the third update, and once more while that is saved."""
    config = config.with_train(save_every=6, eval_every=6)
    whole = result(train(config, "whole"))
    save = loop.save_checkpoint
    saved = []

    def note(training: Any) -> None:
        saved.append(training.step)
        if training.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        save(training)

    update = loop.train_step

    def ask(training: Any) -> Any:
        if training.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return update(training)

    monkeypatch.setattr(loop, "save_checkpoint", note)
    monkeypatch.setattr(loop, "train_step", ask)
    assert result(train(config)) == whole
    assert saved == [3, 4, 6]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=20,
)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_in_any_history_the_newest_intact_and_the_best_are_there(tmp_path: Path, history):
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    run = RunDirectory(tmp_path / "run")
    run.create(tiny(), ByteTokenizer())
    best = 0
    whole = []
    for step, (is_best, damaged) in enumerate(history, 1):
        best = step if is_best or not best else best
        tensors = {"a": torch.full((2,), float(step))}
        run.save(Checkpoint({"step": step, "best": {"step": best}}, tensors, tensors))
        whole.append(step)
        kept = run.list_steps()
        assert kept[0] == step
        assert best in kept or best not in whole
        assert len(kept) <= 3
        if damaged and len(whole) > 1:
            (run.checkpoints / f"step-{step:08d}" / "model.safetensors").write_bytes(b"x")
            whole.remove(step)
            newest = run.load_newest()
            assert newest is not None
            assert newest.step == max(set(whole) & set(kept))
            run.tidy_after(newest.step, {"step": best}, keep=2)


class Canary:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.path),))


def test_no_file_can_run_code(gptmini, train, config, text_file: Path, tmp_path: Path):
    canary = tmp_path / "canary"
    evil = pickle.dumps(Canary(canary))
    run = train(config)
    (tmp_path / "evil.yaml").write_text(f"train: !!python/object/apply:os.mkdir [{canary}]")
    (tmp_path / "evil.json").write_bytes(evil)
    for name in ("a.txt", "a.jsonl", "a.csv", "a.parquet", "a.txt.gz", "a.txt.zst"):
        (tmp_path / name).write_bytes(evil)
    commands = [["train", "evil.yaml"], ["tokenizer", "encode", "evil.json", "x"]]
    commands += [["data", "prepare", "--data", str(f)] for f in tmp_path.glob("a.*")]
    commands += [["train", "--set", "tokenizer.kind=evil.json"]]
    for words in commands:
        assert gptmini(*words)[0] in (2, 3), words
    for file in [file for file in run.path.rglob("*") if file.is_file()]:
        kept = file.read_bytes()
        file.write_bytes(evil)
        code, _, err = gptmini("generate", str(run.path), "--max-new-tokens", "1")
        assert code in (0, 2, 3, 4), err
        assert "Traceback" not in err
        file.write_bytes(kept)
    for file in (tmp_path / "cache").iterdir():
        if file.is_file():
            file.write_bytes(evil)
    assert gptmini("data", "prepare", "--data", str(text_file))[0] == 0
    assert not canary.exists()


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)
@given(data=st.data())
def test_no_configuration_makes_us_crash(tmp_path: Path, data):
    texts = [path.read_text() for path in list_config_files()]
    text = data.draw(st.sampled_from(texts))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        drop = data.draw(st.integers(0, 5))
        extra = st.text(max_size=4) | st.sampled_from(["-1", "1e999", ": ", "[", "{", "null", "\t"])
        text = text[:at] + data.draw(extra) + text[at + drop :]
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        load.load_config(path, [])
    except ConfigError as error:
        assert all(line for line in error.lines)


def test_only_intact_checkpoints_count_as_kept(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.create(tiny(), ByteTokenizer())
    tensors = {"a": torch.zeros(9)}
    for step in range(1, 6):
        run.save(Checkpoint({"step": step, "best": {"step": 1}}, tensors, tensors), keep=3)
        if step == 4:
            (run.checkpoints / "step-00000004" / "optimizer.safetensors").write_bytes(b"x")
    assert run.list_steps() == [5, 4, 3, 2, 1]  # 5, 3 and 2 are whole, 4 is not, 1 is the best
    run.save(Checkpoint({"step": 6, "best": {"step": 1}}, tensors, tensors), keep=1)
    assert run.list_steps() == [6, 1]


def test_a_run_that_is_moved_away_is_not_started_afresh(train, config, tmp_path, monkeypatch):
    update = loop.train_step

    def move(training: Any) -> Any:
        if training.step == 3:
            training.run.path.rename(tmp_path / "moved")
        return update(training)

    whole = result(train(config, "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", move)
        with pytest.raises(MachineError, match="could not save step 4"):
            train(config)
    assert not (tmp_path / "run").exists()
    assert result(train(config, "moved")) == whole


def test_a_run_can_be_read_while_it_is_written(train, config, tmp_path):
    busy = tiny(
        data={"path": config.data.path},
        train={"steps": 30, "save_every": 1, "eval_every": 1, "keep": 1},
    )
    train(tiny(data={"path": config.data.path}, train={"steps": 1}), "other")
    pid = os.fork()
    if pid == 0:
        try:
            train(busy)
        finally:
            os._exit(0)
    run = RunDirectory(tmp_path / "run")
    read = 0
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if run.exists and run.list_steps():
            assert run.load_best().model
            read += 1
    assert read > 5


@pytest.mark.parametrize("name", ["-x ünï 東\n", "a" * 200])
def test_runs_may_have_any_name(train, config, name):
    assert train(config, name).list_steps()[0] == 6


def test_a_model_too_large_for_memory_is_refused_before_it_is_made(train, config):
    large = tiny(data={"path": config.data.path}, model={"d_model": 1_000_000, "n_layer": 100})
    with pytest.raises(MachineError, match=r"parameters needs [\d,]+ bytes, cpu has"):
        train(large)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")],
)
def test_too_little_memory_is_the_limit_of_the_machine(gptmini, text_file, monkeypatch, error):
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(loop, "train_step", fail)
    code, _, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 5
    assert "out of memory; lower train.micro_batch_size" in err


def test_an_operation_that_cannot_be_deterministic_is_named(gptmini, text_file, monkeypatch):
    def fail(_: object) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        finally:
            torch.use_deterministic_algorithms(False)

    monkeypatch.setattr(loop, "train_step", fail)
    code, _, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 5
    assert "gptmini: train.deterministic: put_ has no deterministic kernel here; use off" in err
