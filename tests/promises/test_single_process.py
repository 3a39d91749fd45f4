"""Commands with a PyTorch without torch.distributed; see single_process.py."""

from pathlib import Path

from tests.promises.commands import COMMANDS, TRAIN, run_in

WITHOUT_DISTRIBUTED = "tests.promises.single_process"
COMPUTING = ("train", "generate", "evaluate", "score", "inspect")


def test_a_single_process_needs_no_torch_distributed(tmp_path: Path):
    """Except to estimate memory, which is refused in one line."""
    commands = [words for words in COMMANDS if words[0] in COMPUTING and "run" in words]
    commands = [words for words in commands if not {"--from", "--prompts"} & set(words)]
    size = next(words for words in COMMANDS if words[0] == "size")  # which estimates memory
    codes, _, said = run_in(WITHOUT_DISTRIBUTED, tmp_path, [*commands, size])
    assert codes[:-1] == [0] * len(commands), said
    assert codes[-1] != 0
    assert "memory: cannot be estimated, as this PyTorch lacks torch.distributed" in said


def test_several_processes_are_refused_in_one_line(tmp_path: Path):
    torchrun = dict.fromkeys(("LOCAL_RANK", "RANK", "MASTER_PORT"), "1")
    torchrun |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    codes, _, said = run_in(WITHOUT_DISTRIBUTED, tmp_path, [[*TRAIN, "--out", "run"]], **torchrun)
    assert codes != [0]
    assert "this PyTorch lacks torch.distributed; start a single process" in said
