import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from gptmini import files
from gptmini.errors import CheckpointError, ConfigError, MachineError
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.tensors import check_shapes
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import needs_posix, tiny


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create(tiny(), ByteTokenizer())
    return run


def checkpoint(step: int, best: int | None = None) -> Checkpoint:
    """A checkpoint whose tensors hold its step."""
    state = {"step": step, "best": None if best is None else {"step": best, "val_loss": 1.0}}
    tensors = {"a": torch.full((5,), float(step)), "b": torch.arange(6.0).view(2, 3)}
    return Checkpoint(state, tensors, {"a/exp_avg": torch.full((5,), -float(step))})


def newest_step(run: RunDirectory) -> int:
    found = run.load_newest()
    assert found is not None
    assert found.model["a"].tolist() == [found.step] * 5
    assert found.optimizer["a/exp_avg"].tolist() == [-found.step] * 5
    return found.step


def test_a_saved_checkpoint_loads_as_it_was(run: RunDirectory):
    assert run.load_newest() is None
    run.save(checkpoint(3))
    assert newest_step(run) == 3
    assert run.load_config() == tiny()
    assert run.load_tokenizer().kind == "byte"


def test_the_newest_two_and_the_best_are_kept(run: RunDirectory):
    for step in range(1, 7):
        run.save(checkpoint(step, best=min(step, 2)))
    assert run.list_steps() == [6, 5, 2]
    assert run.load_best().step == 2
    assert json.loads((run.path / "best.json").read_bytes())["step"] == 2
    assert not list(run.checkpoints.glob(".*"))


@needs_posix
@pytest.mark.parametrize(("umask", "rights"), [(0o022, 0o644), (0o027, 0o640)])
def test_all_files_have_the_rights_that_the_umask_gives(tmp_path: Path, umask: int, rights: int):
    before = os.umask(umask)
    try:
        run = RunDirectory(tmp_path / "shared")
        run.create(tiny(), ByteTokenizer(), tiny())
        with run.lock():
            run.save(checkpoint(1, best=1))
    finally:
        os.umask(before)
    made = [path for path in run.path.rglob("*") if path.is_file()]
    assert "optimizer.safetensors" in {file.name for file in made}
    assert {file.stat().st_mode & 0o777 for file in made} == {rights}


