import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptmini.tokenizer.load import load_tokenizer
from tests.support import SMALL, WORDS


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_tokenizer_is_trained_used_and_inspected(gptmini, text_file: Path, monkeypatch):
    words = ["tokenizer", "train", str(text_file), "--vocab-size", "300", "--out", "t"]
    code, out, err = gptmini(*words)
    assert (code, out) == (0, "")
    assert "t.json: 300 tokens" in err
    learned = load_tokenizer(Path("t.json"))
    code, out, _ = gptmini("tokenizer", "encode", "t.json", "the lazy dog")
    assert (code, out.split()) == (0, [str(t) for t in learned.encode("the lazy dog")])
    text = "the döner\r\n \x1b東\n".encode()
    typed(monkeypatch, text)
    _, tokens, _ = gptmini("tokenizer", "encode", "t.json")
    typed(monkeypatch, tokens.encode())
    piped = subprocess.run(
        [sys.executable, "-m", "gptmini", "tokenizer", "decode", "t.json"],
        input=tokens.encode(),
        capture_output=True,
        check=True,
    )
    assert piped.stdout == text
    code, out, _ = gptmini("tokenizer", "info", "t.json", "--data", str(text_file), "--json")
    facts = json.loads(out)
    size, count = text_file.stat().st_size, len(learned.encode(text_file.read_text()))
    assert (facts["kind"], facts["vocab_size"]) == ("bpe", 300)
    assert (facts["bytes"], facts["tokens"]) == (size, count)
    assert facts["bytes_per_token"] == pytest.approx(size / count, abs=1e-3)
    assert 0 < facts["coverage"] < 0.5  # most bytes never occur
    assert " jumps" in facts["longest_tokens"]
    lines = gptmini("tokenizer", "info", "t.json", "--data", str(text_file))[1].splitlines()
    assert lines[1] == "vocabulary       300 tokens"
    assert lines[2].startswith('longest tokens   " ')
    assert lines[3:5] == ["special tokens   <|endoftext|>", "texts end with   <|endoftext|>"]
    assert lines[5] == f"text             {size:,} bytes, {count:,} tokens"
    assert lines[7] == (
        f"vocabulary used  {facts['coverage']:.1%} of its tokens occur in this text"
    )
    assert "longest" not in gptmini("tokenizer", "info", "byte")[1]
    train = ["train", "--data", str(text_file), "--set", "tokenizer.kind=t.json", *SMALL]
    assert gptmini(*train)[0] == 0
    assert gptmini("tokenizer", "encode", "runs/text", "dog") == gptmini(
        "tokenizer", "encode", "t.json", "dog"
    )


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["tokenizer", "encode", "none", "x"], 3, "none: no such tokenizer"),
        (["tokenizer", "encode", "none.json", "x"], 3, "none.json: no such file"),
        (["tokenizer", "encode", "bpe", "x"], 3, "bpe: learned from a text; give a run"),
        (["tokenizer", "encode", ".", "x"], 3, "tokenizer.json: no such file"),
        (["tokenizer", "encode", "byte", "\udcff"], 3, "TEXT: not UTF-8 at byte 0; convert"),
        (
            ["tokenizer", "decode", "byte", "1", "257"],
            3,
            "257: not a token; use numbers from 0 to 256",
        ),
        (["tokenizer", "decode", "byte", "-1"], 2, "no such option"),
        (["tokenizer", "info", "byte", "--data", "none.txt"], 3, "none.txt: no such file"),
        (["tokenizer", "train", "none.txt", "--out", "t.json"], 3, "none.txt: no such file"),
        (["tokenizer", "train", "x", "--out", "t.json", "--vocab-size", "9"], 2, "--vocab-size"),
        (["tokenizer"], 2, "missing command; see gptmini tokenizer --help"),
        (["data", "fetch", "x"], 3, "choose tinyshakespeare or"),
        (["data", "prepare", "--data", "none.txt"], 3, "none.txt: no such file"),
    ],
)
def test_errors_are_one_line_with_a_remedy(gptmini, words, code, line):
    exit_code, out, err = gptmini(*words)
    assert (exit_code, out) == (code, "")
    assert line in err
    assert err.startswith("gptmini: ")
    assert err.count("\n") == 1


