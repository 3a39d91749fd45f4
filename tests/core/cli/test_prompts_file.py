import errno
import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gptmini import files
from gptmini.cli import prompts_file
from gptmini.errors import DataError, MachineError
from gptmini.generate.run import Run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import tiny

SETTINGS = {"max_new_tokens": 12, "temperature": 1.2}


@pytest.fixture
def run() -> Run:
    torch.manual_seed(0)
    config = tiny().with_tokenizer("byte", 257)
    return Run(Path("run"), config, ByteTokenizer(), GPT(config.model).eval())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = ['"one"', "", '{"prompt": "a second, longer one \\u00e9", "id": 7}', '"three"']
    path.write_text("\n".join(lines))
    return path


def written(run: Run, prompts: Path, name: str, batch_size: int) -> bytes:
    out = prompts.with_name(name)
    prompts_file.generate_file(run, prompts, out, 2, batch_size, SETTINGS, logprobs=True)
    return out.read_bytes()


def equal(one: bytes, other: bytes) -> bool:
    """In every byte but logits, which differ by about 1e-6 between batches in PyTorch."""
    both = [[json.loads(line) for line in data.splitlines()] for data in (one, other)]
    logprobs = [[number for line in lines for number in line.pop("logprobs")] for lines in both]
    return both[0] == both[1] and logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


def test_a_sample_is_the_same_alone_and_in_any_batch(run: Run, prompts: Path):
    found = written(run, prompts, "a.jsonl", 4)
    assert equal(found, written(run, prompts, "b.jsonl", 1))
    lines = [json.loads(line) for line in found.splitlines()]
    assert [(line["prompt"][:3], line["number"]) for line in lines] == [
        ("one", 0), ("one", 1), ("a s", 0), ("a s", 1), ("thr", 0), ("thr", 1)
    ]  # fmt: skip
    assert lines[2]["id"] == 7
    assert len(lines[0]["logprobs"]) == len(lines[0]["tokens"])
    assert lines[4]["text"] == run.generate("three", **SETTINGS)


@pytest.mark.parametrize("cut", [0, 1, 300, 500, -1])
def test_it_resumes_where_it_was_interrupted(run: Run, prompts: Path, cut: int):
    whole = written(run, prompts, "whole.jsonl", 2)
    prompts.with_name("cut.jsonl").write_bytes(whole[:cut])
    continued = written(run, prompts, "cut.jsonl", 2)
    assert equal(continued, whole)
    assert written(run, prompts, "cut.jsonl", 2) == continued  # there is nothing left to do


def test_of_two_writers_of_a_file_the_second_is_told(run: Run, prompts: Path):
    out = prompts.with_name("out.jsonl")
    with out.open("ab") as first:
        assert files.try_lock(first.fileno())
        with pytest.raises(MachineError, match=r"out\.jsonl: another process is writing it"):
            prompts_file.generate_file(run, prompts, out, 2, 2, SETTINGS)
        assert out.read_bytes() == b""
    prompts_file.generate_file(run, prompts, out, 2, 2, SETTINGS)
    assert out.read_bytes().count(b"\n") == 6


def test_an_output_of_other_settings_is_left_alone(run: Run, prompts: Path):
    before = written(run, prompts, "out.jsonl", 2)
    out = prompts.with_name("out.jsonl")
    for other in ({**SETTINGS, "seed": 3}, {}):
        with pytest.raises(DataError, match=r"out.jsonl:1: made of other prompts"):
            prompts_file.generate_file(run, prompts, out, 2, 2, other)
    with pytest.raises(DataError, match="made of other"):  # <|endoftext|> means something else
        prompts_file.generate_file(run, prompts, out, 2, 2, SETTINGS, special=True)
    same = {**SETTINGS, "seed": run.config.sample.seed}
    prompts_file.generate_file(run, prompts, out, 2, 2, same, logprobs=True)
    other_run = Run(run.path, run.config, run.tokenizer, run.model)  # trained a little further
    with torch.no_grad():
        run.model.final_norm.weight[0] += 0.01
    with pytest.raises(DataError, match="made of other"):
        prompts_file.generate_file(other_run, prompts, out, 2, 2, SETTINGS)
    assert out.read_bytes() == before
    out.write_text("a letter to a friend\n")
    with pytest.raises(DataError, match="choose another --out"):
        prompts_file.generate_file(run, prompts, out, 2, 2, SETTINGS)
    assert out.read_text() == "a letter to a friend\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('"fine"\n{"text": 1}', ":2: no prompt; write"),
        ("[1]", ":1: no prompt"),
        ('"one', ":1: not valid JSON"),
        ("[" * 100_000, ":1: not valid JSON"),
        ('{"prompt": "a", "id": "\\ud800"}', ":1: not valid JSON"),
        (
            '"a"\n{"prompt": "a", "seed": 1, "stop": []}',
            ":2: has seed, stop, but settings apply to",
        ),
        ('{"prompt": "a", "max_tokens": 4}', "has max_tokens, but settings apply to all prompts"),
        ('{"prompt": "a", "text": "b"}', ":1: key 'text' is reserved for the output; rename it"),
    ],
)
def test_wrong_prompts_are_named(run: Run, tmp_path: Path, text: str, message: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        prompts_file.generate_file(run, path, tmp_path / "out.jsonl", 1, 2, SETTINGS)
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_may_come_from_standard_input(run: Run, prompts: Path, monkeypatch):
    expected = written(run, prompts, "a.jsonl", 2)
    out = prompts.with_name("b.jsonl")
    for text, message in (("[1]", "standard input:1: no prompt"), (prompts.read_text(), "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(DataError, match=message) if message else nullcontext():
            prompts_file.generate_file(run, Path("-"), out, 2, 2, SETTINGS, logprobs=True)
    assert out.read_bytes() == expected


def test_a_full_disk_names_the_output(run, prompts, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(OSError, match="no space") as raised:
        written(run, prompts, "out.jsonl", 2)
    assert raised.value.filename == str(prompts.with_name("out.jsonl"))