def save_in_parts(run: RunDirectory, whole: Checkpoint) -> None:
    """Save without an optimizer, a tensor for each file."""
    parts = ({name: tensor} for name, tensor in whole.model.items())
    run.save_in_parts(whole.state, parts, len(whole.model), {})


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_damage_anywhere_is_found_and_the_previous_checkpoint_used(
    run: RunDirectory, name: str, capsys
):
    run.save(checkpoint(1))
    run.save(checkpoint(2))
    path = run.checkpoints / "step-00000002" / name
    whole = path.read_bytes()
    cases = [whole[:cut] for cut in range(0, len(whole), len(whole) // 5)]
    for at in range(0, len(whole), len(whole) // 8):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        cases.append(bytes(flipped))
    for damaged in cases:
        path.write_bytes(damaged)
        if name == "manifest.json" and _same_json(damaged, whole):
            continue
        assert newest_step(run) == 1
        last_line = capsys.readouterr().err.splitlines()[-1]
        assert last_line.startswith("warning: ")
        assert "step-00000002" in last_line
        assert last_line.endswith("; using step 1")
    path.unlink()
    assert newest_step(run) == 1


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize("number", [1, 2])
def test_damage_in_any_part_is_found_and_the_previous_checkpoint_used(
    run: RunDirectory, number: int, capsys
):
    run.save(checkpoint(1))
    save_in_parts(run, checkpoint(2))
    file = run.checkpoints / "step-00000002" / f"model-{number:05d}-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert newest_step(run) == 1
    assert f"{file.name}: damaged (its contents do not match" in capsys.readouterr().err
    run.save(checkpoint(3))
    assert run.list_steps() == [3, 2, 1]  # a damaged one does not count as kept


def test_the_digest_of_weights_in_parts_is_that_of_all_of_them(run: RunDirectory):
    digests = []
    for step, row, value in ((1, 0, 7.0), (2, 4, 7.0), (3, 4, 8.0), (4, 4, 8.0)):
        whole = checkpoint(1)
        whole.state["step"] = step
        whole.model["a"][row] = value
        save_in_parts(run, whole)
        digests.append(run.load_checkpoint(step).sha256)
    assert len({*digests[:3]}) == 3
    assert digests[2] == digests[3]  # the step is not part of it


@pytest.mark.parametrize(
    "change",
    [
        lambda entries, name: entries.pop(name),
        lambda entries, name: entries.update({f"../../{name}": entries.pop(name)}),
        lambda entries, name: entries.update({name: None}),
    ],
)
def test_a_manifest_that_lacks_a_part_is_damage(run: RunDirectory, change):
    save_in_parts(run, checkpoint(1))
    file = run.checkpoints / "step-00000001" / "manifest.json"
    manifest = json.loads(file.read_bytes())
    change(manifest, "model-00002-of-00002.safetensors")
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged"):
        run.load_checkpoint(1)


def test_all_checkpoints_damaged_is_an_error_not_a_fresh_start(run: RunDirectory):
    for step in (1, 2):
        run.save(checkpoint(step))
        (run.checkpoints / f"step-{step:08d}" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError) as error:
        run.load_newest()
    assert len(error.value.lines) == 3
    assert "step-00000002" in error.value.lines[0]


def test_other_names_are_not_checkpoints(run: RunDirectory):
    run.save(checkpoint(7))
    for name in ("step-1", "step-00000009.bak", ".tmp", "step-0000000x"):
        shutil.copytree(run.checkpoints / "step-00000007", run.checkpoints / name)
    assert run.list_steps() == [7]
    late = checkpoint(10**8)
    run.save(late, keep=9)
    assert run.list_steps() == [10**8, 7]
    assert newest_step(run) == 10**8
    shutil.copytree(run.checkpoints / "step-00000007", run.checkpoints / "step-000000007")
    shutil.rmtree(run.checkpoints / "step-100000000")
    (run.checkpoints / "step-00000007").rename(run.checkpoints / "step-00000008")
    with pytest.raises(CheckpointError, match="step 7"):
        run.load_newest()


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"[" * 100_000, b"3", b"{}", b'{"format": 1, "step": 7}', b'{"step": -7}'],
)
def test_files_by_others_with_matching_hashes_are_refused_as_damaged(run: RunDirectory, content):
    run.save(checkpoint(7))
    folder = run.checkpoints / "step-00000007"
    (folder / "state.json").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"step-00000007.*state\.json"):
        run.load_newest()
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000007.*(manifest|state)\.json"):
        run.load_newest()