def test_train_uses_what_prepare_has_prepared(gptmini, text_file: Path, tmp_path: Path):
    code, out, _ = gptmini("data", "prepare", "--data", str(text_file), *SMALL)
    assert code == 0
    assert out.startswith(f"  data      {text_file}: {text_file.stat().st_size / 1000:.3g} kB -> ")
    made = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
    assert out in gptmini("train", "--data", str(text_file), *SMALL)[2]
    assert made == {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}


def test_standard_input_is_a_text(gptmini, tmp_path: Path, monkeypatch):
    for _ in range(2):  # the second time the run is there, and the text the same
        typed(monkeypatch, (WORDS * 40).encode())
        code, _, err = gptmini("train", "--data", "-", *SMALL)
        assert code == 0, err
    assert "runs/text: already finished" in err
    typed(monkeypatch, b"\xff")
    code, _, err = gptmini("train", "--data", "-", *SMALL)
    assert (code, err.startswith("gptmini: standard input: not UTF-8 at byte 0")) == (3, True)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_file_names_need_not_be_utf8(gptmini):
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text(WORDS * 40)
    code, _, err = gptmini("train", "--data", name, *SMALL)
    assert code == 0, err
    assert "  data      caf\\udce9.txt: " in err
    code, _, err = gptmini("train", "--data", name, *SMALL, "--set", "train.steps=5")
    assert code == 0, err
    code, _, err = gptmini("evaluate")
    assert code == 0, err
    Path(name).write_bytes(b"\xff")
    code, _, err = gptmini("train", "--data", name, *SMALL, "--out", "again")
    assert code == 3
    assert err.startswith("gptmini: caf\\udce9.txt: not UTF-8")


def test_several_texts_and_documents(gptmini, tmp_path: Path):
    lines = [json.dumps({"body": f"{n} {WORDS}"}) for n in range(60)]
    Path("a.jsonl").write_text("\n".join(lines))
    Path("b.txt").write_text(WORDS * 40)
    words = ["train", "--data", "a.jsonl", "--data", "b.txt", "--set", "data.text_key=body"]
    code, _, err = gptmini(*words, "--set", "data.weights=[1, 3]", *SMALL, "--out", "w")
    assert code == 0, err
    assert "data      a.jsonl, b.txt: " in err
    code, _, err = gptmini(*words, "--set", "data.split=documents", *SMALL, "--out", "d")
    assert code == 0, err


def test_token_files_truncated_while_training_are_one_error(gptmini, text_file: Path, monkeypatch):
    from gptmini.train import trainer

    update = trainer.train_step

    def cut(training: trainer.Training) -> dict[str, object]:
        if training.step == 3:
            path = training.corpus.training[0].path
            with path.open("r+b") as file:
                file.truncate(200)
        return update(training)

    monkeypatch.setattr(trainer, "train_step", cut)
    code, _, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 3
    assert ".tokens: truncated while in use (" in err
    monkeypatch.setattr(trainer, "train_step", update)
    code, _, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 0, err
    assert "resuming after step 2" in err


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_preparing_leaves_nothing(tmp_path: Path, number, code):
    command = [sys.executable, "-m", "gptmini", "data", "prepare", "--data", "-"]
    command += ["--cache", str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        while not list(tmp_path.glob("cache/.tmp-*")):
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert err.decode().startswith("gptmini: stopped by ")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_closed_pipe_ends_it_quietly(text_file: Path):
    command = [sys.executable, "-m", "gptmini", "tokenizer", "encode", "byte"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stdin.write(text_file.read_bytes() * 100)
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