@pytest.mark.parametrize("rewritten", [b"", b"\xff" * 8 + b"{}"])
def test_tensors_by_others_with_matching_hashes_are_refused_as_damaged(
    run: RunDirectory, rewritten: bytes
):
    run.save(checkpoint(7))
    file = run.checkpoints / "step-00000007" / "model.safetensors"
    file.write_bytes(rewritten)
    manifest = json.loads((file.parent / "manifest.json").read_bytes())
    digest = hashlib.sha256(rewritten).hexdigest()
    manifest[file.name] = {"bytes": len(rewritten), "sha256": digest}
    (file.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        run.load_newest()


def test_a_damaged_best_falls_back_to_the_newest(run: RunDirectory):
    run.save(checkpoint(1, best=1))
    run.save(checkpoint(2, best=1))
    assert run.load_best().step == 1
    (run.checkpoints / "step-00000001" / "model.safetensors").unlink()
    assert run.load_best().step == 2


def test_a_best_that_a_training_deletes_meanwhile_is_looked_for_again(run, monkeypatch, capsys):
    run.save(checkpoint(1, best=1))
    load = RunDirectory.load_checkpoint

    def load_late(self: RunDirectory, step: int, **parts: bool):
        if step == 1:
            run.save(checkpoint(2, best=2), keep=1)
        return load(self, step, **parts)

    monkeypatch.setattr(RunDirectory, "load_checkpoint", load_late)
    assert run.load_best().step == 2
    assert capsys.readouterr().err == ""


def test_tensors_must_fit_the_model():
    found = {"a": torch.zeros(2), "b": torch.zeros(3), "d": torch.zeros(1)}
    expected = {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        check_shapes(found, expected, Path("here"))
    assert [line.partition(";")[0] for line in error.value.lines] == [
        "here: tensor b: (3,) in the checkpoint, (4,) in the model",
        "here: tensor c: missing in the checkpoint, (1,) in the model",
        "here: tensor d: (1,) in the checkpoint, missing in the model",
    ]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("name", ["config.yaml", "best.json", "manifest.json", "state.json"])
def test_a_fifo_is_refused_and_not_waited_for(run: RunDirectory, name: str):
    run.save(checkpoint(1, best=1))
    (path,) = run.path.rglob(name)
    path.unlink()
    os.mkfifo(path)
    if name == "config.yaml":
        with pytest.raises(ConfigError, match=r"config.yaml: not a regular file"):
            run.load_config()
    elif name == "best.json":
        assert run.load_best().step == 1
    else:
        with pytest.raises(CheckpointError, match=rf"{name}: damaged"):
            run.load_newest()


def test_a_missing_run_and_a_missing_checkpoint_are_reported(tmp_path: Path, run: RunDirectory):
    with pytest.raises(CheckpointError, match="no run here"):
        RunDirectory(tmp_path / "none").load_config()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        run.load_best()


def test_a_run_may_name_settings_that_no_longer_exist(run: RunDirectory):
    settings = run.load_config()
    with run.config_file.open("a") as file:
        file.write("teacher: {run: null, sha256: null}\n")
    assert run.load_config() == settings


def test_a_configuration_is_written_only_if_it_can_be_read_back(run: RunDirectory):
    before = run.load_config()
    many = tiny(data={"path": [f"texts/{number:060d}.txt" for number in range(12_000)]})
    run.write_config(many, many)
    assert run.load_config() == many
    assert run.load_request() == many
    run.write_config(before, before)
    too_many = tiny(data={"path": [f"{number:0200d}" for number in range(30_000)]})
    broken = before.with_train(steps=3, warmup_steps=4)
    for wrong, problem in ((too_many, "name the folder"), (broken, "warmup_steps: 4 is more than")):
        for configs in ((wrong, None), (wrong, before), (before, wrong)):
            with pytest.raises(ConfigError, match=problem):
                run.write_config(*configs)
            assert run.load_config() == run.load_request() == before


def test_one_writer_at_a_time(run: RunDirectory):
    with (
        run.lock(),
        pytest.raises(MachineError, match=rf"process {os.getpid()} on .* is training"),
        run.lock(),
    ):
        pass
    with run.lock():  # free again
        pass


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path):
    path = tmp_path / "a"
    files.atomic_write_bytes(path, b"one")
    with pytest.raises(ZeroDivisionError), files.atomic_write(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["a"]


def test_a_lock_that_is_no_file_is_named(run: RunDirectory):
    (run.path / "lock").mkdir()
    with pytest.raises(MachineError, match="lock"), run.lock():
        pass


def test_a_run_that_is_deleted_while_it_trains_is_not_a_full_disk(run: RunDirectory):
    shutil.rmtree(run.path)
    with pytest.raises(MachineError) as raised:
        run.save(checkpoint(1))
    assert "see that the run is there" in str(raised.value)


@needs_posix
@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "config.yaml", "checkpoints"])
@pytest.mark.parametrize("is_there", [True, False])
def test_no_link_in_a_run_is_followed_for_writing(
    run: RunDirectory, tmp_path: Path, name: str, is_there: bool
):
    run.save(checkpoint(1, best=1))
    target = tmp_path / "elsewhere"
    link = run.path / name
    if link.exists():
        link.rename(target)
    elif is_there:
        target.write_text("a diary")
    link.symlink_to(target if is_there else tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MachineError, match=f"{name}: a link"), run.lock():
        pass
    assert sorted(tmp_path.rglob("*")) == before
    if is_there:
        assert run.load_best().step == 1  # reading may follow it


@needs_posix
def test_no_link_is_followed_for_a_file_that_replaces_another(tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("a diary")
    for name in ("best.json", f".tmp-{os.getpid()}-best.json"):
        (tmp_path / name).symlink_to(other)
    files.atomic_write_bytes(tmp_path / "best.json", b"{}")
    assert (other.read_text(), (tmp_path / "best.json").read_text()) == ("a diary", "{}")
